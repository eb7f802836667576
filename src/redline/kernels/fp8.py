"""Products of a GPU in 8-bit floating point, and the small operations that write its factors. For sampling only: they have no
gradient.

A number has four bits of exponent and three of mantissa (e4m3): at most 448, rounded by a sixteenth of itself down to 2⁻⁶, and
by 2⁻¹⁰ below. So numbers down to a 28,000th of the largest are rounded no worse than that, and one scale for a whole weight, or
for all rows after a norm, is nearly as good as one for each row:

    weight   448 / its largest number, taken when it is written
    normed   448 / (√E · the largest gain), which no row can exceed
    others   448 / the row's largest number, and the norm behind the product multiplies by its inverse

A row's bits do not depend on the rows beside it. Adding in float32, tensor cores keep about 14 bits of a product's sum.

I is the inner size of the MLP. This module needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redline.kernels.decode.few_rows import launched
from redline.kernels.decoder_steps import norm_warps

DTYPE = torch.float8_e4m3fn
TOP = 448.0
SMALLEST = 1e-30
"""Rows and weights with nothing larger are zero."""
SCALE_ALIGNMENT = 16
"""Bytes. cuBLAS says that a product is not supported where a scale begins elsewhere."""
WRITE_BLOCK = 4096
ROW_BLOCK = 32768
"""Numbers of a row that a program holds at once: all of most models' rows."""


def make_scales(*shape: int, device: torch.device) -> Tensor:
    """Ones in float32, each where cuBLAS takes a scale from."""
    return torch.ones((*shape, SCALE_ALIGNMENT // 4), device=device)[..., 0]


def product(
    x_TI: Tensor, x_scale: Tensor, weight_OI: Tensor, weight_scale: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x · weightᵀ · both scales + bias, [T, O] in `dtype`. Scales are of `make_scales`."""
    one = ScalingType.TensorWise
    return F.scaled_mm(
        x_TI,
        weight_OI.t(),
        x_scale,
        one,
        weight_scale,
        one,
        bias=bias_O,
        output_dtype=dtype,
        use_fast_accum=True,
    )


@torch.no_grad()
def write_weight(weight: Tensor, to: Tensor, scale: Tensor) -> None:
    """Write a weight, and to `scale`, one number of float32, what its numbers are to be multiplied by."""
    scale.copy_(torch.linalg.vector_norm(weight, ord=math.inf, dtype=torch.float32).clamp_(min=SMALLEST).div_(TOP))
    _write[(triton.cdiv(weight.numel(), WRITE_BLOCK),)](weight, to, scale, weight.numel(), BLOCK=WRITE_BLOCK, num_warps=8)


@torch.no_grad()
def write_norm_scale(gain_E: Tensor, scale: Tensor) -> None:
    """Write to `scale` what numbers after a norm with these gains are to be multiplied by: √E · the largest gain / 448."""
    largest = torch.linalg.vector_norm(gain_E, ord=math.inf, dtype=torch.float32).clamp_(min=SMALLEST)
    scale.copy_(largest.mul_(math.sqrt(len(gain_E)) / TOP))


def add_rms_norm(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    delta_scale_T: Tensor | None,
    weight_E: Tensor,
    eps: float,
    scale: Tensor,
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta` times the scale of each row, and its RMS norm over `scale`, in 8 bits. Without a delta
    the stream is returned as it came. With `early` the launch begins before the one in front of it has ended."""
    assert x_TE.is_contiguous()
    assert delta_TE is None or delta_TE.is_contiguous()
    T, E = x_TE.shape
    normed_TE = torch.empty_like(x_TE, dtype=DTYPE)
    sum_TE = x_TE if delta_TE is None else torch.empty_like(x_TE)
    block = triton.next_power_of_2(E)
    if T:
        _add_rms_norm[(T,)](
            x_TE,
            delta_TE,
            delta_scale_T,
            weight_E,
            sum_TE,
            normed_TE,
            scale,
            eps,
            E=E,
            BLOCK=block,
            EARLY=early,
            num_warps=norm_warps(block),
            **launched(early),
        )
    return sum_TE, normed_TE


def rows(x_TI: Tensor, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and what each is to be multiplied by [T]."""
    assert x_TI.is_contiguous()
    return _in_rows(x_TI, x_TI.shape[1], gated=False, early=early)


def silu_mul(gate_up_TI: Tensor, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """silu(gate) · up [T, I] in 8 bits, from the two side by side [T, 2 · I], and what each row is to be multiplied by [T]."""
    assert gate_up_TI.is_contiguous()
    return _in_rows(gate_up_TI, gate_up_TI.shape[1] // 2, gated=True, early=early)


def _in_rows(x: Tensor, width: int, *, gated: bool, early: bool) -> tuple[Tensor, Tensor]:
    T = len(x)
    out_TI, scale_T = x.new_empty(T, width, dtype=DTYPE), x.new_empty(T, dtype=torch.float32)
    block = min(triton.next_power_of_2(width), ROW_BLOCK)
    if T:
        _rows[(T,)](
            x,
            out_TI,
            scale_T,
            WIDTH=width,
            BLOCK=block,
            GATED=gated,
            EARLY=early,
            num_warps=min(max(block // 512, 1), 32),
            **launched(early),
        )
    return out_TI, scale_T


@triton.jit(do_not_specialize=["size"])
def _write(weight, to, scale, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(to + at, (value * (1.0 / tl.load(scale))).to(to.dtype.element_ty), mask=at < size)


@triton.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x, delta, delta_scale, weight, x_sum, normed, scale, eps, E: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < E
    at = row.to(tl.int64) * E + column
    value = tl.load(x + at, mask=inside, other=0.0)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.load(scale)
    if delta is not None:
        more = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if delta_scale is not None:
            more = (more * tl.load(delta_scale + row)).to(x_sum.dtype.element_ty).to(tl.float32)
        value = (value.to(tl.float32) + more).to(x_sum.dtype.element_ty)
        tl.store(x_sum + at, value, mask=inside)
    wide = value.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, axis=0) / E + eps)
    tl.store(normed + at, (wide * root * gain * inverse).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    x,
    out,
    scales,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A row, a block at a time: its largest number first, then all of it. Only what does not fit a block is read again."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = _values(x, row, 0, WIDTH, BLOCK, GATED)
    largest = tl.max(tl.abs(first), axis=0)
    for begin in tl.static_range(BLOCK, WIDTH, BLOCK):
        largest = tl.maximum(largest, tl.max(tl.abs(_values(x, row, begin, WIDTH, BLOCK, GATED)), axis=0))
    scale = tl.maximum(largest, 1e-30) / 448.0
    tl.store(scales + row, scale)
    column = tl.arange(0, BLOCK)
    tl.store(out + row * WIDTH + column, (first * (1.0 / scale)).to(out.dtype.element_ty), mask=column < WIDTH)
    for begin in tl.static_range(BLOCK, WIDTH, BLOCK):
        value = _values(x, row, begin, WIDTH, BLOCK, GATED) * (1.0 / scale)
        tl.store(out + row * WIDTH + begin + column, value.to(out.dtype.element_ty), mask=begin + column < WIDTH)


@triton.jit
def _values(x, row, begin, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a row, float32 [BLOCK], rounded as eager torch rounds them."""
    column = begin + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if GATED:
        gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
        return (active * up).to(x.dtype.element_ty).to(tl.float32)
    else:
        return tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
