"""Which rows of a decode batch begin with the same blocks, so that the device can read those once for all of them.

They need not belong to one request: a system prompt, or the first turns of a conversation, are shared through the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_SIZE = 16
"""Rows of one group; larger ones are divided, and read their prefix once per part."""
MIN_ROWS = 64
"""A smaller batch waits for launches, not for memory."""
LEAST_SAVING = 0.7
"""Share of all cached blocks that need not be read again. Below it, merging two parts of a softmax costs more than rows save
that find their neighbours' blocks in the L2 cache (`benchmarks/LOG.md`)."""


@dataclass(slots=True, frozen=True)
class Prefixes:
    """C groups of neighbours in a decode batch."""

    starts_C: np.ndarray
    """The first entry of each group."""
    sizes_C: np.ndarray
    blocks_C: np.ndarray
    """Blocks at the beginning that all its members have in common."""

    @property
    def saved_blocks(self) -> int:
        """Blocks that need not be read again."""
        return int(((self.sizes_C - 1) * self.blocks_C).sum())


def side_by_side(blocks_BN: np.ndarray, num_blocks_B: np.ndarray) -> tuple[np.ndarray, Prefixes | None]:
    """An order of the rows in which those with a common beginning are neighbours, and their groups in that order; None where
    reading their beginnings once would not pay."""
    B = len(blocks_BN)
    if B < MIN_ROWS or len(np.unique(blocks_BN[:, 0])) == B:  # no two begin alike: looked at in every step, so at little cost
        return np.arange(B), None
    order_B = _lexicographic(blocks_BN, num_blocks_B)
    common_B = _in_common(blocks_BN[order_B], num_blocks_B[order_B])
    starts_C = _starts(common_B)
    sizes_C = np.diff(starts_C, append=len(common_B))
    inner_B = common_B.copy()
    inner_B[starts_C] = np.iinfo(inner_B.dtype).max  # what a first member has in common with the group before is no matter
    blocks_C = np.minimum.reduceat(inner_B, starts_C)
    kept_C = (sizes_C > 1) & (blocks_C > 0)
    found = Prefixes(starts_C[kept_C], sizes_C[kept_C], blocks_C[kept_C])
    return order_B, found if found.saved_blocks >= LEAST_SAVING * num_blocks_B.sum() else None


def _lexicographic(blocks_BN: np.ndarray, num_blocks_B: np.ndarray) -> np.ndarray:
    """Rows by their blocks. Compared as bytes, most significant first, which is much faster than column by column."""
    present_BN = np.arange(blocks_BN.shape[1]) < num_blocks_B[:, None]
    keys_BN = np.where(present_BN, blocks_BN, -1).astype(">i4")
    return keys_BN.view(np.dtype((np.void, 4 * keys_BN.shape[1]))).ravel().argsort(kind="stable")


def _in_common(blocks_BN: np.ndarray, num_blocks_B: np.ndarray) -> np.ndarray:
    """Leading blocks that each row shares with the one before it; 0 for the first."""
    both_B = np.minimum(num_blocks_B[1:], num_blocks_B[:-1])
    equal_BN = (blocks_BN[1:] == blocks_BN[:-1]) & (np.arange(blocks_BN.shape[1]) < both_B[:, None])
    lengths_B = np.where(equal_BN.all(axis=1), equal_BN.shape[1], equal_BN.argmin(axis=1))
    return np.concatenate([[0], lengths_B])


def _starts(common_B: np.ndarray) -> np.ndarray:
    """Where groups begin: where a row has less than half in common with its neighbour of what either has with another, so that
    a beginning that everybody shares does not hide the longer ones that few share; and after every `MAX_SIZE` rows."""
    most_B = np.maximum(common_B, np.append(common_B[1:], 0))
    before_B = np.append(0, most_B[:-1])
    begins_B = (common_B == 0) | (2 * common_B < np.maximum(most_B, before_B))
    index_B = np.arange(len(common_B))
    since_B = index_B - np.maximum.accumulate(np.where(begins_B, index_B, 0))
    return np.flatnonzero(begins_B | (since_B % MAX_SIZE == 0))
