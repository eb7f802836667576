"""What the trainer asks of a pipeline: micro-batches through its stages, and what the last makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redline.models.lora.per_token import ActiveLora
from redline.models.stage import Stage
from redline.trainer.batches.micro_batches import MicroBatch

Items = Iterator[tuple[MicroBatch, dict[str, Tensor]]]
"""Micro-batches in order, each with its `network_inputs` on the device."""
Found = tuple[Tensor, Tensor]
"""float32[M] each: logprobs and entropies of a micro-batch's trained tokens."""


@dataclass(slots=True, frozen=True)
class Passing:
    """What a pass is made of."""

    network: Stage
    items: Items
    count: int
    """Micro-batches."""
    temperature: float
    finish: Callable[[MicroBatch, Found], Tensor]
    """Called by the last stage alone, with what it found: the loss of a micro-batch."""
    doing: str = "trainer.forward"
    """The span of a forward pass."""
    version: int | None = None
    """Goes with the spans, where it is given."""
    lora: ActiveLora | None = None

    @property
    def told(self) -> dict[str, Any]:
        """What the spans say."""
        return {} if self.version is None else {"version": self.version}
