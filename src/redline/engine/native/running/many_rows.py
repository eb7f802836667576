"""A decode step of many rows through the network, as `Decoder.forward` does it: norms are part of the products around them.

    x, scaled, squares ─► qkv ─► attention ─► o, + x ─► gate, up, silu ─► down, + x ─► the next layer

A product that ends in the residual stream (`kernels/decode/residual.py`) leaves what the product behind the next norm takes
(`kernels/decode/normed.py`): a layer is five launches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.decode import normed, residual
from redline.kernels.decode.residual import Stream
from redline.kernels.decoder_steps import add_rms_norm
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend

WIDE = 1536
"""Hidden units from which the launches of `some_rows.py` are the faster ones: where products take long, less is won around
them."""


class ManyRows:
    """Steps of many rows of a network that `FewRows` serves."""

    most_rows = residual.MOST_ROWS

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._multiprocessors = _multiprocessors(decoder.embed.device)

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether it takes this network, of those that `FewRows` takes."""
        spec, layers = decoder.spec, [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        weights = (by.weight for layer in layers for by in (layer.qkv, layer.o, layer.gate_up, layer.down))
        if spec.hidden_size >= WIDE or not all(map(normed.serves, weights)):
            return False
        if any(layer.gate_up.bias is not None for layer in layers):
            return False
        multiprocessors = _multiprocessors(decoder.embed.device)
        return normed.gated_tile_of(residual.MOST_ROWS, spec.intermediate_size, spec.hidden_size, multiprocessors) is not None

    def begins_early(self, rows: int) -> bool:
        """Whether attention of its own begins before the launch in front of it has ended."""
        return False

    def hidden(self, tokens_B: Tensor, attend: FusedAttend) -> Tensor:
        """[B, E] after the final norm, of at most `most_rows` rows."""
        decoder, eps, rows = self._decoder, self._decoder.spec.norm_eps, len(tokens_B)
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        stream = residual.begun(F.embedding(tokens_B, decoder.embed), layers[0].attn_norm)
        for layer, gain_E in zip(layers, [*(layer.attn_norm for layer in layers[1:]), decoder.norm], strict=True):
            heads_BX = normed.normed_product(stream, eps, layer.qkv.weight, layer.qkv.bias)
            out_BX = attend.attend_fused(layer, heads_BX.view(rows, -1, decoder.spec.head_dim)).flatten(1)
            stream = residual.add_product(stream.x_BE, out_BX, layer.o.weight, layer.o.bias, layer.mlp_norm)
            inner_BI = self._gated(stream, layer.gate_up.weight)
            stream = residual.add_product(stream.x_BE, inner_BI, layer.down.weight, layer.down.bias, gain_E)
        return add_rms_norm(stream.x_BE, None, decoder.norm, eps)[1]

    def _gated(self, stream: Stream, weight: Tensor) -> Tensor:
        """silu(gate) · up, [B, I]."""
        tile = normed.gated_tile_of(len(stream.x_BE), len(weight) // 2, weight.shape[1], self._multiprocessors)
        assert tile is not None, "serves() has looked"
        return normed.normed_product(stream, self._decoder.spec.norm_eps, weight, None, tile)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
