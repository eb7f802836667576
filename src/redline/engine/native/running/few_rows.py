"""A decode step of few rows through the network, as `Decoder.forward` does it: in one launch, or in few that overlap.

    x, delta ─► norm ─► qkv ─► attention ─► o ─► norm ─► gate, up, silu ─► down ─► the next layer

Each arrow is a programmatic dependent launch (`kernels/decode/few_rows.py`), or the next phase of the one launch
(`kernels/decode/one_launch.py`). The weights are read where the decoder has them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from redline.engine.native.cache.kv_cache import KVCache
from redline.kernels.decode import one_launch
from redline.kernels.decode.few_rows import MOST_ROWS, can_overlap, make_room, product
from redline.kernels.decoder_steps import add_rms_norm
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend

WIDE = 2048
"""Hidden units of a network up to which these products are the faster ones: where weights take longer to come, less is won
between them."""


class FewRows:
    """One step at a time: the products share the room for their parts."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        spec, device = decoder.spec, decoder.embed.device
        layer = decoder.layers[0]
        assert isinstance(layer, DecoderLayer)
        weights = (layer.qkv.weight, layer.o.weight, layer.down.weight, decoder.output_weight)
        self._room = make_room([(N, K) for N, K in (weight.shape for weight in weights)], device)
        self.most_rows = MOST_ROWS if spec.hidden_size <= WIDE else 0
        self._early = can_overlap(device)

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether it takes this network: whole layers, without experts, and without adapters beside their projections."""
        if decoder.spec.experts is not None:
            return False
        return decoder.plain_head and all(isinstance(layer, DecoderLayer) and layer.is_whole for layer in decoder.layers)

    def begins_early(self, rows: int) -> bool:
        """Whether launches begin before the one in front of them has ended."""
        return self._early

    def logits(self, tokens_B: Tensor, attend: FusedAttend) -> Tensor:
        """[B, V] in the compute dtype, of at most `most_rows` rows."""
        decoder, eps, room, early = self._decoder, self._decoder.spec.norm_eps, self._room, self._early
        x_BE, delta_BE = F.embedding(tokens_B, decoder.embed), None
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            x_BE, normed_BE = add_rms_norm(x_BE, delta_BE, layer.attn_norm, eps, early=early)
            heads_BX = product(normed_BE, layer.qkv.weight, layer.qkv.bias, room, early=early)
            out_BHD = attend.attend_fused(layer, heads_BX.view(len(tokens_B), -1, decoder.spec.head_dim))
            attended_BE = product(out_BHD.flatten(1), layer.o.weight, layer.o.bias, room, early=early)
            x_BE, normed_BE = add_rms_norm(x_BE, attended_BE, layer.mlp_norm, eps, early=early)
            inner_BI = product(normed_BE, layer.gate_up.weight, layer.gate_up.bias, room, is_gated=True, early=early)
            delta_BE = product(inner_BI, layer.down.weight, layer.down.bias, room, early=early)
        _, normed_BE = add_rms_norm(x_BE, delta_BE, decoder.norm, eps, early=early)
        return product(normed_BE, decoder.output_weight, None, room, early=early)


def one_launch_of(decoder: Decoder, cache: KVCache, rotary: Tensor) -> one_launch.OneLaunch | None:
    """The step in one launch; None for a network that it does not serve."""
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
    if not one_launch.serves(shape, cache.blocks.dtype, decoder.embed.device):
        return None
    tensors = [_tensors(layer, *cache.blocks[layer.index]) for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    weights = (decoder.embed, decoder.norm, decoder.output_weight)
    return one_launch.OneLaunch(shape, tensors, cache.blocks, *weights, rotary, spec.norm_eps)


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
