"""Causal attention over packed segments, where a segment may continue another one.

A group of attempts shares its prompt. Packed as a segment of its own, the prompt goes through the network once, and each
attempt attends to it and to itself:

    packed tokens   [ prompt A ][ A1 ][ A2 ][ A3 ][ prompt B ][ B1 ][ B2 ]
    parent            none        0     0     0     none        4     4
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.cpu.attention import Families
from redline.kernels.segments import Segments
from redline.models.attention.limits import NO_LIMITS, Limits
from redline.models.attention.padded import PaddedAttention


class PackedAttention:
    """An `Attend` for one packed batch: in C on a CPU where heads allow it, else with torch's operations."""

    def __init__(self, segments: Segments, device: torch.device | str = "cpu") -> None:
        self._segments, self._device = segments, device
        self._families = Families(segments)
        self._padded: PaddedAttention | None = None
        self._longest = int((segments.parent_lengths + segments.lengths).max(initial=0))
        self.positions_T = torch.from_numpy(segments.positions()).to(device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        sees_all = limits.softcap is None and (limits.window is None or limits.window >= self._longest)
        if sees_all and self._families.serves(q_THD, k_TKD, v_TKD):
            return self._families.attend(q_THD, k_TKD, v_TKD)
        self._padded = self._padded or PaddedAttention(self._segments, self._device)
        return self._padded.attend(q_THD, k_TKD, v_TKD, limits)
