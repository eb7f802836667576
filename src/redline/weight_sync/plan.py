"""Which tensors move to the engine, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from redline.types import WeightSet


@dataclass(slots=True, frozen=True)
class TransferPlan:
    """What brings an engine from the version it has to another."""

    version: int
    """The version it has afterwards."""
    names: tuple[str, ...]
    """Tensors to move, in the order of the network's layers, so that a receiver can load layer by layer."""


def plan_transfer(weights: WeightSet, version_there: int | None) -> TransferPlan:
    """Return what an engine at `version_there` lacks; None is an engine that got nothing yet.

    A version is one set of bytes, so an engine that has it lacks nothing. Otherwise everything that is trained may have
    changed, and the `WeightSet` holds nothing else: all parameters, or those of the adapter where only one is trained.
    """
    return TransferPlan(weights.version, () if weights.version == version_there else tuple(weights.tensors))
