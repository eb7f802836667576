"""What moves the bytes: the port that every file of `transports/` implements."""

from __future__ import annotations

from typing import Protocol

from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan


class Transport(Protocol):
    """Brings the trainer's tensors to one engine. `protocol.py` calls `move`, `verify` and `adopt` in this order, and none of
    them again after one has raised. Every transport passes `tests/contract/test_transports.py`."""

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

    def adopt(self) -> None:
        """Have the engine read what was moved. The engine is held, and what was moved is verified."""
        ...
