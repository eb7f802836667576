"""Token runs laid end to end, where a run may continue another: the layout that every attention over packed tokens reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NO_PARENT = -1


@dataclass(slots=True, frozen=True)
class Segments:
    """Token runs laid end to end."""

    offsets: np.ndarray
    """int64[segments + 1]."""
    parents: np.ndarray
    """int64[segments]: the segment this one continues, which must itself have no parent, or `NO_PARENT`."""

    @classmethod
    def independent(cls, lengths: Sequence[int]) -> Segments:
        """Sequences that share nothing."""
        return cls(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), np.full(len(lengths), NO_PARENT, dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def parent_lengths(self) -> np.ndarray:
        """Tokens before each segment's first one; its positions start here."""
        return np.where(self.parents == NO_PARENT, 0, self.lengths[self.parents])

    def positions(self) -> np.ndarray:
        """int64[T]: the position of every packed token in its own sequence."""
        starts = np.repeat(self.offsets[:-1] - self.parent_lengths, self.lengths)
        return np.arange(self.offsets[-1], dtype=np.int64) - starts
