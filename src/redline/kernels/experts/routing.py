"""Which experts a token goes to, and the pairs of a token and an expert laid out in tiles of one expert each.

    logits [T, X] ──► _choose: experts, weights, and how many of a chunk of tokens go to each expert
                  ──► _plan: one program: where each expert's tiles begin, and the expert of each tile
                  ──► _place: the pairs of each tile

No kernel waits for another through atomics, and none tells the host anything: the tiles are the same every time, and a CUDA
graph can hold them. There is room for the most tiles that there can be; those beyond the last are of no expert.

Letters: X experts, C choices of a token, P = T · C pairs, N chunks of tokens, M pairs of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Tokens of a chunk. Few, so that 64 tokens have eight programs to choose for them."""
PLAN_ROWS = 32
"""Chunks, and tiles, that `_plan` looks at in one turn."""
NOBODY = tl.constexpr(-1)


@dataclass(slots=True, frozen=True)
class Choices:
    """The experts of each token."""

    experts_TC: Tensor
    """int32, the likeliest first; of two that are equal, the lower one."""
    weights_TC: Tensor
    """float32 with the precision of the logits' dtype: what each expert's output is multiplied by."""
    ranks_TC: Tensor
    """int32: how many tokens of the same chunk before this one go to the expert."""
    counts_NX: Tensor
    """int32: tokens of each chunk that go to each expert."""


@dataclass(slots=True, frozen=True)
class Tiles:
    """Pairs in groups of one expert."""

    size: int
    """M: a power of two."""
    experts: Tensor
    """int32[most tiles]; -1 where there is no tile."""
    pairs: Tensor | None
    """int32[most tiles · M]: the pairs of each tile, P where it has fewer. None: tile p is pair p and no other."""

    @property
    def count(self) -> int:
        """The most that there can be."""
        return len(self.experts)


def choose_experts(logits_TX: Tensor, choices: int, *, normalized: bool) -> Choices:
    """The likeliest experts of each token by the softmax over all of them. `normalized`: the weights of a token add up to 1."""
    assert logits_TX.is_contiguous()
    T, X = logits_TX.shape
    chunks, device = triton.cdiv(T, ROWS), logits_TX.device
    experts_TC, ranks_TC = torch.empty((2, T, choices), dtype=torch.int32, device=device)
    weights_TC = torch.empty((T, choices), dtype=torch.float32, device=device)
    counts_NX = torch.empty((chunks, X), dtype=torch.int32, device=device)
    padded_C, padded_X = triton.next_power_of_2(choices), triton.next_power_of_2(X)
    if T:
        _choose[(chunks,)](
            logits_TX, experts_TC, weights_TC, ranks_TC, counts_NX, T,
            X=X, C=choices, PADDED_X=padded_X, PADDED_C=padded_C, NORMALIZED=normalized, R=ROWS, num_warps=4,
        )  # fmt: skip
    return Choices(experts_TC, weights_TC, ranks_TC, counts_NX)


def single_pairs(choices: Choices) -> Tiles:
    """Each pair as a tile of its own."""
    return Tiles(16, choices.experts_TC.flatten(), None)


def tiles_of(choices: Choices, size: int) -> Tiles:
    """The pairs of each expert in tiles of `size`, the last of an expert's not full."""
    (chunks, X), P, device = choices.counts_NX.shape, choices.experts_TC.numel(), choices.counts_NX.device
    most = P // size + min(X, P)
    before_NX, starts_X = torch.empty_like(choices.counts_NX), torch.empty(X, dtype=torch.int32, device=device)
    experts = torch.empty(most, dtype=torch.int32, device=device)
    pairs = torch.full((most * size,), P, dtype=torch.int32, device=device)
    padded_X = triton.next_power_of_2(X)
    _plan[(1,)](
        choices.counts_NX, before_NX, starts_X, experts, chunks, most,
        X=X, PADDED_X=padded_X, M=size, R=PLAN_ROWS, num_warps=8,
    )  # fmt: skip
    block = 256
    C = choices.experts_TC.shape[1]
    _place[(triton.cdiv(P, block),)](
        choices.experts_TC, choices.ranks_TC, before_NX, starts_X, pairs, P, X=X, PER_CHUNK=ROWS * C, BLOCK=block, num_warps=4
    )
    return Tiles(size, experts, pairs)


@triton.jit(do_not_specialize=["T"])
def _choose(  # type: ignore[no-untyped-def]
    logits, experts, weights, ranks, counts, T,
    X: tl.constexpr, C: tl.constexpr, PADDED_X: tl.constexpr, PADDED_C: tl.constexpr, NORMALIZED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    token_R = chunk * R + tl.arange(0, R)
    expert_X, choice_C = tl.arange(0, PADDED_X), tl.arange(0, PADDED_C)
    inside = (token_R < T)[:, None] & (expert_X < X)[None, :]
    at_RX = token_R.to(tl.int64)[:, None] * X + expert_X[None, :]
    logits_RX = tl.load(logits + at_RX, mask=inside, other=float("-inf")).to(tl.float32)
    # A row of no token has no largest logit: it is given one, so that nothing here is NaN.
    peak_R = tl.max(logits_RX, axis=1)
    peak_R = tl.where(peak_R == float("-inf"), 0.0, peak_R)
    mass_RX = tl.exp(logits_RX - peak_R[:, None])
    sum_R = tl.sum(mass_RX, axis=1)
    # Without a sum, of NaN or of nothing but -inf, the weights are NaN, as torch's are. What a maximum makes of NaN differs
    # between devices, so that these rows choose among zeros: the first experts, each once.
    has_sum_R = sum_R > 0.0
    probability_RX = tl.where(has_sum_R[:, None], mass_RX / tl.where(has_sum_R, sum_R, 1.0)[:, None], 0.0)

    left_RX = tl.where((expert_X < X)[None, :], probability_RX, -1.0)
    chosen_RC = tl.zeros([R, PADDED_C], tl.int32)
    weight_RC = tl.zeros([R, PADDED_C], tl.float32)
    is_chosen_RX = tl.zeros([R, PADDED_X], tl.int32)
    for choice in tl.static_range(C):
        best_R = tl.max(left_RX, axis=1)
        first_R = tl.min(tl.where(left_RX == best_R[:, None], expert_X[None, :], PADDED_X), axis=1)
        hit_RX = expert_X[None, :] == first_R[:, None]
        is_chosen_RX += hit_RX.to(tl.int32)
        left_RX = tl.where(hit_RX, -2.0, left_RX)
        here_RC = (choice_C == choice)[None, :]
        chosen_RC = tl.where(here_RC, first_R[:, None], chosen_RC)
        weight_RC = tl.where(here_RC, best_R[:, None], weight_RC)
    if NORMALIZED:
        weight_RC = weight_RC / tl.maximum(tl.sum(weight_RC, axis=1), 1e-30)[:, None]
    weight_RC = tl.where(has_sum_R[:, None], weight_RC, float("nan"))
    weight_RC = weight_RC.to(logits.dtype.element_ty).to(tl.float32)

    # Rows of no token choose too: what they chose is neither counted nor stored.
    is_chosen_RX = tl.where(inside, is_chosen_RX, 0)
    rank_RX = tl.cumsum(is_chosen_RX, axis=0) - is_chosen_RX
    rank_RC = tl.zeros([R, PADDED_C], tl.int32)
    for choice in tl.static_range(C):
        here_RC = (choice_C == choice)[None, :]
        first_R = tl.sum(tl.where(here_RC, chosen_RC, 0), axis=1)
        rank_R = tl.sum(tl.where(expert_X[None, :] == first_R[:, None], rank_RX, 0), axis=1)
        rank_RC = tl.where(here_RC, rank_R[:, None], rank_RC)
    stored = (token_R < T)[:, None] & (choice_C < C)[None, :]
    at_RC = token_R[:, None] * C + choice_C[None, :]
    tl.store(experts + at_RC, chosen_RC, mask=stored)
    tl.store(weights + at_RC, weight_RC, mask=stored)
    tl.store(ranks + at_RC, rank_RC, mask=stored)
    tl.store(counts + chunk * X + expert_X, tl.sum(is_chosen_RX, axis=0), mask=expert_X < X)


@triton.jit(do_not_specialize=["N", "most"])
def _plan(  # type: ignore[no-untyped-def]
    counts, before, starts, tile_experts, N, most,
    X: tl.constexpr, PADDED_X: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sums over the chunks before each, the place of each expert's first pair, and the expert of each tile."""
    expert_X, row_R = tl.arange(0, PADDED_X), tl.arange(0, R)
    total_X = tl.zeros([PADDED_X], tl.int32)
    for first in range(0, N, R):
        chunk_R = first + row_R
        inside = (chunk_R < N)[:, None] & (expert_X < X)[None, :]
        at_RX = chunk_R[:, None] * X + expert_X[None, :]
        count_RX = tl.load(counts + at_RX, mask=inside, other=0)
        tl.store(before + at_RX, total_X[None, :] + tl.cumsum(count_RX, axis=0) - count_RX, mask=inside)
        total_X += tl.sum(count_RX, axis=0)
    tiles_X = (total_X + M - 1) // M
    end_X = tl.cumsum(tiles_X, axis=0)
    tl.store(starts + expert_X, (end_X - tiles_X) * M, mask=expert_X < X)
    used = tl.sum(tiles_X, axis=0)
    for first in range(0, most, R):
        tile_R = first + row_R
        expert_R = tl.sum((end_X[None, :] <= tile_R[:, None]).to(tl.int32), axis=1)
        tl.store(tile_experts + tile_R, tl.where(tile_R < used, expert_R, NOBODY), mask=tile_R < most)


@triton.jit(do_not_specialize=["P"])
def _place(experts, ranks, before, starts, pairs, P, X: tl.constexpr, PER_CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < P
    expert = tl.load(experts + pair, mask=inside, other=0)
    slot = tl.load(starts + expert, mask=inside, other=0) + tl.load(ranks + pair, mask=inside, other=0)
    slot += tl.load(before + pair // PER_CHUNK * X + expert, mask=inside, other=0)
    tl.store(pairs + slot, pair, mask=inside)
