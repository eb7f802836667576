"""A decode step of few rows through the network: in one launch, or in few that overlap.

Each arrow of the chain is a programmatic dependent launch (`kernels/decode/few_rows.py`), or the next phase of the one launch
(`kernels/decode/one_launch.py`). The weights are read where the decoder has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.running.chain import Chain
from redline.kernels.decode import one_launch
from redline.kernels.decode.few_rows import FEWEST_ROWS, MOST_ROWS, can_overlap, make_room, product
from redline.models.decoder import Decoder, DecoderLayer

WIDE = 2048
"""Hidden units from which on weights take so long to come that nothing is won beyond one tile of rows."""


class FewRows(Chain):
    """Steps of at most `most_rows` rows, one at a time: the products share the room for their parts."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        spec, device = decoder.spec, decoder.embed.device
        layer = decoder.layers[0]
        assert isinstance(layer, DecoderLayer)
        weights = (layer.qkv.weight, layer.o.weight, layer.down.weight, decoder.output_weight)
        self._room = make_room([(N, K) for N, K in (weight.shape for weight in weights)], device)
        self.most_rows = MOST_ROWS if spec.hidden_size < WIDE else FEWEST_ROWS
        self.arrived = torch.zeros(self.most_rows * spec.num_kv_heads, dtype=torch.int32, device=device)
        self.early = can_overlap(device)

    def _product(self, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        return product(x_BK, weight_NK, bias_N, self._room, early=self.early)

    def _gated(self, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        return product(x_BK, weight_NK, bias_N, self._room, is_gated=True, early=self.early)


def one_launch_of(decoder: Decoder, cache: KVCache, rotary: Tensor) -> one_launch.OneLaunch | None:
    """The step in one launch; None for a network that it does not serve, or serves more slowly than several."""
    spec = decoder.spec
    shape = one_launch.Shape(
        hidden=spec.hidden_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        inner=spec.intermediate_size,
        vocab=spec.vocab_size,
        layers=spec.num_layers,
        page=cache.block_size,
        head_norms=spec.qk_norm,
    )
    if not one_launch.pays(shape) or not one_launch.serves(shape, cache.blocks.dtype, decoder.embed.device):
        return None
    tensors = [_tensors(layer, *cache.blocks[layer.index]) for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    return one_launch.OneLaunch(shape, tensors, decoder.embed, decoder.norm, decoder.output_weight, rotary, spec.norm_eps)


def _tensors(layer: DecoderLayer, keys: Tensor, values: Tensor) -> one_launch.LayerTensors:
    return one_launch.LayerTensors(
        layer.attn_norm,
        layer.qkv.weight,
        layer.qkv.bias,
        layer.o.weight,
        layer.o.bias,
        layer.mlp_norm,
        layer.gate_up.weight,
        layer.gate_up.bias,
        layer.down.weight,
        layer.down.bias,
        layer.q_norm,
        layer.k_norm,
        keys,
        values,
    )
