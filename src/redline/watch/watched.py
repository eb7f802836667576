"""The stages of a run as its watch sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from redline.ports import Trainer
from redline.types import EngineStats, Task, Trajectory


class Watched(Protocol):
    """What a watch asks of the stages. `launch.stages.Stages` implements it."""

    @property
    def trainer(self) -> Trainer: ...

    @property
    def held_out(self) -> Sequence[Task]:
        """The tasks of every evaluation; empty where nothing is evaluated."""
        ...

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Block until the current policy has attempted these tasks. Returns the attempts at each."""
        ...

    def engine_stats(self) -> EngineStats:
        """What the engine has done so far; does not wait for it."""
        ...

    def buffer_metrics(self) -> Mapping[str, float]:
        """The buffer's part of a step's row."""
        ...

    def worker_metrics(self) -> Mapping[str, float]:
        """How many worker processes there are, as a step's row has it. Does not block."""
        ...

    def news(self) -> Sequence[str]:
        """Sentences for a person about what the stages decided during the step."""
        ...

    def flush_store(self) -> None:
        """Block until the disk has what became of every group. Called before a checkpoint, which must not know of steps that
        the store has not heard of."""
        ...
