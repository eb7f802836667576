"""What a pass through the network tells of its routers, or is told: the engine records which experts a token went to, and the
trainer brings what was recorded.

Letters: L layers with experts, C choices of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from redline.errors import ModelError
from redline.models.spec import DecoderSpec, ModelShape

MOST_EXPERTS = 255
"""Experts of a layer, for a choice to be one byte: the last value says that none is known (`types.UNKNOWN_EXPERT`)."""


def routing_shape(shape: ModelShape | None) -> tuple[int, int]:
    """Layers with experts, and choices of a token: the bytes that `types.Completion.routing` has for it. Raises `ModelError`
    where nothing can be recorded. `shape` is None for a family that transformers runs."""
    experts = shape.experts if isinstance(shape, DecoderSpec) else None
    if experts is None:
        raise ModelError("engine.record_routing: the model has no experts that redline runs itself", "leave it out")
    if experts.count > MOST_EXPERTS:
        raise ModelError(
            f"engine.record_routing: a choice among {experts.count} experts does not fit the byte that it is recorded in",
            "leave it out",
        )
    return len(experts.layers), experts.per_token


class Routes(Protocol):
    """The routes of the tokens of one pass."""

    def sampled(self, layer: int) -> Tensor | None:
        """The experts that the tokens went to when they were sampled, uint8[T, C], `UNKNOWN_EXPERT` where that is not known;
        None where nothing is."""
        ...

    def record(self, layer: int, experts_TC: Tensor) -> None:
        """Hear which experts the tokens go to now."""
        ...


class SampledRoutes:
    """What an engine recorded, for a pass that is compared with it."""

    def __init__(self, routing: Tensor, layers: Sequence[int]) -> None:
        """`routing`: uint8[T, L · C], as `types.Completion.routing`; `layers` are those with experts."""
        self._routing_TLC = routing.unflatten(1, (len(layers), -1))
        self._places = {layer: place for place, layer in enumerate(layers)}

    def sampled(self, layer: int) -> Tensor:
        return self._routing_TLC[:, self._places[layer]]

    def record(self, layer: int, experts_TC: Tensor) -> None:
        pass
