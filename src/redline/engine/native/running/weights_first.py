"""A decode step of some rows through the network, as `Decoder.forward` does it: weights come before rows do.

    x, delta ─► norm ─► qkv ─► attention ─► o ─► norm ─► gate, up, silu ─► down ─► the next layer

Every launch lets the one behind it begin, and a product (`kernels/decode/weights_first.py`) reads weights while it waits for
what is in front of it. More rows of gate and up than it is made for are `kernels/decode/gated.py`'s.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.kernels.decode import gated
from redline.kernels.decode.weights_first import GATED_ROWS, MOST_ROWS, WIDE, WIDE_ROWS, product, serves
from redline.kernels.decoder_steps import add_rms_norm
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend


class WeightsFirst:
    """Steps of some rows of a network that `FewRows` serves."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._has_gated = all(gated.serves(layer.gate_up.weight, layer.gate_up.bias) for layer in layers)
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
        x_BE, delta_BE = F.embedding(tokens_B, decoder.embed), None
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            x_BE, normed_BE = add_rms_norm(x_BE, delta_BE, layer.attn_norm, eps, early=True)
            heads_BX = product(normed_BE, layer.qkv.weight, layer.qkv.bias)
            out_BHD = attend.attend_fused(layer, heads_BX.view(len(tokens_B), -1, decoder.spec.head_dim))
            attended_BE = product(out_BHD.flatten(1), layer.o.weight, layer.o.bias)
            x_BE, normed_BE = add_rms_norm(x_BE, attended_BE, layer.mlp_norm, eps, early=True)
            delta_BE = product(self._gated(normed_BE, layer.gate_up), layer.down.weight, layer.down.bias)
        return F.linear(add_rms_norm(x_BE, delta_BE, decoder.norm, eps, early=True)[1], decoder.output_weight)

    def _gated(self, x_BE: Tensor, by: nn.Linear) -> Tensor:
        """silu(gate) · up, [B, I]."""
        tile = None
        if len(x_BE) > GATED_ROWS and self._has_gated:
            tile = gated.tile_of(len(x_BE), len(by.weight) // 2, x_BE.shape[1], self._multiprocessors)
        return product(x_BE, by.weight, is_gated=True) if tile is None else gated.gated_product(x_BE, by.weight, tile)
