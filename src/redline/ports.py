"""The five stages as the loop sees them. A stage implements its own port and is handed the ports it needs; it never
imports another stage."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from redline.errors import EngineError
from redline.types import (
    Completion,
    Delta,
    GenerateRequest,
    StepReport,
    Task,
    TrainBatch,
    TrajectoryGroup,
    WeightSet,
    WeightUpdate,
)

Score = Mapping[str, float] | float
"""What an answer is worth: the named parts of the reward, or one number."""


class Engine(Protocol):
    """Samples from the policy."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked."""
        ...

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on."""
        ...


class SteppedEngine(Protocol):
    """An engine that advances when it is told to, and takes requests at any time between two steps."""

    def submit(self, request: GenerateRequest) -> int:
        """The request's number."""
        ...

    def abort(self, request_id: int) -> None: ...

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it has so far. Any thread may ask."""
        ...

    def step(self) -> Sequence[tuple[int, Delta | EngineError]]:
        """What came of it: pieces of requests by their numbers, the last of a completion with the whole, or why one failed."""
        ...

    @property
    def has_work(self) -> bool: ...


class Rollouts(Protocol):
    """Turns tasks into scored attempts, at once or in the background."""

    def begin(self, numbers: Sequence[int], version: int) -> None:
        """Attempt these tasks from now on; the task and its randomness follow from its number alone. Does not wait."""
        ...

    def arrived(self) -> Sequence[TrajectoryGroup]:
        """Groups that were completed meanwhile; does not wait."""
        ...

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> Sequence[TrajectoryGroup]:
        """Block until at least one group is complete, or make it now. Returns an empty sequence after `patience_s` seconds.
        With `late`, the wait is booked as one for late groups: enough others are ready."""
        ...

    def abandon(self, numbers: Sequence[int]) -> None:
        """Attempt these no longer; they will not come any more."""
        ...


class Buffer(Protocol):
    """Decides what is attempted, and holds attempts until the trainer wants them, no longer than the lag budget allows."""

    def admit(self, version: int) -> Sequence[int]:
        """Numbers of the tasks to begin now that the trainer is at `version`."""
        ...

    def give_up(self, version: int) -> Sequence[int]:
        """Numbers of groups under way that were begun too long ago: others take their place."""
        ...

    @property
    def patience_s(self) -> float | None:
        """How long to wait for groups before it is time to `give_up` some; None is for ever."""
        ...

    def offer(self, *groups: TrajectoryGroup) -> None: ...

    def has_batch(self, version: int) -> bool: ...

    @property
    def waits_for_late_groups(self) -> bool:
        """Whether the last `has_batch` said no only because groups under way would grow too old."""
        ...

    def next_batch(self, version: int) -> TrainBatch: ...

    def trained(self, batch: TrainBatch) -> None:
        """The weights hold what the batch taught."""
        ...


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

    def flush(self) -> None:
        """Block until every checkpoint that `save` has begun is on the disk."""
        ...


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

    def score(self, task: Task, text: str) -> Score | Awaitable[Score]:
        """The reward for an answer to `task`: a number, or its named parts; may be `async def`. A part called `correct` or
        `accuracy` that is always 0 or 1 is shown as an accuracy. A source that several threads may ask at once says so by an
        attribute `score_is_thread_safe = True`."""
        ...


class Watch(Protocol):
    """Sees what the loop does, and may end it. Metrics, checkpoints and evaluations hang here, not in the loop."""

    def group_collected(self, group: TrajectoryGroup) -> None: ...

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None: ...

    def should_stop(self) -> bool:
        """True ends the run before the next step; everything up to here is kept."""
        ...
