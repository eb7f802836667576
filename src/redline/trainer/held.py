"""What a trainer holds in memory, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from redline.models.sizes.in_use import tensor_bytes
from redline.trainer.optimizer.adamw import MasterAdamW


def held_bytes(
    parameters: Iterable[Tensor], optimizers: Sequence[MasterAdamW], device: torch.device, *, offloads: bool
) -> dict[str, int]:
    """Bytes of networks' parameters, wherever they lie, and of their optimizers, whose states are in host memory where the
    recipe `offloads` them. `offloaded` are those in host memory for another device; left out where there are none."""
    weights = tensor_bytes(parameters)
    states = sum(optimizer.state_bytes for optimizer in optimizers)
    offloaded = weights.total() - weights[device.type] + (states if offloads else 0)
    return {
        "weights": weights[device.type],
        "gradients": sum(optimizer.gradient_bytes for optimizer in optimizers),
        "optimizer": 0 if offloads else states,
        **({"offloaded": offloaded} if offloaded else {}),
    }
