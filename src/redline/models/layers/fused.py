"""Decoder layers forward and backward by hand, for training on a GPU.

Autograd would run the same kernels, but it takes the host five times as long to get them started as the device to run them
when a micro-batch has a few thousand tokens.

    x, delta ─► sum ─► norm ─► qkv ─► rotate ─► attention ─► o ─► + sum ─► norm ─► gate, up ─► silu ─► down
    kept        sum    norm    heads                 out                sum    norm    gate, up    inner, or made again

This module needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.training import (
    column_sums,
    norm_backward,
    norm_forward,
    rotation_,
    silu_backward_,
    silu_forward,
)
from redline.models.layer_code import Checkpointing
from redline.models.layers import products
from redline.models.layers.gradient_sums import product_gradient, sum_gradients, sum_of
from redline.models.spec import DecoderSpec


class ManualAttend(Protocol):
    """Attention whose backward pass is called by hand."""

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output [T, H, D], and what else the backward pass needs."""
        ...

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        kept: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Gradients of queries, keys and values side by side, [T, H + 2 · K, D]; with a rotary table, of what they were before
        queries and keys were rotated by it."""
        ...


_LINEARS = ("qkv", "o", "gate_up", "down")
Kept = tuple[Any, ...]
"""Tensors for the backward pass of a layer, None where it makes one again."""


class PlainLayer(Protocol):
    """A `DecoderLayer` whose `training_code` is fused: no adapter, no norm on heads, no bias but that of qkv."""

    _modules: dict[str, Any]
    _parameters: dict[str, Any]
    spec: DecoderSpec
    checkpointing: Checkpointing


def fused_layer(
    layer: PlainLayer, x_TE: Tensor, delta_TE: Tensor | None, rotary: tuple[Tensor, Tensor], attend: ManualAttend
) -> tuple[Tensor, Tensor]:
    """The same as `DecoderLayer.forward`."""
    return _Layer.apply(x_TE, delta_TE, layer, rotary, attend, *_weights(layer))


def fused_layers(
    layers: Sequence[PlainLayer], x_TE: Tensor, rotary: tuple[Tensor, Tensor], attend: ManualAttend
) -> tuple[Tensor, Tensor]:
    """All layers one after the other, a single node of autograd's graph. Its gradients are those of the weights' sums, which
    every weight must have, and of `x_TE`."""
    return _Layers.apply(x_TE, layers, rotary, attend)


def keeps_sums(layer: PlainLayer) -> bool:
    return not any(weight is not None and sum_of(weight) is None for weight in _weights(layer))


def _weights(layer: PlainLayer) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """In the order of what `_backward` gives."""
    own, (qkv, o, gate_up, down) = layer._parameters, (layer._modules[name]._parameters for name in _LINEARS)
    return own["attn_norm"], own["mlp_norm"], qkv["weight"], qkv["bias"], o["weight"], gate_up["weight"], down["weight"]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        delta_TE: Tensor | None,
        layer: PlainLayer,
        rotary: tuple[Tensor, Tensor],
        attend: ManualAttend,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        second_TE, out_TE, kept = _forward(layer, x_TE, delta_TE, rotary, attend)
        ctx.save_for_backward(*kept)
        ctx.layer, ctx.rotary, ctx.attend, ctx.has_delta = layer, rotary, attend, delta_TE is not None
        return second_TE, out_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TE, weights = _backward(ctx.layer, ctx.saved_tensors, ctx.rotary, ctx.attend, *grads)
        return grad_TE, grad_TE if ctx.has_delta else None, None, None, None, *weights


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TE: Tensor, layers: Sequence[PlainLayer], rotary: tuple[Tensor, Tensor], attend: ManualAttend
    ) -> tuple[Tensor, Tensor]:
        delta_TE, ctx.kept = None, []
        for layer in layers:
            x_TE, delta_TE, kept = _forward(layer, x_TE, delta_TE, rotary, attend)
            ctx.kept.append(kept)
        ctx.layers, ctx.rotary, ctx.attend = layers, rotary, attend
        assert delta_TE is not None
        return x_TE.detach(), delta_TE  # what is kept may not be an output: each would hold the other

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad_TE, grad_delta_TE = grads
        for layer in reversed(ctx.layers):
            grad_TE, _ = _backward(layer, ctx.kept.pop(), ctx.rotary, ctx.attend, grad_TE, grad_delta_TE)
            grad_delta_TE = grad_TE
        return grad_TE, None, None, None


def _forward(
    layer: PlainLayer, x_TE: Tensor, delta_TE: Tensor | None, rotary: tuple[Tensor, Tensor], attend: ManualAttend
) -> tuple[Tensor, Tensor, Kept]:
    """The residual stream, what to add to it, and what the backward pass needs."""
    spec, (attn_norm, mlp_norm, qkv, bias, o, gate_up, down) = layer.spec, _weights(layer)
    first_TE, first_normed_TE, first_scale_T = norm_forward(x_TE, delta_TE, attn_norm, spec.norm_eps)
    heads_TX = F.linear(first_normed_TE, qkv, bias)
    rotation_(heads_TX, spec.num_heads + spec.num_kv_heads, *rotary, backwards=False)
    out_THD, kept = attend.forward(*_heads(heads_TX, spec))
    attended_TE = products.forward(out_THD.flatten(1), o)
    second_TE, second_normed_TE, second_scale_T = norm_forward(first_TE, attended_TE, mlp_norm, spec.norm_eps)
    gate_up_TI = products.forward(second_normed_TE, gate_up)
    inner_TI = silu_forward(gate_up_TI)
    out_TE = products.forward(inner_TI, down)
    return second_TE, out_TE, (
        first_TE, first_normed_TE, first_scale_T, heads_TX, out_THD,
        second_TE, second_normed_TE, second_scale_T, gate_up_TI, None if layer.checkpointing == "light" else inner_TI, *kept,
    )  # fmt: skip


def _backward(
    layer: PlainLayer,
    kept: Kept,
    rotary: tuple[Tensor, Tensor],
    attend: ManualAttend,
    grad_second_TE: Tensor,
    grad_out_TE: Tensor,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """What reaches the sum at the beginning, and the gradients of `_weights` that have no sum of their own."""
    (
        first_TE, first_normed_TE, first_scale_T, heads_TX, out_THD,
        second_TE, second_normed_TE, second_scale_T, gate_up_TI, inner_TI, *of_attention,
    ) = kept  # fmt: skip
    spec, (attn_norm, mlp_norm, qkv, bias, o, gate_up, down) = layer.spec, _weights(layer)
    grad_second_TE, grad_out_TE = grad_second_TE.contiguous(), grad_out_TE.contiguous()

    # In an order in which much of what is read has just been written and is still in the cache.
    grad_down = None if inner_TI is None else product_gradient(down, grad_out_TE, inner_TI)
    grad_inner_TI = products.backward(grad_out_TE, down)
    silu_backward_(gate_up_TI, grad_inner_TI, again=inner_TI is None)
    grad_normed_TE = products.backward(gate_up_TI, gate_up)
    grad_second_TE, mlp_norm_parts_PE = norm_backward(second_TE, mlp_norm, second_scale_T, grad_normed_TE, grad_second_TE)
    grad_gate_up = product_gradient(gate_up, gate_up_TI, second_normed_TE)
    if inner_TI is None:
        grad_down = product_gradient(down, grad_out_TE, grad_inner_TI)

    grad_o = product_gradient(o, grad_second_TE, out_THD.flatten(1))
    grad_attended_THD = products.backward(grad_second_TE, o).view_as(out_THD)
    grad_heads_TX = attend.backward(grad_attended_THD, *_heads(heads_TX, spec), out_THD, tuple(of_attention), rotary).flatten(1)
    vectors = [attn_norm, mlp_norm] + ([] if bias is None else [bias])
    bias_parts = [] if bias is None else [column_sums(grad_heads_TX)]  # at once, while they are in the cache
    grad_qkv = product_gradient(qkv, grad_heads_TX, first_normed_TE)
    grad_normed_TE = products.backward(grad_heads_TX, qkv)
    grad_first_TE, attn_norm_parts_PE = norm_backward(first_TE, attn_norm, first_scale_T, grad_normed_TE, grad_second_TE)
    found = sum_gradients(vectors, [attn_norm_parts_PE, mlp_norm_parts_PE, *bias_parts])
    grad_attn_norm, grad_mlp_norm, grad_bias = (*found, None)[:3]
    return grad_first_TE, (grad_attn_norm, grad_mlp_norm, grad_qkv, grad_bias, grad_o, grad_gate_up, grad_down)


def _heads(heads_TX: Tensor, spec: DecoderSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of the fused projection."""
    H, K, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q_THD, k_TKD, v_TKD = torch.split_with_sizes(heads_TX.view(-1, H + 2 * K, D), (H, K, K), dim=1)
    return q_THD, k_TKD, v_TKD
