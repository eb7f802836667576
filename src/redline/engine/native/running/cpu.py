"""The runner for CPUs that C can be compiled for, for steps that decode or verify. A step of few rows is one call where C has
products for its dtype: in float32, and in bfloat16 on a CPU with matrix units. Else the products are torch's, and C what lies
between them.

Prompts, and what decodes beside them, go through the network as ever: there the products are nearly all of the time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.engine.native.cache.attention import Runs
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.paged_attention import PagedAttention
from redline.engine.native.quantized import QuantizedLinear
from redline.engine.native.running.device_rows import DeviceRows
from redline.engine.native.running.runner import Runner
from redline.kernels.cpu.matrix_products import MatrixProducts, matrix_products
from redline.kernels.cpu.products import MOST_ROWS, Products, products
from redline.kernels.cpu.quantized import QuantizedProducts
from redline.kernels.cpu.steps import LANES, Layer, Steps, steps_for
from redline.models.decoder import AnyAttend, Decoder, DecoderLayer
from redline.models.files.hf import AnyDecoder
from redline.models.layers.rope import rotary_table
from redline.models.lora.per_token import project


class CpuRunner(Runner):
    def __init__(self, decoder: Decoder, cache: KVCache, rows: DeviceRows, steps: Steps) -> None:
        super().__init__(decoder, cache, rows)
        self._network, self._steps = decoder, steps
        positions = torch.arange(rows.tables_RN.shape[1] * cache.block_size)
        table = rotary_table(decoder.rotary_frequencies, decoder.rotary_factor, positions, cache.blocks.dtype)
        self._rotary = torch.stack(table).squeeze(2).contiguous()
        """cos and sin [2, positions, D / 2]."""
        spec = decoder.spec
        has_rows = spec.hidden_size % LANES == spec.intermediate_size % LANES == 0
        self._may_be_plain = has_rows and spec.experts is None
        self._takes_matrices = all(_fits_matrices(layer) for layer in decoder.layers)
        if cache.blocks.dtype is torch.float32 or (self._takes_matrices and matrix_products() is not None):
            self.most_verified = MOST_ROWS  # with more, a row's bits would depend on the guesses beside it

    @property
    def _is_plain(self) -> bool:
        """Asked at every step: an adapter to train may stand beside a projection since the last one."""
        return self._may_be_plain and all(layer.is_whole or _is_quantized(layer) for layer in self._network.layers)

    @classmethod
    def of(cls, decoder: AnyDecoder, cache: KVCache, rows: DeviceRows) -> CpuRunner | None:
        """None where the network, or the machine, is none that it serves."""
        if not isinstance(decoder, Decoder) or not cache.blocks.is_cpu or cache.heads_first:
            return None
        spec, dtype = decoder.spec, cache.blocks.dtype
        if any(parameter.dtype is not dtype for parameter in decoder.parameters()):
            return None
        steps = steps_for(dtype, spec.head_dim, spec.num_heads // spec.num_kv_heads)
        return None if steps is None else cls(decoder, cache, rows, steps)

    def _attention(self, runs: Runs) -> PagedAttention:
        return PagedAttention(self._steps, self.cache, self._rotary, runs)

    def _forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        adapter_slots_T: Tensor | None,
        only_M: Tensor | None = None,
    ) -> Tensor:
        if isinstance(attend, PagedAttention) and self._is_plain and adapter_slots_T is None and self.cache.routing is None:
            return self._hidden(tokens_T, attend)
        return super()._forward(tokens_T, positions_T, attend, adapter_slots_T, only_M)

    def _hidden(self, tokens_T: Tensor, attend: PagedAttention) -> Tensor:
        """As `Decoder.forward` does it."""
        x_TE = F.embedding(tokens_T, self._network.embed)
        assert x_TE.dtype is self.cache.blocks.dtype, "the network computes in another dtype since the engine was made"
        own = self._products(x_TE.dtype) if len(x_TE) <= MOST_ROWS else None
        if own is None:
            return self._layer_by_layer(x_TE, attend)
        layers, spec = [self._parts(layer) for layer in self._network.layers], self._network.spec
        sizes = spec.num_heads, spec.intermediate_size
        return self._steps.hidden(own, layers, self._network.norm, x_TE, attend.places, self._rotary, spec.norm_eps, sizes)

    def _products(self, dtype: torch.dtype) -> Products | QuantizedProducts | None:
        """What multiplies by the weights of `_parts`."""
        head = self._network.head
        if dtype is torch.float32:
            return head.products if isinstance(head, QuantizedLinear) else products()
        return matrix_products() if self._takes_matrices and not isinstance(head, QuantizedLinear) else None

    def _parts(self, layer: nn.Module) -> Layer:
        assert isinstance(layer, DecoderLayer)
        qkv, o, gate_up, down = layer.qkv, layer.o, layer.gate_up, layer.down
        attention = (layer.attn_norm, _weight(qkv), qkv.bias, layer.q_norm, layer.k_norm, _weight(o), o.bias)
        mlp = (layer.mlp_norm, _weight(gate_up), gate_up.bias, _weight(down), down.bias)
        return Layer(*attention, *mlp, *self.cache.blocks[layer.index])

    def _layer_by_layer(self, x_TE: Tensor, attend: PagedAttention) -> Tensor:
        decoder, eps, norm = self._network, self._network.spec.norm_eps, self._steps.add_rms_norm
        delta_TE = None
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            x_TE, normed_TE = norm(x_TE, delta_TE, layer.attn_norm, eps)
            heads_TX = _product(normed_TE, layer.qkv)
            out_THD = attend.attend_fused(layer, heads_TX.view(len(x_TE), -1, decoder.spec.head_dim))
            x_TE, normed_TE = norm(x_TE, _product(out_THD.flatten(1), layer.o), layer.mlp_norm, eps)
            delta_TE = _product(self._steps.silu_mul(_product(normed_TE, layer.gate_up)), layer.down)
        return norm(x_TE, delta_TE, decoder.norm, eps)[1]


def _product(x_TI: Tensor, by: nn.Module) -> Tensor:
    return project(by, x_TI, None).contiguous()  # type: ignore[arg-type]


def _fits_matrices(layer: nn.Module) -> bool:
    """Whether its products are of shapes that matrix units take."""
    linears = [part for part in layer.children() if isinstance(part, nn.Linear)]
    return bool(linears) and all(MatrixProducts.serves(linear.weight) for linear in linears)


def _weight(of: nn.Module) -> Tensor:
    return of.packed if isinstance(of, QuantizedLinear) else of.weight  # type: ignore[return-value]


def _is_quantized(layer: nn.Module) -> bool:
    """Whether a layer is in whole numbers, with no adapter beside it."""
    linears = layer._modules.values()  # as `DecoderLayer.is_whole` asks
    return all(type(linear) is QuantizedLinear and type(linear.source) is nn.Linear for linear in linears)
