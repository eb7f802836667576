"""What a training step does between its products on a CPU, in float32 and bfloat16, with gradients: `training.c`.

torch does each of these in several passes over memory, forward and backward, and keeps more for the backward pass. Here a norm
keeps its sum and a factor of each token, the activation its input, and the rotation nothing.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import DTYPES, library

SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
"""Numbers that rows are multiples of; the longest vector's."""
IN_FLOAT32 = {"add_rms_norm": (5,), "rms_norm_backward": (2, 6)}
"""Arguments that are float32 whatever the others are: the factor of each token, and the parts of a weight's gradient."""


def is_there(dtype: torch.dtype) -> bool:
    """Whether there are such functions. Compiles them when it is first asked."""
    return dtype in DTYPES and _functions(dtype) is not None


def serves(x: Tensor, width: int) -> bool:
    """Whether these functions take a tensor of such rows, or parts of rows."""
    return x.is_cpu and width % LANES == 0 and is_there(x.dtype)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `delta`, and its RMS norm."""
    if not torch.is_grad_enabled():
        return _normed(x_TE, delta_TE, weight_E, eps)[:2]
    if delta_TE is None:
        return x_TE, _AddRMSNorm.apply(x_TE, None, weight_E, eps)
    return _AddRMSNorm.apply(x_TE, delta_TE, weight_E, eps)


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], from the two side by side, [T, 2 · I]."""
    return _SiluMul.apply(gate_up_TI) if torch.is_grad_enabled() else _gated(gate_up_TI.contiguous())


def turned_heads(
    heads_TX: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, K, D], the first two rotated. cos and sin are [T, 1, D / 2] of `rotary_table`."""
    if not torch.is_grad_enabled():
        return _turned(heads_TX, num_heads, num_kv_heads, cos.contiguous(), sin.contiguous())
    return _TurnedHeads.apply(heads_TX, num_heads, num_kv_heads, cos, sin)


@cache
def _functions(dtype: torch.dtype) -> Any | None:
    compiled = library(SOURCE, f"-DBFLOAT16={DTYPES[dtype]}")
    if compiled is None:
        return None
    sizes = [c_long, c_long]
    compiled.add_rms_norm.argtypes = [*[c_void_p] * 6, *sizes, c_float, c_int]
    compiled.rms_norm_backward.argtypes = [*[c_void_p] * 7, *sizes, c_int]
    compiled.silu_mul.argtypes = [*[c_void_p] * 2, *sizes, c_int]
    compiled.silu_mul_backward.argtypes = [*[c_void_p] * 3, *sizes, c_int]
    compiled.turn_heads.argtypes = [*[c_void_p] * 6, *[c_long] * 4, c_int, c_int]
    return compiled


def _call(name: str, tensors: tuple[Tensor | None, ...], *sizes: float) -> None:
    """Addresses are all that the C is given: it reads on where a tensor ends, and other types as its own."""
    assert tensors[0] is not None
    dtype, pointers = tensors[0].dtype, []
    for place, tensor in enumerate(tensors):
        wanted = torch.float32 if place in IN_FLOAT32.get(name, ()) else dtype
        assert tensor is None or (tensor.is_contiguous() and tensor.dtype is wanted)
        pointers.append(None if tensor is None else tensor.data_ptr())
    getattr(_functions(dtype), name)(*pointers, *sizes, torch.get_num_threads())


def _normed(x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and the factor of each token."""
    assert weight_E.shape == x_TE.shape[1:]
    assert delta_TE is None or delta_TE.shape == x_TE.shape
    x_TE, delta_TE = x_TE.contiguous(), None if delta_TE is None else delta_TE.contiguous()
    sum_TE, normed_TE = x_TE if delta_TE is None else torch.empty_like(x_TE), torch.empty_like(x_TE)
    scale_T = x_TE.new_empty(len(x_TE), dtype=torch.float32)
    _call("add_rms_norm", (x_TE, delta_TE, weight_E, sum_TE, normed_TE, scale_T), *x_TE.shape, eps)
    return sum_TE, normed_TE, scale_T


def _gated(gate_up_TI: Tensor) -> Tensor:
    T, both = gate_up_TI.shape
    out_TI = gate_up_TI.new_empty(T, both // 2)
    _call("silu_mul", (gate_up_TI, out_TI), T, both // 2)
    return out_TI


def _turned(heads_TX: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    T, D = len(heads_TX), 2 * cos.shape[-1]
    assert heads_TX.shape == (T, (num_heads + 2 * num_kv_heads) * D)
    assert cos.shape == sin.shape == (T, 1, D // 2)
    q_THD, k_TKD, v_TKD = (heads_TX.new_empty(T, number, D) for number in (num_heads, num_kv_heads, num_kv_heads))
    _call("turn_heads", (heads_TX.contiguous(), q_THD, k_TKD, v_TKD, cos, sin), T, num_heads, num_kv_heads, D, False)
    return q_THD, k_TKD, v_TKD


def check_once() -> None:
    """Called by backward passes, in which autograd records for `create_graph` alone. It would take what C computes for
    constants; torch's `once_differentiable` says nothing to `torch.autograd.grad`."""
    if torch.is_grad_enabled():
        raise RuntimeError("layers of a training step in C have no second derivatives: leave out create_graph")


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> Any:
        sum_TE, normed_TE, scale_T = _normed(x_TE, delta_TE, weight_E, eps)
        ctx.save_for_backward(sum_TE, weight_E, scale_T)
        ctx.set_materialize_grads(False)
        return normed_TE if delta_TE is None else (sum_TE, normed_TE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        check_once()
        sum_TE, weight_E, scale_T = ctx.saved_tensors
        grad_sum_TE, grad_normed_TE = grads if len(grads) == 2 else (None, *grads)
        if grad_normed_TE is None:
            return grad_sum_TE, grad_sum_TE if ctx.needs_input_grad[1] else None, None, None
        grad_TE, parts_PE = torch.empty_like(sum_TE), scale_T.new_zeros(torch.get_num_threads(), len(weight_E))
        given = (grad_normed_TE.contiguous(), None if grad_sum_TE is None else grad_sum_TE.contiguous())
        _call("rms_norm_backward", (sum_TE, weight_E, scale_T, *given, grad_TE, parts_PE), *sum_TE.shape)
        return grad_TE, grad_TE if ctx.needs_input_grad[1] else None, parts_PE.sum(dim=0).to(weight_E.dtype), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TI: Tensor) -> Tensor:
        gate_up_TI = gate_up_TI.contiguous()
        ctx.save_for_backward(gate_up_TI)
        return _gated(gate_up_TI)

    @staticmethod
    def backward(ctx: Any, grad_out_TI: Tensor) -> Tensor:
        check_once()
        (gate_up_TI,) = ctx.saved_tensors
        grad_TI = torch.empty_like(gate_up_TI)
        _call("silu_mul_backward", (gate_up_TI, grad_out_TI.contiguous(), grad_TI), *grad_out_TI.shape)
        return grad_TI


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_TX: Tensor, num_heads: int, num_kv_heads: int, cos: Tensor, sin: Tensor) -> Any:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.sizes = (len(heads_TX), num_heads, num_kv_heads, 2 * cos.shape[-1])
        return _turned(heads_TX, num_heads, num_kv_heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        check_once()
        cos, sin = ctx.saved_tensors
        T, num_heads, num_kv_heads, D = ctx.sizes
        grad_TX = cos.new_empty(T, (num_heads + 2 * num_kv_heads) * D)
        _call("turn_heads", (grad_TX, *(grad.contiguous() for grad in grads), cos, sin), *ctx.sizes, True)
        return grad_TX, None, None, None, None
