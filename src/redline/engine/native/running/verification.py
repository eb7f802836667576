"""A verifying step: the newest token of each row and its drafts go through the network together, and something is sampled
after each.

    goes in         newest   draft 1   draft 2   draft 3
    sampled after   a        b         c         d          a is draft 1, b is draft 2, c is not draft 3: a, b and c count

Letters: B rows, T tokens that go in (each row's newest and its drafts, end to end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_TOKENS = 256
"""That go in at most."""
NEWEST = -1
"""Stands for a row's newest token, which the device knows."""


@dataclass(slots=True, frozen=True)
class Drafts:
    """Tokens that the rows of a batch may sample next."""

    tokens_T: np.ndarray
    """int64: the drafts, `NEWEST` in front of those of each row."""
    lengths_B: np.ndarray
    """int64: tokens of each row that go in, 1 for a row without drafts."""
    begins_B: np.ndarray
    """int64: where those of each row begin."""
    which_T: np.ndarray
    """int64: the row of the batch that each belongs to."""
    ahead_T: np.ndarray
    """int64: how many tokens of its row are in front of it."""

    @classmethod
    def of(cls, drafts: Sequence[Sequence[int]]) -> Drafts:
        """The drafts of each row."""
        lengths_B = np.array([1 + len(draft) for draft in drafts])
        begins_B = np.cumsum(lengths_B) - lengths_B
        tokens_T = np.array([token for draft in drafts for token in (NEWEST, *draft)])
        which_T = np.repeat(np.arange(len(drafts)), lengths_B)
        return cls(tokens_T, lengths_B, begins_B, which_T, np.arange(len(tokens_T)) - begins_B[which_T])

    def num_counting(self, tokens_T: np.ndarray, logprobs_T: np.ndarray) -> np.ndarray:
        """int64[B]: how many of the tokens that were sampled for each row count: those up to the first that is not the draft
        in its place. A NaN ends a row."""
        is_last_T = np.isnan(logprobs_T)
        is_last_T[-1] = True
        is_last_T[:-1] |= tokens_T[:-1] != self.tokens_T[1:]
        places_T = np.where(is_last_T, np.arange(len(tokens_T)), len(tokens_T))
        return np.minimum.reduceat(places_T, self.begins_B) - self.begins_B + 1
