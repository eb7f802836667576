"""The operations between a decoder's products with their gradients, one pass over memory forward and one backward.

They compute what eager torch computes and round where it rounds, but keep less for the backward pass: of a norm the residual
stream and one number per token, of an activation the projection, of a rotation nothing.
This module needs triton; only code that runs on a CUDA device may import it.

I is the inner size of the MLP, P programs that share the tokens among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.launches import blocks, launch, power_of_2

PROGRAMS = 528
"""Programs of sums over tokens: each program sums over some of them, and a last step over the programs."""
AHEAD = tl.constexpr(3)
"""Turns of a loop over tokens whose memory is on its way at once."""
SUMS_BLOCK = (128, 64)
"""Tokens and columns of a turn of a sum over tokens."""
PARTS_BLOCK = (512, 8)
"""Parts and columns of a turn of that last step."""
MOST_SUMS = 3
"""Sums of one launch: the norms and the bias of a layer."""
SILU_BLOCK = 1024
ROWS_BLOCK = 1024
"""Columns of one program that sums rows."""


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its RMS norm."""
    if delta_TE is None:
        return x_TE, _AddRMSNorm.apply(x_TE, None, weight_E, eps)[1]
    return _AddRMSNorm.apply(x_TE, delta_TE, weight_E, eps)


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], from the two side by side, [T, 2 · I]."""
    return _SiluMul.apply(gate_up_TI)


def rotate_(heads_TX: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first heads of every token in place, X = heads · D. cos and sin are [T, 1, D / 2] of `rotary_table`."""
    return _Rotate.apply(heads_TX, num_rotated, cos, sin)


def select_rows(x_TE: Tensor, index_M: Tensor) -> Tensor:
    """x[index], where rows may be wanted more than once: the gradient of each is summed in float32, and in the order of
    `index`. Torch's own is added up in the dtype of the rows, in whatever order they come."""
    return _SelectRows.apply(x_TE, index_M)


# ── one pass each ──────────────────────────────────────────────────────────────────────────────────────────────────────


def norm_forward(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and the factor [T] of each token; without a delta the sum is `x` itself."""
    T, E = x_TE.shape
    sum_TE = x_TE if delta_TE is None else torch.empty_like(x_TE)
    normed_TE = torch.empty_like(x_TE)
    scale_T = torch.empty(T, dtype=torch.float32, device=x_TE.device)
    block = power_of_2(E)
    if T:
        tensors = (x_TE, delta_TE, weight_E, sum_TE, normed_TE, scale_T)
        launch(_norm_forward, (T,), tensors, (eps,), (E, block), num_warps=_warps(block))
    return sum_TE, normed_TE, scale_T


def norm_backward(
    sum_TE: Tensor, weight_E: Tensor, scale_T: Tensor, grad_normed_TE: Tensor, grad_sum_TE: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What reaches the sum, from its norm and from elsewhere, and the weight's gradient in parts, float32[P, E]."""
    T, E = sum_TE.shape
    grad_TE = torch.empty_like(sum_TE)
    programs = min(PROGRAMS, max(T, 1))
    partial_PE = torch.empty(programs, E, dtype=torch.float32, device=sum_TE.device)
    block = power_of_2(E)
    tensors = (sum_TE, weight_E, scale_T, grad_normed_TE, grad_sum_TE, grad_TE, partial_PE)
    launch(_norm_backward, (programs,), tensors, (T,), (E, block), num_warps=4)
    return grad_TE, partial_PE


def column_sums(x_TX: Tensor) -> Tensor:
    """float32[P, X]: sums over the tokens, in parts."""
    (T, X), (rows, block) = x_TX.shape, SUMS_BLOCK
    across = blocks(X, block)
    programs = max(1, min(PROGRAMS // across, blocks(T, rows)))
    partial_PX = torch.empty(programs, X, dtype=torch.float32, device=x_TX.device)
    launch(_column_sums, (programs, across), (x_TX, partial_PX), (T,), (X, rows, block), num_warps=4)
    return partial_PX


def add_parts_(sums: Sequence[tuple[Tensor, bool, Tensor]]) -> None:
    """For each total, [X], whether it is new and may hold anything, and parts [P, X]: add the sum of the parts to the total.
    All float32, and in one launch."""
    assert len(sums) <= MOST_SUMS
    rows, block = PARTS_BLOCK
    padded = [*sums, *[(None, False, None)] * (MOST_SUMS - len(sums))]
    shapes = [(0, 0) if parts is None else parts.shape for _, _, parts in padded]
    tensors = [tensor for total, _, parts in padded for tensor in (total, parts)]
    sizes, widths = zip(*shapes, strict=True)
    constants = (*widths, *(is_first for _, is_first, _ in padded), rows, block)
    launch(_add_parts, (blocks(max(widths), block), len(sums)), tensors, sizes, constants, num_warps=8)


def silu_forward(gate_up_TI: Tensor) -> Tensor:
    T, both = gate_up_TI.shape
    out_TI = gate_up_TI.new_empty(T, both // 2)
    if T:
        grid = (T * blocks(both // 2, SILU_BLOCK),)
        launch(_silu_forward, grid, (gate_up_TI, out_TI), (), (both // 2, SILU_BLOCK), num_warps=4)
    return out_TI


def silu_backward(gate_up_TI: Tensor, grad_out_TI: Tensor) -> Tensor:
    return _run_silu_backward(gate_up_TI, grad_out_TI, torch.empty_like(gate_up_TI), None)


def silu_backward_(gate_up_TI: Tensor, grad_out_TI: Tensor, *, again: bool) -> None:
    """In place: the projection becomes its gradient, and if wanted again, the gradient of what came out what came out."""
    _run_silu_backward(gate_up_TI, grad_out_TI, gate_up_TI, grad_out_TI if again else None)


def _run_silu_backward(gate_up_TI: Tensor, grad_out_TI: Tensor, grad_TI: Tensor, out_TI: Tensor | None) -> Tensor:
    T, both = gate_up_TI.shape
    if T:
        grid = (T * blocks(both // 2, SILU_BLOCK),)
        tensors = (gate_up_TI, grad_out_TI, grad_TI, out_TI)
        launch(_silu_backward, grid, tensors, (), (both // 2, SILU_BLOCK), num_warps=4)
    return grad_TI


def rotation_(heads_TX: Tensor, num_rotated: int, cos: Tensor, sin: Tensor, *, backwards: bool) -> Tensor:
    """In place: heads by their angles, or gradients back by them."""
    (T, X), D = heads_TX.shape, 2 * cos.shape[-1]
    assert all(tensor.is_contiguous() for tensor in (heads_TX, cos, sin))
    if T:
        constants = (X // D, num_rotated, D, backwards)
        launch(_rotation, (T,), (heads_TX, cos, sin), (), constants, num_warps=4, enable_fp_fusion=False)
    return heads_TX


def sum_rows(rows_ME: Tensor, index_M: Tensor, num_sums: int) -> Tensor:
    """[num_sums, E]: of all rows with the same index."""
    E = rows_ME.shape[1]
    sorted_M, order_M = torch.sort(index_M, stable=True)
    firsts = torch.searchsorted(sorted_M, torch.arange(num_sums + 1, dtype=sorted_M.dtype, device=sorted_M.device))
    sums = rows_ME.new_empty(num_sums, E)
    if num_sums:
        grid = (num_sums, blocks(E, ROWS_BLOCK))
        launch(_sum_rows, grid, (rows_ME, order_M, firsts, sums), (), (E, ROWS_BLOCK), num_warps=4)
    return sums


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 8)


# ── with gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_TE, normed_TE, scale_T = norm_forward(x_TE, delta_TE, weight_E, eps)
        ctx.save_for_backward(sum_TE, weight_E, scale_T)
        ctx.has_delta = delta_TE is not None
        return sum_TE, normed_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        grad_sum_TE, grad_normed_TE = (grad.contiguous() for grad in grads)
        # Without a delta, the stream passes by the function: its gradient does not come through here.
        other_TE = grad_sum_TE if ctx.has_delta else None
        sum_TE, weight_E, scale_T = ctx.saved_tensors
        grad_TE, parts_PE = norm_backward(sum_TE, weight_E, scale_T, grad_normed_TE, other_TE)
        return grad_TE, grad_TE if ctx.has_delta else None, parts_PE.sum(dim=0).to(weight_E.dtype), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TI)
        return silu_forward(gate_up_TI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_TI,) = ctx.saved_tensors
        return silu_backward(gate_up_TI, grads[0].contiguous())


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_TX: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.mark_dirty(heads_TX)
        ctx.save_for_backward(cos, sin)
        ctx.num_rotated = num_rotated
        return rotation_(heads_TX, num_rotated, cos, sin, backwards=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad_TX = grads[0].clone(memory_format=torch.contiguous_format)
        return rotation_(grad_TX, ctx.num_rotated, *ctx.saved_tensors, backwards=True), None, None, None


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, index_M: Tensor) -> Tensor:
        ctx.save_for_backward(index_M)
        ctx.num_rows = len(x_TE)
        return x_TE.index_select(0, index_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index_M,) = ctx.saved_tensors
        return sum_rows(grads[0].contiguous(), index_M, ctx.num_rows), None


# ── the kernels ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["eps"])
def _norm_forward(x, delta, weight, x_sum, normed, scales, eps, E: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    at = token * E + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if delta is not None:
        value = (value.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x_sum.dtype.element_ty)
        tl.store(x_sum + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / E + eps)
    tl.store(scales + token, scale)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _norm_backward(  # type: ignore[no-untyped-def]
    x_sum, weight, scales, grad_normed, grad_sum, grad, partial, T, E: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = x · s · w with s = (mean(x²) + eps)^-½:  dx = s · (g·w - x̂ · mean(g·w·x̂)),  dw = Σ g · x̂,  x̂ = x · s."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < E
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_gain = tl.zeros([BLOCK], tl.float32)
    for token in tl.range(program, T, programs, num_stages=AHEAD):
        at = tl.cast(token, tl.int64) * E + column
        scale = tl.load(scales + token)
        unit = tl.load(x_sum + at, mask=inside, other=0.0).to(tl.float32) * scale
        incoming = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        grad_gain += incoming * unit
        scaled = incoming * gain
        outgoing = scale * (scaled - unit * (tl.sum(scaled * unit, axis=0) / E))
        if grad_sum is not None:
            outgoing += tl.load(grad_sum + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + at, outgoing.to(grad.dtype.element_ty), mask=inside)
    tl.store(partial + program * E + column, grad_gain, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _column_sums(x, partial, T, X: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([R, BLOCK], tl.float32)
    for first in range(program * R, T, programs * R):
        token_R = first + tl.arange(0, R)
        inside = (token_R < T)[:, None] & (column < X)[None, :]
        total += tl.load(x + token_R.to(tl.int64)[:, None] * X + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + program * X + column, tl.sum(total, axis=0), mask=column < X)


@triton.jit(do_not_specialize=["P_0", "P_1", "P_2"])
def _add_parts(  # type: ignore[no-untyped-def]
    total_0, parts_0, total_1, parts_1, total_2, parts_2, P_0, P_1, P_2,
    X_0: tl.constexpr, X_1: tl.constexpr, X_2: tl.constexpr,
    FIRST_0: tl.constexpr, FIRST_1: tl.constexpr, FIRST_2: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        _add_columns(total_0, parts_0, P_0, X_0, FIRST_0, R, BLOCK)
    if parts_1 is not None:  # noqa: SIM102 - known when the kernel is compiled, unlike `which`
        if which == 1:
            _add_columns(total_1, parts_1, P_1, X_1, FIRST_1, R, BLOCK)
    if parts_2 is not None:  # noqa: SIM102
        if which == 2:
            _add_columns(total_2, parts_2, P_2, X_2, FIRST_2, R, BLOCK)


@triton.jit
def _add_columns(total, parts, P, X: tl.constexpr, IS_FIRST: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sum_RX = tl.zeros([R, BLOCK], tl.float32)
    for first in range(0, P, R):
        part_R = first + tl.arange(0, R)
        inside = (part_R < P)[:, None] & (column < X)[None, :]
        sum_RX += tl.load(parts + part_R[:, None] * X + column[None, :], mask=inside, other=0.0)
    found = tl.sum(sum_RX, axis=0)
    if not IS_FIRST:
        found += tl.load(total + column, mask=column < X)
    tl.store(total + column, found, mask=column < X)


@triton.jit
def _from_the_end(I: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    """The last tokens first: the product before has just written them, and the one after begins with the first, which are
    then the ones just written. What the cache holds is read from there."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    blocks: tl.constexpr = (I + BLOCK - 1) // BLOCK
    return (block // blocks).to(tl.int64), block % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _silu_forward(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    token, column = _from_the_end(I, BLOCK)
    inside = column < I
    gate = tl.load(gate_up + token * 2 * I + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * I + I + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * I + column, (active * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_backward(gate_up, grad_out, grad, out, I: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
    """silu(g) = g · σ(g):  d silu = σ(g) · (1 + g · (1 - σ(g))). Every element is read before it is written."""
    token, column = _from_the_end(I, BLOCK)
    inside = column < I
    at = token * 2 * I + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + I, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(grad_out + token * I + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    active = gate * sigmoid
    grad_gate = incoming * up * (sigmoid + active * (1.0 - sigmoid))
    tl.store(grad + at, grad_gate.to(grad.dtype.element_ty), mask=inside)
    tl.store(grad + at + I, (incoming * active).to(grad.dtype.element_ty), mask=inside)
    if out is not None:
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(out + token * I + column, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


@triton.jit
def _rotation(heads, cos, sin, N: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BACKWARDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token; each program touches both halves of a pair, so it may overwrite them."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head_R = tl.arange(0, triton.next_power_of_2(R))
    d = tl.arange(0, HALF)
    inside = (head_R < R)[:, None]
    at = heads + (token * N + head_R)[:, None] * D + d[None, :]
    cos_D = tl.load(cos + token * HALF + d).to(tl.float32)[None, :]
    sin_D = tl.load(sin + token * HALF + d).to(tl.float32)[None, :]
    if BACKWARDS:
        sin_D = -sin_D
    dtype: tl.constexpr = heads.dtype.element_ty
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    # Rounded as eager torch does: each product, then their sum.
    new_first = (first * cos_D).to(dtype).to(tl.float32) - (second * sin_D).to(dtype).to(tl.float32)
    new_second = (second * cos_D).to(dtype).to(tl.float32) + (first * sin_D).to(dtype).to(tl.float32)
    tl.store(at, new_first.to(dtype), mask=inside)
    tl.store(at + HALF, new_second.to(dtype), mask=inside)


@triton.jit
def _sum_rows(rows, order, firsts, sums, E: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    which = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for use in range(tl.load(firsts + which), tl.load(firsts + which + 1)):
        total += tl.load(rows + tl.load(order + use) * E + column, mask=column < E, other=0.0).to(tl.float32)
    tl.store(sums + which * E + column, total.to(sums.dtype.element_ty), mask=column < E)
