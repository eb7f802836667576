"""The two passes over a chunk of logits, as Triton kernels: what `logprobs.py` does in torch, without float32 copies.

This module needs triton; only code that runs on a CUDA device may import it. N are vocabulary entries of one turn of a loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TURN = 8192
WARPS = 8


def summarise(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, log of the normalizer, and entropy: float32[M] each, from one pass over the logits."""
    M, V = logits_MV.shape
    logprobs_M, normalizers_M, entropies_M = torch.empty((3, M), dtype=torch.float32, device=logits_MV.device)
    if M:
        _summarise[(M,)](
            logits_MV, targets_M, logprobs_M, normalizers_M, entropies_M, 1 / temperature, V, N=TURN, num_warps=WARPS
        )
    return logprobs_M, normalizers_M, entropies_M


def to_gradient_(
    logits_MV: Tensor,
    targets_M: Tensor,
    normalizers_M: Tensor,
    entropies_M: Tensor,
    grads: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """Overwrite logits by the gradient that reaches them from those of the logprobs and the entropies."""
    M, V = logits_MV.shape
    if M:
        _to_gradient[(M, triton.cdiv(V, TURN))](
            logits_MV, targets_M, normalizers_M, entropies_M, *grads, 1 / temperature, V, N=TURN, num_warps=WARPS
        )
    return logits_MV


@triton.jit
def _summarise(logits, targets, logprobs, normalizers, entropies, inverse, V, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """H = log Z - Σ p·x, with x the scaled logits; both sums are kept relative to the largest so far."""
    row = tl.program_id(0).to(tl.int64)
    peak, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, V, N):
        column = start + tl.arange(0, N)
        x = tl.load(logits + row * V + column, mask=column < V, other=float("-inf")).to(tl.float32) * inverse
        new_peak = tl.maximum(peak, tl.max(x, axis=0))
        fade = tl.exp(peak - new_peak)
        weight = tl.exp(x - new_peak)
        total = total * fade + tl.sum(weight, axis=0)
        # A logit of -inf has no weight, and 0 · inf would be NaN.
        weighted = weighted * fade + tl.sum(tl.where(weight > 0, weight * x, 0.0), axis=0)
        peak = new_peak
    normalizer = peak + tl.log(total)
    chosen = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, normalizer - weighted / total)


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, targets, normalizers, entropies, grad_logprobs, grad_entropies, inverse, V, N: tl.constexpr
):  # fmt: skip
    """d logprob / d logit_v = (1[v = target] - p_v) / temperature;  d H / d logit_v = -p_v · (log p_v + H) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    at = logits + row * V + column
    x = tl.load(at, mask=column < V, other=float("-inf")).to(tl.float32) * inverse
    log_p = x - tl.load(normalizers + row)
    p = tl.exp(log_p)
    grad = tl.load(grad_logprobs + row)
    out = grad * (tl.where(column == tl.load(targets + row), 1.0, 0.0) - p)
    out -= tl.load(grad_entropies + row) * tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
    tl.store(at, (out * inverse).to(logits.dtype.element_ty), mask=column < V)
