"""The five stages as the loop sees them. A stage implements its own port and is handed the ports it needs; it never
imports another stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from redline.types import Completion, GenerateRequest, StepReport, Task, TrainBatch, TrajectoryGroup, WeightSet, WeightUpdate


class Engine(Protocol):
    """Samples from the policy."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked."""
        ...

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on."""
        ...


class Rollouts(Protocol):
    """Turns tasks into scored attempts."""

    def collect(self, num_groups: int, version: int) -> Iterable[TrajectoryGroup]:
        """The next groups for the trainer at `version`; which tasks and seeds follows from `version` alone."""
        ...


class Buffer(Protocol):
    """Holds attempts until the trainer wants them, and no longer than the lag budget allows."""

    def demand(self, version: int) -> int:
        """Groups still missing for the batch of `version`."""
        ...

    def offer(self, group: TrajectoryGroup) -> None: ...

    def next_batch(self, version: int) -> TrainBatch: ...


class Trainer(Protocol):
    """Improves the policy."""

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        ...

    def step(self, batch: TrainBatch) -> StepReport: ...

    def weights(self) -> WeightSet: ...

    def save(self, folder: Path) -> None:
        """Everything needed to continue bit for bit."""
        ...

    def load(self, folder: Path) -> None: ...


class WeightSync(Protocol):
    """Carries the trainer's weights to the engine."""

    def publish(self, weights: WeightSet) -> WeightUpdate: ...


class TaskSource(Protocol):
    """Where tasks come from. User code may implement it and name it by import path."""

    def train(self, index: int) -> Task:
        """Training task number `index`, counted from 0 without end; the same index always gives the same task."""
        ...

    def held_out(self, count: int) -> Sequence[Task]:
        """At most `count` distinct tasks that `train` never returns."""
        ...

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        """The named parts of the reward for an answer to `task`."""
        ...


class Watch(Protocol):
    """Sees what the loop does, and may end it. Metrics, checkpoints and evaluations hang here, not in the loop."""

    def group_collected(self, group: TrajectoryGroup) -> None: ...

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None: ...

    def should_stop(self) -> bool:
        """True ends the run before the next step; everything up to here is kept."""
        ...
