"""Which bytes of a bucket differ from those of another version, told by the sums of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from redline.weight_sync.buckets import Range
from redline.weight_sync.verify import BLOCK

BLOCK_BYTES = 8 * BLOCK
GAP_BLOCKS = 4
"""Blocks that travel although they did not change, where they lie between two that did: 1 MiB takes less than another copy."""
MAX_RANGES = 64
"""Most copies of one bucket; where there would be more, all between the first change and the last travels."""


def changed_ranges(now: NDArray[np.int64], before: NDArray[np.int64] | None, nbytes: int) -> list[Range]:
    """The bytes of a bucket that changed, in whole blocks; all `nbytes` where nothing is known of it `before`."""
    if before is None:
        return [(0, nbytes)]
    changed = np.flatnonzero(now != before)
    if not len(changed):
        return []
    runs = np.split(changed, np.flatnonzero(np.diff(changed) > GAP_BLOCKS) + 1)
    if len(runs) > MAX_RANGES:
        runs = [changed]
    return [(int(run[0]) * BLOCK_BYTES, min(nbytes, (int(run[-1]) + 1) * BLOCK_BYTES)) for run in runs]


def sum_of(blocks: NDArray[np.int64], ranges: Sequence[Range]) -> int:
    """The checksum of ranges of a bucket: the sum of their blocks, modulo 2⁶⁴ and signed."""
    parts = [blocks[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES)] for begin, end in ranges]
    return int(np.add.reduce(np.concatenate(parts)))
