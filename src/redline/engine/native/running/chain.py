"""A decode step through the network, as `Decoder.forward` does it, as a chain of launches.

    x, delta ─► norm ─► qkv ─► attention ─► o ─► norm ─► gate, up, silu ─► down ─► the next layer

Where the arrows may overlap, a launch of ours begins before the one in front of it has ended (a programmatic dependent launch)
and waits for it before it reads or writes anything. That one has waited in its turn, so that all in front of it has ended.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from redline.kernels.decoder_steps import add_rms_norm
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend


class Chain:
    """What the launches have in common, whoever multiplies: `_product`, and `_gated` for gate and up with their activation."""

    early = False
    """Whether a launch of ours begins before the one in front of it has ended."""
    arrived: Tensor | None = None
    """What `decode_attention` counts parts with, where it merges them itself."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether it takes this network: whole layers, without experts, and without adapters beside their projections."""
        if decoder.spec.experts is not None:
            return False
        return decoder.plain_head and all(isinstance(layer, DecoderLayer) and layer.is_whole for layer in decoder.layers)

    def logits(self, tokens_B: Tensor, attend: FusedAttend) -> Tensor:
        """[B, V] in the compute dtype."""
        decoder, eps, early = self._decoder, self._decoder.spec.norm_eps, self.early
        x_BE, delta_BE = F.embedding(tokens_B, decoder.embed), None
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            x_BE, normed_BE = add_rms_norm(x_BE, delta_BE, layer.attn_norm, eps, early=early)
            heads_BX = self._product(normed_BE, layer.qkv.weight, layer.qkv.bias)
            out_BHD = attend.attend_fused(layer, heads_BX.view(len(tokens_B), -1, decoder.spec.head_dim))
            attended_BE = self._product(out_BHD.flatten(1), layer.o.weight, layer.o.bias)
            x_BE, normed_BE = add_rms_norm(x_BE, attended_BE, layer.mlp_norm, eps, early=early)
            inner_BI = self._gated(normed_BE, layer.gate_up.weight, layer.gate_up.bias)
            delta_BE = self._product(inner_BI, layer.down.weight, layer.down.bias)
        _, normed_BE = add_rms_norm(x_BE, delta_BE, decoder.norm, eps, early=early)
        return self._product(normed_BE, decoder.output_weight, None)

    def _product(self, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """x · weightᵀ, [B, N]."""
        raise NotImplementedError

    def _gated(self, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """silu(gate) · up of the two halves of that, [B, N / 2]."""
        raise NotImplementedError
