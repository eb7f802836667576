"""The passes over a chunk of logits, as Triton kernels: what `logprobs.py` does in torch, without float32 copies.

Where a gradient is wanted there is one pass, which reads the logits and leaves their slopes in their place:

    logit_v of temperature τ  ─►  slope_v = w_v - 1[v = target] · Σ w,   w_v = 2^(logit_v / (τ · ln 2) - reference)
    d logprob / d logit_v = -slope_v / (τ · Σ w)

A row of slopes is its gradient up to a factor, which the products with it leave to their other side. The reference is about the
largest of a row: no more is needed, since a float's precision is the same for large and small numbers.

This module needs triton; only code that runs on a CUDA device may import it. N are vocabulary entries of one turn of a loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.launches import blocks

SUMMARY_TURN, SUMMARY_WARPS = 4096, 8
SLOPES_TURN, SLOPES_WARPS = 4096, 8
ENTROPY_TURN, ENTROPY_WARPS = 2048, 4
RUN = 8
"""Entries that a thread loads at once, in half precision."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every logit but -inf, from which it can still be subtracted."""
AHEAD = tl.constexpr(3)
"""Turns whose loads are under way at once, where what is written would hold them up."""
ROOM = tl.constexpr(60.0)
"""How far an entry may be above the reference, in powers of 2. The sum of a row is a float32 too, and has 2¹²⁸."""


def summarise(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each target, and entropy: float32[M] each, from one pass over the logits."""
    M, V = logits_MV.shape
    logprobs_M, entropies_M = torch.empty((2, M), dtype=torch.float32, device=logits_MV.device)
    if M:
        found = logprobs_M, entropies_M
        _summarise[(M,)](logits_MV, targets_M, *found, 1 / temperature, V, N=SUMMARY_TURN, W=RUN, num_warps=SUMMARY_WARPS)
    return logprobs_M, entropies_M


def to_slopes_(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, then the sum of each row and the logprob of its largest; the logits become their slopes."""
    assert logits_MV.dtype != torch.float16, "slopes have a larger range"
    M, V = logits_MV.shape
    logprobs_M, entropies_M, sums_M, tops_M = torch.empty((4, M), dtype=torch.float32, device=logits_MV.device)
    if M:
        found = logprobs_M, entropies_M, sums_M, tops_M
        _to_slopes[(M,)](logits_MV, targets_M, *found, 1 / temperature, V, N=SLOPES_TURN, W=RUN, num_warps=SLOPES_WARPS)
    return logprobs_M, entropies_M, sums_M, tops_M


def to_gradient_(
    slopes_MV: Tensor,
    targets_M: Tensor,
    summary: tuple[Tensor, Tensor, Tensor, Tensor],
    grad_logprobs_M: Tensor,
    grad_entropies_M: Tensor,
    temperature: float,
) -> None:
    """Overwrite slopes by the gradient that reaches the logits, where entropies have one too; `summary` is that of
    `to_slopes_`."""
    M, V = slopes_MV.shape
    if M:
        _to_gradient[(M, blocks(V, ENTROPY_TURN))](
            slopes_MV, targets_M, *summary, grad_logprobs_M, grad_entropies_M, 1 / temperature, V,
            N=ENTROPY_TURN, num_warps=ENTROPY_WARPS,
        )  # fmt: skip


@triton.jit
def _summarise(logits, targets, logprobs, entropies, inverse, V, N: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
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
        x_RW = _scaled(logits + row * V, start + entry_RW, V, scale)
        new_peak_R = tl.maximum(peak_R, tl.max(x_RW, axis=1))
        fade_R = tl.exp2(peak_R - new_peak_R)
        weight_RW = tl.exp2(x_RW - new_peak_R[:, None])
        total_R = total_R * fade_R + tl.sum(weight_RW, axis=1)
        weighted_R = weighted_R * fade_R + tl.sum(weight_RW * x_RW, axis=1)
        peak_R = new_peak_R
    peak = tl.max(peak_R, axis=0)
    fade_R = tl.exp2(peak_R - peak)
    total, weighted = tl.sum(total_R * fade_R, axis=0), tl.sum(weighted_R * fade_R, axis=0)
    normalizer = peak + tl.log2(total)
    chosen = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logprobs + row, (chosen - normalizer) / LOG2_E)
    tl.store(entropies + row, (normalizer - weighted / total) / LOG2_E)


@triton.jit
def _to_slopes(logits, targets, logprobs, entropies, sums, tops, inverse, V, N: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """As above, but with one reference for the whole row, since what is relative to it is written at once. It is the largest of
    the first turn, and a larger one only where that is too far off: then what has been written is written again."""
    R: tl.constexpr = N // W
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * V
    entry_RW = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    scale = inverse * LOG2_E
    target = tl.load(targets + row)
    chosen = tl.load(at + target).to(tl.float32) * scale
    reference = tl.full([], LOWEST, tl.float32)
    top = tl.full([], LOWEST, tl.float32)
    total_R = tl.zeros([R], tl.float32)
    weighted_R = tl.zeros([R], tl.float32)
    for start in tl.range(0, V, N, num_stages=AHEAD):
        column_RW = start + entry_RW
        x_RW = _scaled(at, column_RW, V, scale)
        peak = tl.max(tl.max(x_RW, axis=1), axis=0)
        top = tl.maximum(top, peak)
        if peak > reference + ROOM:
            tl.debug_barrier()  # a thread may read here what another has written
            fade = tl.exp2(reference - peak)
            for before in range(0, start, N):
                written = at + before + entry_RW
                tl.store(written, (tl.load(written).to(tl.float32) * fade).to(logits.dtype.element_ty))
            total_R *= fade
            weighted_R *= fade
            reference = peak
        weight_RW = tl.exp2(x_RW - reference)
        total_R += tl.sum(weight_RW, axis=1)
        weighted_R += tl.sum(weight_RW * x_RW, axis=1)
        tl.store(at + column_RW, weight_RW.to(logits.dtype.element_ty), mask=column_RW < V)
    total, weighted = tl.sum(total_R, axis=0), tl.sum(weighted_R, axis=0)
    normalizer = reference + tl.log2(total)
    tl.store(logprobs + row, (chosen - normalizer) / LOG2_E)
    tl.store(entropies + row, (normalizer - weighted / total) / LOG2_E)
    tl.store(sums + row, total)
    tl.store(tops + row, (top - normalizer) / LOG2_E)
    tl.debug_barrier()  # another thread has written there
    tl.store(at + target, (tl.exp2(chosen - reference) - total).to(logits.dtype.element_ty))


@triton.jit
def _scaled(row, column, V, scale):  # type: ignore[no-untyped-def]
    logit = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
    return tl.maximum(logit * scale, LOWEST)  # of -inf, 0 · inf would be NaN


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    slopes, targets, logprobs, entropies, sums, tops, grad_logprobs, grad_entropies, inverse, V, N: tl.constexpr
):  # fmt: skip
    """d logprob / d logit_v = (1[v = target] - p_v) / τ;  d H / d logit_v = -p_v · (log p_v + H) / τ.

    The logarithm of a rounded p is as far off as p is: little beside log p, unless that is near 0. There is one such entry at
    most, and its logprob is known."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    at = slopes + row * V + column
    slope = tl.load(at, mask=column < V, other=0.0).to(tl.float32) / tl.load(sums + row)
    is_target = column == tl.load(targets + row)
    is_likely = (slope > 0.5) & ~is_target
    known = tl.where(is_target, tl.load(logprobs + row), tl.load(tops + row))
    p = tl.where(is_target | is_likely, tl.exp(known), slope)
    log_p = tl.where(is_target | is_likely, known, tl.log(p))
    share = tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
    out = -(tl.load(grad_logprobs + row) * slope + tl.load(grad_entropies + row) * share) * inverse
    tl.store(at, out.to(slopes.dtype.element_ty), mask=column < V)
