"""Norm and rotation of heads, as the attention kernels do them: rounded wherever `redline.models.layers.rope` rounds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def angles(position, rotary, num_positions, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """cos and sin [D] of a position, the sine negative in the first half. `rotary` holds cos and sin [2, positions, D / 2]."""
    d = tl.arange(0, D)
    at_D = position * (D // 2) + d % (D // 2)
    cos_D = tl.load(rotary + at_D).to(tl.float32)
    sin_D = tl.load(rotary + num_positions * (D // 2) + at_D).to(tl.float32)
    return cos_D, tl.where(d < D // 2, -sin_D, sin_D)


@triton.jit
def rotated(heads, head_Q, inside_Q, norm, eps, cos_D, sin_D, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads [Q, D] after norm and rotation, rounded wherever eager torch rounds."""
    d = tl.arange(0, D)
    other_d = (d + D // 2) % D
    x_QD = tl.load(heads + head_Q[:, None] * D + d[None, :], mask=inside_Q[:, None], other=0.0)
    other_QD = tl.load(heads + head_Q[:, None] * D + other_d[None, :], mask=inside_Q[:, None], other=0.0)
    dtype: tl.constexpr = x_QD.dtype
    if norm is not None:
        wide_QD = x_QD.to(tl.float32)
        scale_Q1 = tl.rsqrt(tl.sum(wide_QD * wide_QD, axis=1) / D + eps)[:, None]
        x_QD = (wide_QD * scale_Q1 * tl.load(norm + d).to(tl.float32)[None, :]).to(dtype)
        other_QD = (other_QD.to(tl.float32) * scale_Q1 * tl.load(norm + other_d).to(tl.float32)[None, :]).to(dtype)
    along_QD = (x_QD.to(tl.float32) * cos_D[None, :]).to(dtype).to(tl.float32)
    across_QD = (other_QD.to(tl.float32) * sin_D[None, :]).to(dtype).to(tl.float32)
    return (along_QD + across_QD).to(dtype)
