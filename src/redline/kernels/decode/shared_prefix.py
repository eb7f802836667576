"""The part of decode attention that rows of one prompt have in common.

A program loads each tile of a group's shared pages once, for the query heads of all its members at once: with n members and G
query heads per key/value head, n · G rows of a matrix product instead of n times G. It pays where n times the prefix is long.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.decode.paged_softmax import attend, pages, split_bounds


@dataclass(slots=True, frozen=True)
class SharedPrefixes:
    """Groups of consecutive rows of a decode batch that begin with the same blocks. C is the most groups there can be."""

    starts_C: Tensor
    """int32: the first row of each group."""
    sizes_C: Tensor
    """int32: its rows; 0 for a group that is not there."""
    lengths_C: Tensor
    """int32: tokens of the shared prefix, a multiple of the block size, and at most the position of every live member."""
    lengths_B: Tensor
    """int32: the same for each row, 0 where it is in no group."""
    max_size: int
    """The most rows a group can have."""
    num_splits: int = 1
    """Programs that divide each prefix among them."""


@triton.jit(do_not_specialize=["B", "table_stride"])
def shared_prefix(  # type: ignore[no-untyped-def]
    queries, starts, sizes, lengths, positions, prefixes, peaks, totals, sums, B,
    keys, values, scale, rows, block_table, table_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, FIRST_PART: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Parts `FIRST_PART` and on of a group's rows: one tile of its query heads, one key/value head, one split of the prefix."""
    G: tl.constexpr = H // K
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    group, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    start, size = tl.load(starts + group), tl.load(sizes + group)
    # Every live member's table begins with the shared blocks; a member that has ended may have lost its own.
    member_M = tl.arange(0, BLOCK_M)
    position_M = tl.load(positions + start + member_M, mask=member_M < size, other=-1)
    reader = tl.min(tl.where(position_M >= 0, member_M, BLOCK_M), axis=0)
    if (reader == BLOCK_M) | (tile * BLOCK_Q >= size * G):
        return
    query_Q = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside_Q = query_Q < size * G
    head_Q = (start + query_Q // G) * H + kv_head * G + query_Q % G
    at_QD = head_Q[:, None] * D + tl.arange(0, D)[None, :]
    q_QD = tl.load(queries + at_QD, mask=inside_Q[:, None], other=0.0)
    table = block_table + tl.load(rows + start + reader).to(tl.int64) * table_stride
    begin, end = split_bounds(split, 0, tl.load(lengths + group), SPLITS, BLOCK_N)
    page = pages(table, begin, end, PAGE, BLOCK_N)
    peak_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total_Q = tl.zeros([BLOCK_Q], tl.float32)
    sum_QD = tl.zeros([BLOCK_Q, D], tl.float32)
    peak_Q, total_Q, sum_QD = attend(
        q_QD, peak_Q, total_Q, sum_QD, page, table, begin, end, kv_head, keys, values, scale, K, D, PAGE, BLOCK_N
    )
    part = (split + FIRST_PART).to(tl.int64) * B * H
    tl.store(peaks + part + head_Q, peak_Q, mask=inside_Q)
    tl.store(totals + part + head_Q, total_Q, mask=inside_Q)
    tl.store(sums + part * D + at_QD, sum_QD, mask=inside_Q[:, None])
