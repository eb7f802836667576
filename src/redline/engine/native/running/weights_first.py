"""A decode step of some rows through the network, as `Decoder.forward` does it: weights come before rows do, and norms are part
of the products around them.

    x, scaled, squares ─► qkv ─► attention ─► o, + x ─► gate, up, silu ─► down, + x ─► the next layer

Every launch lets the one behind it begin, and a product (`kernels/decode/weights_first.py`) reads weights while it waits for
what is in front of it. More rows of gate and up than it is made for are `kernels/decode/normed.py`'s.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.decode import gated, normed, residual
from redline.kernels.decode.residual import Stream
from redline.kernels.decode.weights_first import (
    GATED_ROWS,
    MOST_ROWS,
    WIDE,
    WIDE_ROWS,
    add_product,
    normed_product,
    serves,
)
from redline.kernels.decoder_steps import add_rms_norm
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend


class WeightsFirst:
    """Steps of some rows of a network that `FewRows` serves."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._has_gated = all(
            gated.serves(by.weight, by.bias) and normed.serves(by.weight) for by in (layer.gate_up for layer in layers)
        )
        self._multiprocessors = torch.cuda.get_device_properties(decoder.embed.device).multi_processor_count
        self.most_rows = MOST_ROWS if decoder.spec.hidden_size < WIDE else WIDE_ROWS

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether it takes this network, of those that `FewRows` takes."""
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        weights = (by.weight for layer in layers for by in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return all(map(serves, weights)) and all(layer.gate_up.bias is None for layer in layers)

    def begins_early(self, rows: int) -> bool:
        """Whether launches begin before the one in front of them has ended."""
        return True

    def logits(self, tokens_B: Tensor, attend: FusedAttend) -> Tensor:
        """[B, V] in the compute dtype, of at most `most_rows` rows."""
        decoder, eps = self._decoder, self._decoder.spec.norm_eps
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        stream = residual.begun(F.embedding(tokens_B, decoder.embed), layers[0].attn_norm)
        for layer, gain_E in zip(layers, [*(layer.attn_norm for layer in layers[1:]), decoder.norm], strict=True):
            heads_BX = normed_product(stream, eps, layer.qkv.weight, layer.qkv.bias)
            out_BHD = attend.attend_fused(layer, heads_BX.view(len(tokens_B), -1, decoder.spec.head_dim))
            stream = add_product(stream.x_BE, out_BHD.flatten(1), layer.o.weight, layer.o.bias, layer.mlp_norm)
            inner_BI = self._gated(stream, layer.gate_up.weight)
            stream = add_product(stream.x_BE, inner_BI, layer.down.weight, layer.down.bias, gain_E)
        return F.linear(add_rms_norm(stream.x_BE, None, decoder.norm, eps, early=True)[1], decoder.output_weight)

    def _gated(self, stream: Stream, weight: Tensor) -> Tensor:
        """silu(gate) · up, [B, I]."""
        (rows, hidden), eps, tile = stream.x_BE.shape, self._decoder.spec.norm_eps, None
        if rows > GATED_ROWS and self._has_gated:
            tile = gated.tile_of(rows, len(weight) // 2, hidden, self._multiprocessors)
        if tile is None:
            return normed_product(stream, eps, weight, is_gated=True)
        return normed.normed_product(stream, eps, weight, None, normed.Tile(*tile, is_gated=True))
