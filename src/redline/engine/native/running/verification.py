"""A verifying step: the newest token of each row and its drafts go through the network together, and something is sampled
after each.

    goes in         newest   draft 1   draft 2   draft 3
    sampled after   a        b         c         d          a is draft 1, b is draft 2, c is not draft 3: a, b and c count

The host brings the drafts (`Drafts`), or only says how many a row may have (`Guesses`): the device then finds them by itself in
texts that it was given before (`TextWrites`), step after step.

Letters: B rows, T tokens that go in (each row's newest and its drafts, end to end), W tokens that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_TOKENS = 256
"""That go in at most."""
MAX_GUESSES = 15
"""Tokens that a device guesses for one row in a step at most."""
MAX_SLOTS = 256
"""Texts that a device guesses from, and rows that do so at once."""
SLOT_TOKENS = 1 << 14
"""Tokens of each: 16 MiB in all."""
NEWEST = -1
"""Stands for a row's newest token, which the device knows."""
NO_GUESS = -2
"""In place of a sampled token: nothing was guessed there. -1 stands for one after a guess that was wrong."""


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

    def without_any(self) -> Drafts:
        """The same rows, and nothing guessed."""
        return Drafts.of([()] * len(self.lengths_B))

    def num_counting(self, tokens_T: np.ndarray, logprobs_T: np.ndarray) -> np.ndarray:
        """int64[B]: how many of the tokens that were sampled for each row count: those up to the first that is not the draft
        in its place. A NaN ends a row."""
        is_last_T = np.isnan(logprobs_T)
        is_last_T[-1] = True
        is_last_T[:-1] |= tokens_T[:-1] != self.tokens_T[1:]
        places_T = np.where(is_last_T, np.arange(len(tokens_T)), len(tokens_T))
        return np.minimum.reduceat(places_T, self.begins_B) - self.begins_B + 1


@dataclass(slots=True, frozen=True)
class TextWrites:
    """What changes in the texts that a device guesses from."""

    places_W: np.ndarray
    """int64: slot · tokens of a slot + offset."""
    tokens_W: np.ndarray
    """int32."""
    lengths: list[tuple[int, int]]
    """(slot, tokens that it has now)."""
    rows: list[tuple[int, int]]
    """(row, its slot), of rows that look for their place again; -1 for a row without a slot."""


@dataclass(slots=True, frozen=True)
class Guesses:
    """How many tokens the rows of a batch guess in every step of a launch."""

    counts_B: np.ndarray
    """int64."""
    lengths_B: np.ndarray
    """int64: tokens of each row that go in."""
    begins_B: np.ndarray
    """int64: where those of each row begin."""
    which_T: np.ndarray
    """int64: the row of the batch that each belongs to."""
    ahead_T: np.ndarray
    """int64: how many tokens of its row are in front of it."""
    writes: TextWrites

    @classmethod
    def of(cls, counts_B: np.ndarray, writes: TextWrites) -> Guesses:
        lengths_B = 1 + counts_B
        begins_B = np.cumsum(lengths_B) - lengths_B
        which_T = np.repeat(np.arange(len(counts_B)), lengths_B)
        return cls(counts_B, lengths_B, begins_B, which_T, np.arange(len(which_T)) - begins_B[which_T], writes)
