"""Attention of prompts over paged keys and values: many queries of each sequence, all of whose keys are in the cache.

A program serves one block of queries and one query head. The chunk's own keys and values are written before
(`rotate_and_store`), so that it reads them as it reads what came before the chunk: page by page, and nothing is gathered.

Only the contents of tensors vary: a launch depends on shapes, so it can be captured in a CUDA graph and replayed with other
blocks and tables.

M are queries and N cached tokens of a tile, H query heads, K key/value heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.decode.paged_softmax import pages, slots
from redline.kernels.launches import launch

NOBODY = -1
"""In place of a line of the block table: tokens that fill a batch up. Their output is zero."""


class Tile(NamedTuple):
    """How the kernel is cut and compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


TILES = {
    16: Tile(64, 64, 4, 2),
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 64, 4, 2),
    256: Tile(64, 32, 8, 1),
}
"""By head size."""


def query_blocks(offsets: np.ndarray, starts_S: np.ndarray, lines_S: np.ndarray, size: int) -> np.ndarray:
    """int64[blocks, 4], most keys first: first query and end of its run in the packed batch, what to add to either for its
    position, and the run's line of the block table.

    `offsets` [S + 1] is where the runs begin, `starts_S` the position of each one's first token."""
    counts_S = -(-np.diff(offsets) // size)
    run_B = np.repeat(np.arange(len(counts_S)), counts_S)
    first_B = offsets[run_B] + (np.arange(len(run_B)) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)) * size
    ahead_B = starts_S[run_B] - offsets[run_B]
    blocks = np.stack([first_B, offsets[run_B + 1], ahead_B, lines_S[run_B]], axis=1)
    return blocks[np.argsort(-(first_B + ahead_B), kind="stable")]


def blocks_with(blocks: np.ndarray, tokens_P: np.ndarray, size: int) -> np.ndarray:
    """Of `query_blocks`, those with the last token of a run, where that is one of these."""
    first_B, end_B = blocks[:, 0], blocks[:, 1]
    return blocks[(first_B + size >= end_B) & np.isin(end_B - 1, tokens_P)]


def prompt_attention(
    heads_TND: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, block_table_RM: Tensor, tile: Tile | None = None
) -> Tensor:
    """[T, H, D]: attention of every token to itself and all before it in its sequence.

    `heads_TND` is what `rotate_and_store` made of the fused projection, N = H + 2 · K, whose keys and values are in the cache.
    `keys` and `values` are one layer's cache [blocks, K, block size, D]. `blocks` is `query_blocks`; one whose first query is
    not before its end is skipped."""
    (T, X, D), (_, K, page, _) = heads_TND.shape, keys.shape
    assert all(tensor.is_contiguous() for tensor in (heads_TND, keys, values, blocks))
    out_THD = heads_TND.new_empty(T, X - 2 * K, D)
    tile = tile or TILES[D]
    if len(blocks):
        tensors = (heads_TND, keys, values, out_THD, blocks, block_table_RM)
        constants = (X - 2 * K, K, D, page, tile.queries, tile.keys)
        grid = (len(blocks) * (X - 2 * K),)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        launch(_prompts, grid, tensors, (block_table_RM.stride(0),), constants, **options)
    return out_THD


LOG2_E = tl.constexpr(math.log2(math.e))
"""Exponentials are powers of two, one instruction each."""


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_MD, peak_M, total_M, sum_MD, seen_M, table, begin, end, kv_head, keys, values,
    MASKED: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Continue a running softmax over the tokens begin … end - 1 of a line of the block table. Scores are in units of log 2."""
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    page = pages(table, begin, end, PAGE, N)
    for start in range(begin, end, N):
        token_N = (page.to(tl.int64) * K + kv_head) * PAGE + slots(start, PAGE, N)
        page = pages(table, start + N, end, PAGE, N)  # a turn ahead, as in `paged_softmax`
        at_ND = token_N[:, None] * D + d[None, :]
        j_N = start + n
        if MASKED:
            k_ND = tl.load(keys + at_ND, mask=(j_N < end)[:, None], other=0.0)
        else:
            k_ND = tl.load(keys + at_ND)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if MASKED:
            score_MN = tl.where(j_N[None, :] <= seen_M[:, None], score_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, axis=1) * SCALE)
        fade_M = tl.exp2(peak_M - new_peak_M)
        weight_MN = tl.exp2(score_MN * SCALE - new_peak_M[:, None])
        if MASKED:
            v_ND = tl.load(values + at_ND, mask=(j_N < end)[:, None], other=0.0)
        else:
            v_ND = tl.load(values + at_ND)
        total_M = total_M * fade_M + tl.sum(weight_MN, axis=1)
        sum_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, sum_MD * fade_M[:, None], input_precision="ieee")
        peak_M = new_peak_M
    return peak_M, total_M, sum_MD


@triton.jit(do_not_specialize=["table_stride"])
def _prompts(  # type: ignore[no-untyped-def]
    heads, keys, values, out, blocks, block_table, table_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, head = blocks + tl.program_id(0) // H * 4, tl.program_id(0) % H
    first, end = tl.load(block).to(tl.int32), tl.load(block + 1).to(tl.int32)
    if first >= end:
        return
    ahead, line = tl.load(block + 2).to(tl.int32), tl.load(block + 3)
    token_M = first + tl.arange(0, M)
    d = tl.arange(0, D)
    inside_M = token_M < end
    at_out = out + token_M.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    if line < 0:
        tl.store(at_out, tl.zeros([M, D], out.dtype.element_ty), mask=inside_M[:, None])
        return
    own_M = tl.minimum(token_M, end - 1)
    q_MD = tl.load(heads + own_M.to(tl.int64)[:, None] * ((H + 2 * K) * D) + head * D + d[None, :])
    seen_M = own_M + ahead
    table = block_table + line * table_stride
    kv_head = head // (H // K)
    # Key 0 is seen by all, so that a row's peak is finite from the first tile on.
    full = (first + ahead + 1) // N * N
    stop = tl.minimum(first + M, end) + ahead
    peak_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sum_MD = tl.zeros([M, D], tl.float32)
    peak_M, total_M, sum_MD = _attend(
        q_MD, peak_M, total_M, sum_MD, seen_M, table, 0, full, kv_head, keys, values, False, K, D, PAGE, N
    )
    peak_M, total_M, sum_MD = _attend(
        q_MD, peak_M, total_M, sum_MD, seen_M, table, full, stop, kv_head, keys, values, True, K, D, PAGE, N
    )
    tl.store(at_out, (sum_MD / total_M[:, None]).to(out.dtype.element_ty), mask=inside_M[:, None])
