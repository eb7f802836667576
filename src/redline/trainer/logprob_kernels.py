"""The two passes over a chunk of logits, as Triton kernels: what `logprobs.py` does in torch, without float32 copies.

This module needs triton; only code that runs on a CUDA device may import it. N are vocabulary entries of one turn of a loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SUMMARY_TURN, SUMMARY_WARPS = 4096, 8
GRADIENT_TURN, GRADIENT_WARPS = 2048, 4
RUN = 8
"""Entries that a thread loads at once, in half precision."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every logit but -inf, from which it can still be subtracted."""


def summarise(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, log of the normalizer, and entropy: float32[M] each, from one pass over the logits."""
    M, V = logits_MV.shape
    logprobs_M, normalizers_M, entropies_M = torch.empty((3, M), dtype=torch.float32, device=logits_MV.device)
    if M:
        found = logprobs_M, normalizers_M, entropies_M
        _summarise[(M,)](logits_MV, targets_M, *found, 1 / temperature, V, N=SUMMARY_TURN, W=RUN, num_warps=SUMMARY_WARPS)
    return logprobs_M, normalizers_M, entropies_M


def to_gradient_(
    logits_MV: Tensor,
    targets_M: Tensor,
    normalizers_M: Tensor,
    entropies_M: Tensor,
    grads: tuple[Tensor, Tensor | None],
    temperature: float,
) -> Tensor:
    """Overwrite logits by the gradient that reaches them from those of the logprobs and, if any, the entropies."""
    M, V = logits_MV.shape
    if M:
        known = normalizers_M, entropies_M, *grads
        _to_gradient[(M, triton.cdiv(V, GRADIENT_TURN))](
            logits_MV, targets_M, *known, 1 / temperature, V, N=GRADIENT_TURN, num_warps=GRADIENT_WARPS
        )
    return logits_MV


@triton.jit
def _summarise(logits, targets, logprobs, normalizers, entropies, inverse, V, N: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """H = log Z - Σ p·x, with x the scaled logits. Each of R = N / W runs of W entries, which one thread loads at once, keeps
    its own sums relative to its own largest so far: threads meet only at the end. All in powers of 2 until then."""
    R: tl.constexpr = N // W
    row = tl.program_id(0).to(tl.int64)
    peak_R = tl.full([R], LOWEST, tl.float32)
    total_R = tl.zeros([R], tl.float32)
    weighted_R = tl.zeros([R], tl.float32)
    entry_RW = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    scale = inverse * LOG2_E
    for start in range(0, V, N):
        column_RW = start + entry_RW
        logit_RW = tl.load(logits + row * V + column_RW, mask=column_RW < V, other=float("-inf")).to(tl.float32)
        x_RW = tl.maximum(logit_RW * scale, LOWEST)  # of -inf, 0 · inf would be NaN
        new_peak_R = tl.maximum(peak_R, tl.max(x_RW, axis=1))
        fade_R = tl.exp2(peak_R - new_peak_R)
        weight_RW = tl.exp2(x_RW - new_peak_R[:, None])
        total_R = total_R * fade_R + tl.sum(weight_RW, axis=1)
        weighted_R = weighted_R * fade_R + tl.sum(weight_RW * x_RW, axis=1)
        peak_R = new_peak_R
    peak = tl.max(peak_R, axis=0)
    fade_R = tl.exp2(peak_R - peak)
    total, weighted = tl.sum(total_R * fade_R, axis=0), tl.sum(weighted_R * fade_R, axis=0)
    normalizer = (peak + tl.log2(total)) / LOG2_E
    chosen = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32) * inverse
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, normalizer - weighted / total / LOG2_E)


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    logits, targets, normalizers, entropies, grad_logprobs, grad_entropies, inverse, V, N: tl.constexpr
):  # fmt: skip
    """d logprob / d logit_v = (1[v = target] - p_v) / temperature;  d H / d logit_v = -p_v · (log p_v + H) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    at = logits + row * V + column
    logit = tl.load(at, mask=column < V, other=float("-inf")).to(tl.float32)
    log_p = logit * inverse - tl.load(normalizers + row)
    p = tl.exp(log_p)
    grad = tl.load(grad_logprobs + row) * inverse
    out = -grad * p
    if grad_entropies is not None:
        share = tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
        out -= tl.load(grad_entropies + row) * inverse * share
    out += tl.where(column == tl.load(targets + row), grad, 0.0)
    tl.store(at, out.to(logits.dtype.element_ty), mask=column < V)
