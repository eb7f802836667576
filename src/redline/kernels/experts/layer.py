"""A whole layer of experts, for the tokens of a decode step or of prompts.

A few tokens choose experts that hardly ever meet: each pair of a token and an expert reads its weights, and nothing is sorted.
From `SORTED_TOKENS` on the pairs of one expert are put together, which takes two more launches.

Letters: X experts, C choices of a token, I inner columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.kernels.experts.products import combine, down_products, gate_up_products, tile_size
from redline.kernels.experts.routing import Choices, Tiles, choose_experts, single_pairs, tiles_of

SORTED_TOKENS = 5
"""Of 128 experts, 4 tokens with 8 choices each have 28 in common with nobody out of 32: sorting would save an eighth."""


@dataclass(slots=True, frozen=True)
class ExpertWeights:
    """What a layer of experts multiplies by, in half precision."""

    gate_up_XIE: Tensor
    """[X, 2 · I, E]: of each expert gate, and below it up."""
    down_XEI: Tensor


def run_experts(
    x_TE: Tensor,
    logits_TX: Tensor,
    weights: ExpertWeights,
    choices: int,
    *,
    normalized: bool,
    record: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts make of it, [T, E]; `record` hears which those are, int32[T, C]. Waits for
    nothing; has no gradient."""
    assert not (torch.is_grad_enabled() and x_TE.requires_grad), "the experts' kernels have no gradient"
    if not len(x_TE):
        return torch.empty_like(x_TE)
    chosen = choose_experts(logits_TX, choices, normalized=normalized)
    if record is not None:
        record(chosen.experts_TC)
    tiles = lay_out(chosen, logits_TX.shape[1])
    inner_PI = gate_up_products(x_TE, weights.gate_up_XIE, tiles, choices)
    return combine(down_products(inner_PI, weights.down_XEI, tiles), chosen.weights_TC)


def lay_out(chosen: Choices, experts: int) -> Tiles:
    """The pairs in tiles of the size that suits their number."""
    T, C = chosen.experts_TC.shape
    return single_pairs(chosen) if T < SORTED_TOKENS else tiles_of(chosen, tile_size(T * C, experts))
