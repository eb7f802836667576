"""The one network definition, used by the engine to sample and by the trainer to learn.

Tokens come packed: one row per token, no batch dimension and no padding. How a token attends to others is the caller's
business: the trainer passes `PackedAttention`, the engine an attention over its KV cache.

Query, key and value share one matrix, and so do gate and up: fewer, larger products. The fused tensors are the parameters
themselves (`hf.py` splits them on the way out), so trainer and engine see one storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.kernels.available import kernels_serve
from redline.kernels.cpu import training as cpu
from redline.models.attention.limits import Limits
from redline.models.layer_code import Checkpointing, LayerCode, layer_code
from redline.models.layers import few_rows
from redline.models.layers.activation import again_in_backward, silu_mul
from redline.models.layers.experts import Experts
from redline.models.layers.gradient_sums import embedding
from redline.models.layers.rope import rotary_table, rotate
from redline.models.layers.routes import Routes
from redline.models.lora.per_token import BARE, ActiveLora, project
from redline.models.spec import DecoderSpec

Rotary = tuple[Tensor, Tensor]
"""cos and sin of every token's position."""


class Attend(Protocol):
    """Attention of one layer: queries [T, H, D], keys and values [T, K, D] → [T, H, D]. A layer that has limits gives them."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits = ...) -> Tensor: ...


class FusedAttend(ABC):
    """Attention that takes a layer's raw projection [T, H + 2 · K, D] and does norm, rotation and attention in one kernel."""

    @abstractmethod
    def attend_fused(self, layer: DecoderLayer, heads: Tensor) -> Tensor: ...


AnyAttend = Attend | FusedAttend


class DecoderLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, index: int) -> None:
        super().__init__()
        self.spec = spec
        self.index = index
        attention_size = spec.num_heads * spec.head_dim
        self.attn_norm = nn.Parameter(torch.ones(spec.hidden_size))
        self.qkv = nn.Linear(spec.hidden_size, sum(spec.qkv_sizes), bias=spec.qkv_bias)
        self.q_norm = nn.Parameter(torch.ones(spec.head_dim)) if spec.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(spec.head_dim)) if spec.qk_norm else None
        self.o = nn.Linear(attention_size, spec.hidden_size, bias=spec.o_bias)
        self.mlp_norm = nn.Parameter(torch.ones(spec.hidden_size))
        experts = spec.experts_of(index)
        self.experts = None if experts is None else Experts(spec.hidden_size, experts)
        """In place of `gate_up` and `down`."""
        if self.experts is None:
            self.gate_up = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
            self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.reduce: Callable[[Tensor], Tensor] = _alone
        """Sums over the processes that share the layer (`parallel.py`)."""
        self.checkpointing: Checkpointing = "none"
        """What the backward pass computes again: the MLP is most of what a layer keeps, its activation a single pass over
        memory."""

    def forward(
        self,
        x_TE: Tensor,
        delta_TE: Tensor | None,
        rotary: Rotary | None,
        attend: AnyAttend,
        lora: ActiveLora | None,
        only_M: Tensor | None = None,
        routes: Routes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream so far and what to add to it: the addition is left to the next norm, which reads both
        anyway. With `only_M`, both are of those tokens alone; the others are attended to, and go no further."""
        if rotary is not None and self._runs_by_hand(x_TE, attend, lora):
            from redline.models.layers.fused import fused_layer

            return fused_layer(self, x_TE, delta_TE, rotary, attend)  # type: ignore[arg-type]
        x_TE, normed_TE = add_rms_norm(x_TE, delta_TE, self.attn_norm, self.spec.norm_eps)
        heads_TX = self._attention(normed_TE, rotary, attend, lora)
        if only_M is not None:
            x_TE, heads_TX = x_TE[only_M], heads_TX[only_M]
        attended_TE = self.reduce(project(self.o, heads_TX, lora))
        x_TE, normed_TE = add_rms_norm(x_TE, attended_TE, self.mlp_norm, self.spec.norm_eps)
        return x_TE, again_in_backward(self._mlp, self.checkpointing == "selective")(normed_TE, lora, routes)

    def _runs_by_hand(self, x_TE: Tensor, attend: AnyAttend, lora: ActiveLora | None) -> bool:
        """Whether `fused_layer` takes over."""
        if not _trains(x_TE, attend, lora):
            return False
        return layer_code(self.spec, x_TE.dtype, self.checkpointing, kernels=True, whole=self.is_whole) == "fused"

    @property
    def is_whole(self) -> bool:
        """No other process has a part of it, and no adapter stands beside a projection."""
        modules = self._modules  # every layer of every micro-batch is asked: no way round by attributes
        qkv, o, gate_up, down = modules["qkv"], modules["o"], modules.get("gate_up"), modules.get("down")
        if gate_up is None:
            return self.reduce is _alone and type(qkv) is type(o) is nn.Linear
        return self.reduce is _alone and type(qkv) is type(o) is type(gate_up) is type(down) is nn.Linear

    def _mlp(self, x_TE: Tensor, lora: ActiveLora | None, routes: Routes | None) -> Tensor:
        if self.experts is not None:
            assert lora is None or lora is BARE, "no adapter stands beside an expert"
            return self.reduce(self.experts(x_TE, light=self.checkpointing == "light", routes=routes, layer=self.index))
        gate_up_TI = project(self.gate_up, x_TE, lora)
        return self.reduce(again_in_backward(self._activated, self.checkpointing == "light")(gate_up_TI, lora))

    def _activated(self, gate_up_TI: Tensor, lora: ActiveLora | None) -> Tensor:
        return project(self.down, silu_mul(gate_up_TI), lora)

    def _attention(self, x_TE: Tensor, rotary: Rotary | None, attend: AnyAttend, lora: ActiveLora | None) -> Tensor:
        """[T, H · D]."""
        spec = self.spec
        projected = project(self.qkv, x_TE, lora)
        shape = (-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        if rotary is None:
            assert isinstance(attend, FusedAttend)
            return attend.attend_fused(self, projected.view(shape)).flatten(1)
        assert not isinstance(attend, FusedAttend)
        if self.q_norm is None and kernels_serve(projected):
            from redline.kernels import training as training_kernels

            heads = training_kernels.rotate_(projected, spec.num_heads + spec.num_kv_heads, *rotary).view(shape)
            q_THD, k_TKD, v_TKD = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            return attend(self.index, q_THD, k_TKD, v_TKD).flatten(1)
        if self.q_norm is None and cpu.serves(projected, spec.head_dim // 2):
            return attend(self.index, *cpu.turned_heads(projected, spec.num_heads, spec.num_kv_heads, *rotary)).flatten(1)
        heads = projected.view(shape)
        qk, v_TKD = heads.split([spec.num_heads + spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
            qk = torch.cat((self._norm(q_THD, self.q_norm), self._norm(k_TKD, self.k_norm)), dim=1)
        q_THD, k_TKD = rotate(qk, *rotary).split([spec.num_heads, spec.num_kv_heads], dim=1)
        return attend(self.index, q_THD, k_TKD, v_TKD).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.norm_eps)


class Decoder(nn.Module):
    """Packed token ids → hidden states → logits."""

    plain_head = True
    """The logits are `hidden @ output_weight.T`, as the trainer computes them."""
    logit_cap: float | None = None
    """No cap on them."""

    def __init__(self, spec: DecoderSpec, rotary_frequencies: Tensor, rotary_factor: float = 1.0) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(spec, index) for index in range(spec.num_layers))
        self.norm = nn.Parameter(torch.ones(spec.hidden_size))
        self.head: nn.Module | None = None
        """What multiplies in the place of `output_weight`; None where that does."""
        self.lm_head = None if spec.tied_embeddings else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.rotary_frequencies: Tensor
        self.register_buffer("rotary_frequencies", rotary_frequencies, persistent=False)
        self.rotary_factor = rotary_factor
        self.checkpointing: Checkpointing = "none"

    def recompute_in_backward(self, what: Checkpointing) -> None:
        """`light`: the MLPs' activations. `selective`: the MLPs. `full`: whole layers. The same numbers, less memory, more
        time."""
        self.checkpointing = what
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.checkpointing = what

    def training_code(self, dtype: torch.dtype) -> LayerCode:
        """What runs its layers in a training step that computes in `dtype`."""
        there = next(self.parameters())  # any: a stage may have no embedding
        kernels, compiled = kernels_serve(there), there.is_cpu and cpu.is_there(dtype)
        return layer_code(self.spec, dtype, self.checkpointing, kernels=kernels, whole=self._are_whole, compiled=compiled)

    @property
    def _are_whole(self) -> bool:
        return all(layer.is_whole for layer in self.layers)

    @property
    def output_weight(self) -> Tensor:
        """[V, E]: the language-model head, or the embedding where they are tied."""
        return self.embed if self.lm_head is None else self.lm_head

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        lora: ActiveLora | None = None,
        only_M: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Return hidden states [T, E] after the final norm. With `only_M`, [M, E] of those tokens: what the last layer does
        after its attention, it does for them alone. Adapters and routes, which are of all tokens, do not go with it."""
        assert only_M is None or (lora is None and routes is None)
        x_TE, delta_TE = self._through_layers(embedding(tokens_T, self.embed), positions_T, attend, lora, only_M, routes)
        return add_rms_norm(x_TE, delta_TE, self.norm, self.spec.norm_eps)[1]

    def _through_layers(
        self,
        x_TE: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        lora: ActiveLora | None,
        only_M: Tensor | None = None,
        routes: Routes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after all layers, and what is still to be added to it."""
        delta_TE, rotary = None, None
        if not isinstance(attend, FusedAttend):
            rotary = rotary_table(self.rotary_frequencies, self.rotary_factor, positions_T, x_TE.dtype)
        if rotary is not None and self._runs_at_once(x_TE, attend, lora):
            from redline.models.layers.fused import fused_layers

            return fused_layers(self.layers, x_TE, rotary, attend)  # type: ignore[arg-type]
        for number, layer in enumerate(self.layers, 1):
            only = only_M if number == len(self.layers) else None
            run = again_in_backward(layer, self.checkpointing == "full")
            x_TE, delta_TE = run(x_TE, delta_TE, rotary, attend, lora, only, routes)
        return x_TE, delta_TE

    def _runs_at_once(self, x_TE: Tensor, attend: AnyAttend, lora: ActiveLora | None) -> bool:
        """Whether `fused_layers` may take all layers at once: only the sums want the weights' gradients."""
        if self.checkpointing == "full" or not _trains(x_TE, attend, lora):
            return False
        if layer_code(self.spec, x_TE.dtype, self.checkpointing, kernels=True, whole=True) != "fused":
            return False
        from redline.models.layers.fused import keeps_sums

        return all(layer.is_whole and keeps_sums(layer) for layer in self.layers)  # type: ignore[arg-type]

    def logits(self, hidden_ME: Tensor) -> Tensor:
        """[M, V] in the compute dtype."""
        if self.head is not None:
            return self.head(hidden_ME)
        return few_rows.linear(hidden_ME, self.output_weight).contiguous()


def _alone(x: Tensor) -> Tensor:
    return x


def _trains(x_TE: Tensor, attend: AnyAttend, lora: ActiveLora | None) -> bool:
    """Whether the kernels run this call with gradients, and the attention has a backward pass to be called by hand."""
    return kernels_serve(x_TE) and lora is None and torch.is_grad_enabled() and hasattr(attend, "backward")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, with the statistics in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x_TE: Tensor, delta_TE: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and the RMS norm of that."""
    if kernels_serve(x_TE):
        from redline.kernels import decoder_steps as kernels
        from redline.kernels import training as training_kernels

        fused = training_kernels if torch.is_grad_enabled() else kernels
        return fused.add_rms_norm(x_TE, delta_TE, weight, eps)
    if cpu.serves(x_TE, x_TE.shape[-1]) and weight.dtype is x_TE.dtype:
        return cpu.add_rms_norm(x_TE, delta_TE, weight, eps)
    x_TE = x_TE if delta_TE is None else x_TE + delta_TE
    return x_TE, rms_norm(x_TE, weight, eps)
