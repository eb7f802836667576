"""The stages of a run, as a watch sees them, without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redline.ports import Trainer
from redline.types import EngineStats, Task, Trajectory


@dataclass
class FakeStages:
    """Answers every evaluation with `attempts`."""

    trainer: Trainer
    held_out: Sequence[Task] = ()
    attempts: list[list[Trajectory]] = field(default_factory=list)

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        return self.attempts

    def engine_stats(self) -> EngineStats:
        return EngineStats()

    def worker_metrics(self) -> Mapping[str, float]:
        return {}

    def buffer_metrics(self) -> Mapping[str, float]:
        return {}

    def news(self) -> Sequence[str]:
        return ()

    def flush_store(self) -> None: ...
