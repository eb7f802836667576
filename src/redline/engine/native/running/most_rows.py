"""A decode step of more rows still through the network, as `Decoder.forward` does it, or a pass of prompts. Gate, up and silu
are one launch, whose tiles are activated and written while others are multiplied (`kernels/decode/gated_many.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.decode import gated_many
from redline.kernels.decoder_steps import add_rms_norm, silu_mul
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend


class MostRows:
    """Steps of very many rows of a network that `FewRows` serves, and prompts of many tokens."""

    most_rows = 4096
    """Of a decode step."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._multiprocessors = torch.cuda.get_device_properties(decoder.embed.device).multi_processor_count

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether it takes this network, of those that `FewRows` takes."""
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        return all(gated_many.serves(layer.gate_up.weight, layer.gate_up.bias) for layer in layers)

    def begins_early(self, rows: int) -> bool:
        """Whether attention of its own begins before the launch in front of it has ended."""
        return False

    def hidden(self, tokens_B: Tensor, attend: FusedAttend, only_M: Tensor | None = None) -> Tensor:
        """[B, E] after the final norm; [M, E] with `only_M`, as in `Decoder.forward`."""
        decoder, eps = self._decoder, self._decoder.spec.norm_eps
        x_BE, delta_BE = F.embedding(tokens_B, decoder.embed), None
        for number, layer in enumerate(decoder.layers, 1):
            assert isinstance(layer, DecoderLayer)
            x_BE, normed_BE = add_rms_norm(x_BE, delta_BE, layer.attn_norm, eps, early=True)
            heads_BX = F.linear(normed_BE, layer.qkv.weight, layer.qkv.bias)
            out_BX = attend.attend_fused(layer, heads_BX.view(len(tokens_B), -1, decoder.spec.head_dim)).flatten(1)
            if only_M is not None and number == len(decoder.layers):
                x_BE, out_BX = x_BE[only_M], out_BX[only_M]
            attended_BE = F.linear(out_BX, layer.o.weight, layer.o.bias)
            x_BE, normed_BE = add_rms_norm(x_BE, attended_BE, layer.mlp_norm, eps, early=True)
            delta_BE = F.linear(self._gated(normed_BE, layer.gate_up.weight), layer.down.weight, layer.down.bias)
        return add_rms_norm(x_BE, delta_BE, decoder.norm, eps, early=True)[1]

    def _gated(self, x_BE: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) · up, [B, I]."""
        tile = gated_many.tile_of(len(x_BE), len(weight) // 2, weight.shape[1], self._multiprocessors)
        return silu_mul(F.linear(x_BE, weight)) if tile is None else gated_many.gated_product(x_BE, weight, tile)
