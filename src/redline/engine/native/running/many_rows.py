"""A decode step of more rows than `FewRows` takes: the products are cuBLAS's, all between them ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.engine.native.running.chain import Chain
from redline.kernels import cublas_lt
from redline.kernels.decode.few_rows import can_overlap
from redline.kernels.decoder_steps import silu_mul
from redline.models.decoder import Decoder, DecoderLayer
from redline.models.layers import products

TUNED = False
"""Whether products are done by the fastest algorithm of cuBLASLt that has the bits of torch's choice."""
OVERLAPPED = False
"""Whether a launch of ours begins before the one in front of it has ended, on a device that can do so."""


class ManyRows(Chain):
    """One step at a time: the products share the room that their algorithms work in. The bits are `Decoder.forward`'s."""

    def __init__(self, decoder: Decoder, *, tuned: bool = False, overlapped: bool = False) -> None:
        super().__init__(decoder)
        device = decoder.embed.device
        self.early = overlapped and can_overlap(device)
        is_tuned = tuned and device.type == "cuda" and cublas_lt.is_there()
        self._room = torch.empty(products.ROOM_BYTES, dtype=torch.uint8, device=device) if is_tuned else None

    @classmethod
    def of(cls, decoder: Decoder) -> ManyRows | None:
        """None where it serves another network, or has nothing to give."""
        has_any = TUNED or OVERLAPPED
        return cls(decoder, tuned=TUNED, overlapped=OVERLAPPED) if has_any and cls.serves(decoder) else None

    def choose(self, rows: int) -> None:
        """Find the algorithms for steps of so many rows, unless this process knows them. Waits for the device; nothing may be
        captured meanwhile."""
        if self._room is None:
            return
        layers = [layer for layer in self._decoder.layers if isinstance(layer, DecoderLayer)]
        for name in ("qkv", "o", "gate_up", "down"):
            linears = [getattr(layer, name) for layer in layers]
            products.choose(rows, [linear.weight for linear in linears], linears[0].bias, self._room)
        products.choose(rows, [self._decoder.output_weight], None, self._room)

    def _product(self, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        if self._room is None:
            return F.linear(x_BK, weight_NK, bias_N)
        return products.decode(x_BK, weight_NK, bias_N, self._room)

    def _gated(self, x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        return silu_mul(self._product(x_BK, weight_NK, bias_N), early=self.early)
