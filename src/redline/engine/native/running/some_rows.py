"""A decode step of some rows through the network, as `Decoder.forward` does it: more than few, and fewer than fill the device's
tensor cores.

    x, parts ─► norm ─► qkv ─► attention ─► o, in parts ─► norm ─► gate, up, silu ─► down, in parts ─► the next layer

Products with few columns are cut along K (`kernels/decode/parts.py`), and the norm behind them adds the parts up. Gate, up and
silu are one launch, of few rows by `kernels/decode/few_rows.py`, of more by `kernels/decode/gated.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.kernels.decode import gated
from redline.kernels.decode.few_rows import GATED_ROWS, can_overlap, product
from redline.kernels.decode.parts import MOST_ROWS, parts_of, product_in_parts
from redline.kernels.decoder_steps import add_rms_norm, silu_mul
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend

EARLY_ROWS = 128
"""Beyond these, launches that begin early take more than they save."""


class SomeRows:
    """Steps of a few rows of a network that `FewRows` serves."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        device, layers = decoder.embed.device, [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self._early = can_overlap(device)
        self._has_gated = all(gated.serves(layer.gate_up.weight, layer.gate_up.bias) for layer in layers)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if self._has_gated else 0
        self.most_rows = gated.MOST_ROWS if self._has_gated else MOST_ROWS

    def begins_early(self, rows: int) -> bool:
        """Whether own launches begin before the one in front of them has ended."""
        return self._early and rows <= EARLY_ROWS

    def hidden(self, tokens_B: Tensor, attend: FusedAttend) -> Tensor:
        """[B, E] after the final norm."""
        decoder, eps, early = self._decoder, self._decoder.spec.norm_eps, self.begins_early(len(tokens_B))
        x_BE, delta = F.embedding(tokens_B, decoder.embed), None
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            x_BE, normed_BE = add_rms_norm(x_BE, delta, layer.attn_norm, eps, early=early)
            heads_BX = F.linear(normed_BE, layer.qkv.weight, layer.qkv.bias)
            out_BHD = attend.attend_fused(layer, heads_BX.view(len(tokens_B), -1, decoder.spec.head_dim))
            x_BE, normed_BE = add_rms_norm(x_BE, _in_parts(out_BHD.flatten(1), layer.o), layer.mlp_norm, eps, early=early)
            delta = _in_parts(self._gated(normed_BE, layer.gate_up, early), layer.down)
        return add_rms_norm(x_BE, delta, decoder.norm, eps, early=early)[1]

    def _gated(self, x_BE: Tensor, by: nn.Linear, early: bool) -> Tensor:
        """silu(gate) · up, [B, I]."""
        rows = len(x_BE)
        if rows <= GATED_ROWS:
            return product(x_BE, by.weight, by.bias, room=None, is_gated=True, early=early)
        tile = gated.tile_of(rows, len(by.weight) // 2, x_BE.shape[1], self._multiprocessors) if self._has_gated else None
        return silu_mul(F.linear(x_BE, by.weight, by.bias)) if tile is None else gated.gated_product(x_BE, by.weight, tile)


def _in_parts(x_BK: Tensor, by: nn.Linear) -> Tensor:
    """[B, N], or [parts, B, N] in float32. One with a bias is left to cuBLAS."""
    bias: Tensor | None = by.bias
    parts = parts_of(len(x_BK), *by.weight.shape) if bias is None else 1
    return F.linear(x_BK, by.weight, bias) if parts == 1 else product_in_parts(x_BK, by.weight, parts)
