"""What moves the bytes: the port that every file of `transports/` implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.verify import Probe
from redline.wire import Connection


class Transport(Protocol):
    """Brings the trainer's tensors to its engines. `protocol.py` calls `move`, `verify` and `adopt` in this order, and `revert`
    after one of them has raised. Every transport passes `tests/contract/test_transports.py`."""

    @property
    def shares_storage(self) -> bool:
        """Whether the engine reads the trainer's own tensors. The protocol then holds the engine while they are written."""
        ...

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Bring the tensors of the plan into the engine's reach, and block until all are there. The engine goes on reading the
        old ones, unless the two share storage. Returns the bytes that were copied; raises where they did not arrive."""
        ...

    def verify(self, weights: WeightSet) -> None:
        """Raise unless the engine would read exactly these tensors: the same names, shapes, types and bytes."""
        ...

    def adopt(self, probe: Probe | None = None) -> None:
        """Have every engine read what was moved, and come to the probe's logprobs with it. What was moved is verified. An
        engine in this process is held; one in another holds itself."""
        ...

    def revert(self, version: int) -> None:
        """Give up the update to `version`: bring every engine that has adopted it back to the version it had before, whole.
        Does not raise for one that cannot be reached."""
        ...

    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        """Bring one engine that joins, or was started again, to these weights, have it prove that as in every update, and have
        it in every later one."""
        ...

    @property
    def pause_s(self) -> float | None:
        """How long the engine that took longest stood still for the last update; None where only the protocol knows."""
        ...

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of each part of the last update (`gather`, `convert`, `serialise`, `transfer`, `load`, `verify`, `resume`);
        parts that it does not have are left out."""
        ...

    def close(self) -> None:
        """Let go of what the engines have opened. The connections stay open."""
        ...
