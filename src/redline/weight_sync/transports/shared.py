"""Engine and trainer hold the same tensors: nothing moves, and a version is published by counting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.verify import Probe, SameStorage
from redline.wire import Connection


class SharedStorage:
    """For an engine in the trainer's process, on the trainer's device. Implements `Transport`."""

    shares_storage = True
    pause_s = None
    parts: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        engine_tensors: Mapping[str, Tensor],
        in_engine: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda tensors: tensors,
    ) -> None:
        """`engine_tensors`: those of the tensors the engine reads that the trainer trains, by the engine's names; `in_engine`
        returns the trainer's tensors under those names, where they are others."""
        self._storage = SameStorage(engine_tensors)
        self._in_engine = in_engine

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        return 0

    def verify(self, weights: WeightSet) -> None:
        self._storage.check(self._in_engine(weights.tensors))

    def adopt(self, probe: Probe | None = None) -> None:
        """The engine reads them already."""

    def revert(self, version: int) -> None:
        """There is one set of weights: the protocol keeps the engine held."""

    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        raise AssertionError("an engine of another process shares no storage with the trainer")

    def close(self) -> None:
        """Nothing was opened."""
