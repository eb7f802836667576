"""A decoder layer forward and backward by hand, for training on a GPU.

Autograd would run the same kernels, but it takes the host five times as long to get them started as the device to run them
when a micro-batch has a few thousand tokens. And it would keep the activation of the MLP, the largest tensor of a layer that
can be made again from another one in a single pass.

    x, delta ─► sum ─► norm ─► qkv ─► rotate ─► attention ─► o ─► + sum ─► norm ─► gate, up ─► silu ─► down
    kept        sum    norm    heads                 out                sum    norm    gate, up

This module needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.models.gradient_sums import gradient, product_gradient
from redline.models.lora import ActiveLora
from redline.models.spec import DecoderSpec
from redline.models.training_kernels import (
    column_sums,
    norm_backward,
    norm_forward,
    rotation_,
    silu_backward_,
    silu_forward,
)


class ManualAttend(Protocol):
    """Attention whose backward pass is called by hand."""

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output [T, H, D], and what else the backward pass needs."""
        ...

    def backward(
        self, grad: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        ...


class PlainLayer(Protocol):
    """A `DecoderLayer`, as far as it goes through here."""

    spec: DecoderSpec
    attn_norm: nn.Parameter
    qkv: nn.Linear
    o: nn.Linear
    mlp_norm: nn.Parameter
    gate_up: nn.Linear
    down: nn.Linear


def is_plain(layer: PlainLayer, lora: ActiveLora | None) -> bool:
    """Whether the layer is one of those written out here: no adapter, no norm on heads, no bias but that of qkv."""
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    has_others = layer.spec.qk_norm or layer.spec.o_bias or layer.spec.mlp_bias
    return lora is None and not has_others and all(type(linear) is nn.Linear for linear in linears)


def fused_layer(
    layer: PlainLayer, x_TE: Tensor, delta_TE: Tensor | None, rotary: tuple[Tensor, Tensor], attend: ManualAttend
) -> tuple[Tensor, Tensor]:
    """The same as `DecoderLayer.forward`."""
    linears = (layer.qkv.weight, layer.qkv.bias, layer.o.weight, layer.gate_up.weight, layer.down.weight)
    return _Layer.apply(x_TE, delta_TE, layer.spec, rotary, attend, layer.attn_norm, layer.mlp_norm, *linears)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        delta_TE: Tensor | None,
        spec: DecoderSpec,
        rotary: tuple[Tensor, Tensor],
        attend: ManualAttend,
        attn_norm: Tensor,
        mlp_norm: Tensor,
        qkv: Tensor,
        qkv_bias: Tensor | None,
        o: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> tuple[Tensor, Tensor]:
        first_TE, first_normed_TE, first_scale_T = norm_forward(x_TE, delta_TE, attn_norm, spec.norm_eps)
        heads_TX = F.linear(first_normed_TE, qkv, qkv_bias)
        rotation_(heads_TX, spec.num_heads + spec.num_kv_heads, *rotary, backwards=False)
        out_THD, kept = attend.forward(*_heads(heads_TX, spec))
        attended_TE = F.linear(out_THD.flatten(1), o)
        second_TE, second_normed_TE, second_scale_T = norm_forward(first_TE, attended_TE, mlp_norm, spec.norm_eps)
        gate_up_TI = F.linear(second_normed_TE, gate_up)
        ctx.save_for_backward(
            first_TE, first_normed_TE, first_scale_T, heads_TX, out_THD,
            second_TE, second_normed_TE, second_scale_T, gate_up_TI,
            *rotary, *kept,
        )  # fmt: skip
        ctx.weights = (attn_norm, mlp_norm, qkv, qkv_bias, o, gate_up, down)
        ctx.spec, ctx.attend, ctx.has_delta = spec, attend, delta_TE is not None
        return second_TE, F.linear(silu_forward(gate_up_TI), down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (
            first_TE, first_normed_TE, first_scale_T, heads_TX, out_THD,
            second_TE, second_normed_TE, second_scale_T, gate_up_TI,
            cos, sin, *kept,
        ) = ctx.saved_tensors  # fmt: skip
        attn_norm, mlp_norm, qkv, qkv_bias, o, gate_up, down = ctx.weights
        spec: DecoderSpec = ctx.spec
        grad_second_TE, grad_out_TE = (grad.contiguous() for grad in grads)

        inner_TI = grad_out_TE @ down
        silu_backward_(gate_up_TI, inner_TI)
        grad_down = product_gradient(down, grad_out_TE, inner_TI)
        grad_gate_up = product_gradient(gate_up, gate_up_TI, second_normed_TE)
        grad_second_TE, grad_mlp_norm = norm_backward(second_TE, mlp_norm, second_scale_T, gate_up_TI @ gate_up, grad_second_TE)

        grad_o = product_gradient(o, grad_second_TE, out_THD.flatten(1))
        grad_attended = (grad_second_TE @ o).view_as(out_THD)
        grad_heads = ctx.attend.backward(grad_attended, *_heads(heads_TX, spec), out_THD, tuple(kept))
        grad_heads_TX = torch.cat([grad.flatten(1) for grad in grad_heads], dim=1)
        rotation_(grad_heads_TX, spec.num_heads + spec.num_kv_heads, cos, sin, backwards=True)
        grad_qkv = product_gradient(qkv, grad_heads_TX, first_normed_TE)
        grad_bias = None if qkv_bias is None else gradient(qkv_bias, column_sums(grad_heads_TX))
        grad_first_TE, grad_attn_norm = norm_backward(first_TE, attn_norm, first_scale_T, grad_heads_TX @ qkv, grad_second_TE)
        return (
            grad_first_TE, grad_first_TE if ctx.has_delta else None, None, None, None,
            gradient(attn_norm, grad_attn_norm), gradient(mlp_norm, grad_mlp_norm),
            grad_qkv, grad_bias, grad_o, grad_gate_up, grad_down,
        )  # fmt: skip


def _heads(heads_TX: Tensor, spec: DecoderSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of the fused projection."""
    H, K, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q_THD, k_TKD, v_TKD = heads_TX.view(-1, H + 2 * K, D).split([H, K, K], dim=1)
    return q_THD, k_TKD, v_TKD
