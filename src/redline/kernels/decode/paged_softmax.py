"""What the attention kernels share: the loop over cached tiles, and how a context is divided among programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q_QD, peak_Q, total_Q, sum_QD, page, table, begin, end, kv_head, keys, values, scale,
    K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Continue a running softmax over the cached tokens begin … end - 1 of one line of the block table.

    `page` is `pages` of the first tile. Scores are in units of log 2: `scale` includes log2(e). Where a page holds whole tiles,
    `begin` is a multiple of a tile.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    for start in range(begin, end, BLOCK_N):
        seen_N = start + n < end
        token_N = (page.to(tl.int64) * K + kv_head) * PAGE + slots(start, PAGE, BLOCK_N)
        # Looked up a turn ahead: in the turn that needs it, the lookup would take up two stages of the pipeline.
        page = pages(table, start + BLOCK_N, end, PAGE, BLOCK_N)
        at_ND = token_N[:, None] * D + d[None, :]
        # What lies beyond the end was never written; zeros keep a NaN there out of the products.
        k_ND = tl.load(keys + at_ND, mask=seen_N[:, None], other=0.0)
        score_QN = tl.dot(q_QD, tl.trans(k_ND), input_precision="ieee") * scale
        score_QN = tl.where(seen_N[None, :], score_QN, float("-inf"))
        new_peak_Q = tl.maximum(peak_Q, tl.max(score_QN, axis=1))
        fade_Q = tl.exp2(peak_Q - new_peak_Q)
        weight_QN = tl.exp2(score_QN - new_peak_Q[:, None])
        v_ND = tl.load(values + at_ND, mask=seen_N[:, None], other=0.0)
        sum_QD = tl.dot(weight_QN.to(v_ND.dtype), v_ND, sum_QD * fade_Q[:, None], input_precision="ieee")
        total_Q = total_Q * fade_Q + tl.sum(weight_QN, axis=1)
        peak_Q = new_peak_Q
    return peak_Q, total_Q, sum_QD


@triton.jit
def split_bounds(split, begin, end, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The share of begin … end that one of `SPLITS` programs has: whole tiles, as even as they go."""
    tiles = tl.cdiv(end - begin, BLOCK_N)
    first = begin + tiles * split // SPLITS * BLOCK_N
    return first, tl.minimum(begin + tiles * (split + 1) // SPLITS * BLOCK_N, end)


@triton.jit
def pages(table, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block of the tile at `start`, or of each of its tokens where a tile spans several."""
    if BLOCK_N <= PAGE:
        return tl.load(table + start // PAGE, mask=start < end, other=0)
    else:
        token_N = start + tl.arange(0, BLOCK_N)
        return tl.load(table + token_N // PAGE, mask=token_N < end, other=0)


@triton.jit
def slots(start, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the tokens of the tile at `start` stand in their blocks."""
    if BLOCK_N <= PAGE:
        return start % PAGE + tl.arange(0, BLOCK_N)
    else:
        return (start + tl.arange(0, BLOCK_N)) % PAGE
