"""Products of tiles of tokens with the weights of one expert each.

    x [T, E], gate_up [X, 2 · I, E]  ──► _gate_up ──► silu(x gateᵀ) · (x upᵀ)   [P, I]
    that, down [X, E, I]             ──► _down    ──► one output for each pair   [P, E]
                                     ──► _combine ──► Σ weight · output          [T, E]

Decoding is bound by reading the weights of the experts that any token chose, once: of 128 experts with 8 choices, all but a few
at 64 tokens already. A tile holds all tokens of an expert if it can, padded: to multiply more rows costs nothing while memory
is what a program waits for, to read weights for a second tile does. Tiles of one expert are neighbouring programs, so that the
second finds the weights in the cache. Each pair has an output of its own, and a last kernel adds them up, always in the same
order.

Letters: X experts, C choices of a token, P = T · C pairs, I inner columns, M pairs of a tile, N columns and K inner steps of a
program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.experts.routing import NOBODY, Tiles

COMBINE_BLOCK = 1024


class Tiling(NamedTuple):
    """How a program goes through its part of a product."""

    columns: int
    """N: for `_gate_up` as many of gate, and as many of up."""
    step: int
    """K."""
    warps: int
    stages: int
    """Turns whose weights are on their way at once."""


SINGLE = (Tiling(16, 256, 4, 3), Tiling(64, 128, 4, 4))
"""`_gate_up` and `_down` where every pair is a tile. Of one token, 8 pairs have 384 programs and 256: three and two for each of
132 multiprocessors, whose shared memory holds that many at once."""
TILINGS: dict[int, tuple[Tiling, Tiling]] = {
    16: (Tiling(32, 128, 4, 4), Tiling(64, 128, 4, 4)),
    32: (Tiling(32, 128, 4, 4), Tiling(64, 128, 4, 4)),
    64: (Tiling(64, 64, 4, 4), Tiling(128, 64, 4, 4)),
    128: (Tiling(64, 64, 8, 4), Tiling(128, 64, 8, 4)),
}
"""By the pairs of a tile."""


def tile_size(pairs: int, experts: int) -> int:
    """A tile that holds what an expert gets, and the half more that chance brings; beyond 128 more of them."""
    mean = pairs / experts
    return 16 if mean <= 8 else 32 if mean <= 16 else 64 if mean <= 40 else 128


def gate_up_products(x_TE: Tensor, gate_up_XIE: Tensor, tiles: Tiles, choices: int, tiling: Tiling | None = None) -> Tensor:
    """silu(gate) · up of every pair, [P, I]."""
    assert x_TE.is_contiguous()
    assert gate_up_XIE.is_contiguous()
    (T, E), I = x_TE.shape, gate_up_XIE.shape[1] // 2  # noqa: E741
    inner_PI = x_TE.new_empty(T * choices, I)
    N, K, warps, stages = tiling or _tilings(tiles)[0]
    grid = (tiles.count, triton.cdiv(I, N))
    _gate_up[grid](
        x_TE, gate_up_XIE, inner_PI, tiles.experts, tiles.pairs, T * choices,
        C=choices, E=E, I=I, M=tiles.size, N=N, K=K, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return inner_PI


def down_products(inner_PI: Tensor, down_XEI: Tensor, tiles: Tiles, tiling: Tiling | None = None) -> Tensor:
    """The output of every pair, [P, E], without its weight."""
    assert inner_PI.is_contiguous()
    assert down_XEI.is_contiguous()
    (P, I), E = inner_PI.shape, down_XEI.shape[1]  # noqa: E741
    out_PE = inner_PI.new_empty(P, E)
    N, K, warps, stages = tiling or _tilings(tiles)[1]
    grid = (tiles.count, triton.cdiv(E, N))
    _down[grid](
        inner_PI, down_XEI, out_PE, tiles.experts, tiles.pairs, P,
        E=E, I=I, M=tiles.size, N=N, K=K, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_PE


def combine(out_PE: Tensor, weights_TC: Tensor) -> Tensor:
    """Σ weight · output over the choices of each token, [T, E], added up in float32."""
    (T, C), E = weights_TC.shape, out_PE.shape[1]
    sum_TE = out_PE.new_empty(T, E)
    grid = (T, triton.cdiv(E, COMBINE_BLOCK))
    _combine[grid](out_PE, weights_TC, sum_TE, C=C, E=E, BLOCK=COMBINE_BLOCK, num_warps=4)
    return sum_TE


def _tilings(tiles: Tiles) -> tuple[Tiling, Tiling]:
    return SINGLE if tiles.pairs is None else TILINGS[tiles.size]


@triton.jit
def _pairs_of(tile, pairs, P, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """[M]: the pairs of a tile, P where there is none."""
    row_M = tl.arange(0, M)
    if pairs is None:
        return tl.where(row_M == 0, tile, P)
    else:
        return tl.load(pairs + tile * M + row_M)


@triton.jit(do_not_specialize=["P"])
def _gate_up(  # type: ignore[no-untyped-def]
    x, weights, inner, tile_experts, pairs, P,
    C: tl.constexpr, E: tl.constexpr, I: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,  # noqa: E741
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert == NOBODY:
        return
    pair_M = _pairs_of(tile, pairs, P, M)
    there_M = pair_M < P
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    step_K = tl.arange(0, K)
    x_MK = x + (pair_M // C).to(tl.int64)[:, None] * E + step_K[None, :]
    gate_KN = weights + (expert * 2 * I + column_N)[None, :] * E + step_K[:, None]
    sum_gate_MN = tl.zeros([M, N], tl.float32)
    sum_up_MN = tl.zeros([M, N], tl.float32)
    # What is known when the kernel is compiled to be inside needs no mask.
    even: tl.constexpr = E % K == 0 and I % N == 0
    for first in range(0, E, K):
        if even:
            value_MK = tl.load(x_MK + first, mask=there_M[:, None], other=0.0)
            weight_KN = tl.load(gate_KN + first)
            other_KN = tl.load(gate_KN + first + I * E)
        else:
            inside_K = first + step_K < E
            inside_KN = inside_K[:, None] & (column_N < I)[None, :]
            value_MK = tl.load(x_MK + first, mask=there_M[:, None] & inside_K[None, :], other=0.0)
            weight_KN = tl.load(gate_KN + first, mask=inside_KN, other=0.0)
            other_KN = tl.load(gate_KN + first + I * E, mask=inside_KN, other=0.0)
        sum_gate_MN = tl.dot(value_MK, weight_KN, sum_gate_MN)
        sum_up_MN = tl.dot(value_MK, other_KN, sum_up_MN)
    # Rounded where eager torch rounds: after the products, and after the activation.
    gate_MN = sum_gate_MN.to(inner.dtype.element_ty).to(tl.float32)
    up_MN = sum_up_MN.to(inner.dtype.element_ty).to(tl.float32)
    active_MN = (gate_MN / (1.0 + tl.exp(-gate_MN))).to(inner.dtype.element_ty).to(tl.float32)
    stored = there_M[:, None] & (column_N < I)[None, :]
    tl.store(
        inner + pair_M.to(tl.int64)[:, None] * I + column_N[None, :],
        (active_MN * up_MN).to(inner.dtype.element_ty),
        mask=stored,
    )


@triton.jit(do_not_specialize=["P"])
def _down(  # type: ignore[no-untyped-def]
    inner, weights, out, tile_experts, pairs, P,
    E: tl.constexpr, I: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,  # noqa: E741
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert == NOBODY:
        return
    pair_M = _pairs_of(tile, pairs, P, M)
    there_M = pair_M < P
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    step_K = tl.arange(0, K)
    inner_MK = inner + pair_M.to(tl.int64)[:, None] * I + step_K[None, :]
    down_KN = weights + (expert * E + column_N)[None, :] * I + step_K[:, None]
    sum_MN = tl.zeros([M, N], tl.float32)
    even: tl.constexpr = I % K == 0 and E % N == 0
    for first in range(0, I, K):
        if even:
            value_MK = tl.load(inner_MK + first, mask=there_M[:, None], other=0.0)
            weight_KN = tl.load(down_KN + first)
        else:
            inside_K = first + step_K < I
            value_MK = tl.load(inner_MK + first, mask=there_M[:, None] & inside_K[None, :], other=0.0)
            weight_KN = tl.load(down_KN + first, mask=inside_K[:, None] & (column_N < E)[None, :], other=0.0)
        sum_MN = tl.dot(value_MK, weight_KN, sum_MN)
    stored = there_M[:, None] & (column_N < E)[None, :]
    tl.store(out + pair_M.to(tl.int64)[:, None] * E + column_N[None, :], sum_MN.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _combine(out, weights, sums, C: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(C):
        weight = tl.load(weights + token * C + choice)
        total += weight * tl.load(out + (token * C + choice) * E + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + token * E + column, total.to(sums.dtype.element_ty), mask=inside)
