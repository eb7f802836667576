"""Sampling: one uniform number per token, drawn from (seed, index) alone.

A completion's stream does not depend on what else is in the batch, on the device, or on what was sampled before, so a
request reproduces in any company and a resumed run needs no generator state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 128
"""Vocabulary entries per first-level bin of the inverse-CDF search."""
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the golden-ratio increment of splitmix64


def stream(seed: int, index: int) -> int:
    """The seed of completion `index` of a request, as an int64."""
    return _mix(torch.tensor(seed, dtype=torch.int64) + torch.tensor(index + 1, dtype=torch.int64) * _GAMMA).item()  # type: ignore[return-value]


def uniform(streams_B: Tensor, counters_B: Tensor) -> Tensor:
    """float64[B] in [0, 1): number `counter` of each stream (splitmix64, upper 53 bits)."""
    bits = _mix(streams_B + (counters_B + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """The finalizer of splitmix64; int64 arithmetic wraps as uint64 does."""
    z = (z ^ _shift_right(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift_right(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's on int64 is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(slots=True)
class Sampled:
    """One token per row."""

    tokens_B: Tensor
    """int64."""
    logprobs_B: Tensor
    """float32, under the distribution sampled from; for greedy rows, under the distribution at temperature 1."""


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> Sampled:
    """Inverse-CDF sampling in two levels, so that only sums over `CHUNK` entries and one chunk per row are scanned."""
    greedy_B = temperature_B == 0
    scaled_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    peak_B1 = scaled_BV.amax(dim=-1, keepdim=True)
    weights_BV = torch.exp(scaled_BV - peak_B1)
    tokens_B = _search(weights_BV, uniform_B)
    if greedy_B.any():
        tokens_B = torch.where(greedy_B, scaled_BV.argmax(dim=-1), tokens_B)
    log_total_B = weights_BV.sum(dim=-1).log()
    chosen_B = scaled_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return Sampled(tokens_B, chosen_B - peak_B1.squeeze(1) - log_total_B)


def _search(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `uniform · total`."""
    V = weights_BV.shape[1]
    padded = torch.nn.functional.pad(weights_BV, (0, -V % CHUNK))
    chunks_BCN = padded.view(len(weights_BV), -1, CHUNK)
    cumulative_BC = chunks_BCN.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_B1 = (uniform_B * cumulative_BC[:, -1])[:, None]
    chunk_B1 = torch.searchsorted(cumulative_BC, target_B1, right=True).clamp_(max=cumulative_BC.shape[1] - 1)
    before_B1 = torch.where(chunk_B1 > 0, cumulative_BC.gather(1, (chunk_B1 - 1).clamp_(min=0)), 0.0)
    inside_BN = chunks_BCN.gather(1, chunk_B1[:, :, None].expand(-1, -1, CHUNK)).squeeze(1).double().cumsum(dim=-1)
    within_B1 = torch.searchsorted(inside_BN, target_B1 - before_B1, right=True)
    # Rounding can place the target at the very end of a chunk; the last entry with weight is then the one meant.
    last_B1 = (inside_BN < inside_BN[:, -1:]).sum(dim=-1, keepdim=True)
    return (chunk_B1 * CHUNK + torch.minimum(within_B1, last_B1)).squeeze(1)
