"""What the trainer hands to weight_sync, and that to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True)
class WeightSet:
    """trainer → weight_sync: the policy's parameters as the trainer holds them."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    """Name to the trainer's own storage, in the compute dtype; reading it copies nothing."""


@dataclass(slots=True, frozen=True)
class WeightUpdate:
    """weight_sync → engine: what the engine must take over before it samples again."""

    version: int
    changed: tuple[str, ...]
    """Names whose values changed."""
    bytes_moved: int
    """Bytes copied to get here; 0 when storage is shared."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Filled when it is applied: seconds of each part (`gather`, `transfer`, …), and `pause`, for which the engine that took
    longest stood still; where it shares the trainer's storage the pause holds `write`, the trainer's own writing."""
