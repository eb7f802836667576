"""The small operations between a decoder's products, one pass over memory each. For sampling only: they have no gradient.

They round where eager torch rounds, so the engine and the trainer differ by the last bit of a float32 sum and no more.
This module needs triton; only code that runs on a CUDA device may import it.

I is the inner size of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redline.kernels.decode.few_rows import launched

SILU_BLOCK = 1024
"""Columns of one program of `silu_mul`: 128 threads with one 16-byte load of gate and of up each."""


def add_rms_norm(
    x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float, *, early: bool = False
) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its RMS norm. Without a delta the stream is returned as it came; one in parts
    [P, T, E] in float32 (`decode/parts.py`) is added up first. With `early` the launch begins before the one in front of it has
    ended."""
    assert not (torch.is_grad_enabled() and x_TE.requires_grad), "the fused norm has no gradient"
    assert x_TE.is_contiguous()
    assert delta_TE is None or delta_TE.is_contiguous()
    T, E = x_TE.shape
    normed_TE = torch.empty_like(x_TE)
    sum_TE = x_TE if delta_TE is None else torch.empty_like(x_TE)
    block = triton.next_power_of_2(E)
    if T:
        _add_rms_norm[(T,)](
            x_TE,
            delta_TE,
            weight_E,
            sum_TE,
            normed_TE,
            eps,
            T,
            E=E,
            PARTS=0 if delta_TE is None or delta_TE.ndim == 2 else len(delta_TE),
            BLOCK=block,
            EARLY=early,
            num_warps=norm_warps(block),
            **launched(early),
        )
    return sum_TE, normed_TE


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], from the two side by side, [T, 2 · I]."""
    assert not (torch.is_grad_enabled() and gate_up_TI.requires_grad), "the fused activation has no gradient"
    assert gate_up_TI.is_contiguous()
    T, both = gate_up_TI.shape
    out_TI = gate_up_TI.new_empty(T, both // 2)
    if T:
        _silu_mul[(T, triton.cdiv(both // 2, SILU_BLOCK))](gate_up_TI, out_TI, I=both // 2, BLOCK=SILU_BLOCK, num_warps=4)
    return out_TI


def norm_warps(block: int) -> int:
    """Sixteen bytes per thread of bfloat16, up to eight warps; wider rows take more loads per thread."""
    return min(max(block // 256, 1), 8)


@triton.jit(do_not_specialize=["T"])
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x, delta, weight, x_sum, normed, eps, T, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, BLOCK)
    inside = column < E
    at = tl.program_id(0).to(tl.int64) * E + column
    value = tl.load(x + at, mask=inside, other=0.0)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        more = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more += tl.load(delta + part * T * E + at, mask=inside, other=0.0)
        if PARTS:
            more = more.to(x_sum.dtype.element_ty).to(tl.float32)
        value = (value.to(tl.float32) + more).to(x_sum.dtype.element_ty)
        tl.store(x_sum + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / E + eps)
    tl.store(normed + at, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up + token * 2 * I + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * I + I + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * I + column, (active * up).to(out.dtype.element_ty), mask=inside)
