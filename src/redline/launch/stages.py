"""The five stages of a run, connected. They are known here by what they can do, never by their classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from redline import loop
from redline.buffer import GroupStore
from redline.engine.native.admission import Limits
from redline.launch.models import LoadedModel
from redline.launch.sleeping import Sleeper, TrainerOfSleeper
from redline.ports import Buffer, Engine, Rollouts, Session, SteppedEngine, Trainer, Watch, WeightSync
from redline.types import EngineStats, GenerateRequest, Task, Trajectory, TrajectoryGroup


class RunEngine(SteppedEngine, Protocol):
    """An engine that says what it can serve and how much memory it holds."""

    @property
    def limits(self) -> Limits:
        """What it can serve."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise EngineError where a request cannot be served as asked. Any thread may ask."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes by kind that it holds besides the network."""
        ...


class EnginesElsewhere(Protocol):
    """Engines in processes of their own, as a person looks at them who wants to know why nothing moves."""

    def unanswered(self) -> Mapping[str, float]:
        """What each engine was asked and has not answered, in words → seconds since. Does not block."""
        ...

    def stacks(self) -> Mapping[str, Sequence[str]]:
        """Engine → where its process was at its last sign of life, of those whose step lasts long. Does not block."""
        ...


class RunTrainer(Trainer, Protocol):
    """A trainer whose weights can be written to a file."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The float32 weights that are trained, by our parameter names."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes by kind that it holds."""
        ...

    def queues(self) -> Mapping[str, float]:
        """For how long the other ranks have been silent, by name. Does not block."""
        ...

    def close(self) -> None:
        """Part from the other ranks of the trainer, where there are some. Blocks until they have written their files."""
        ...


class RunBuffer(Buffer, Protocol):
    """A buffer that can be resumed and watched."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Its part of a step's row."""
        ...

    def news(self) -> Sequence[str]:
        """Sentences for a person about what its controllers changed at the last step."""
        ...

    def clock_stands_still(self) -> AbstractContextManager[None]:
        """Inside the block no group under way grows older."""
        ...

    def resume(self, version: int) -> None:
        """Go back to where the checkpoint of this version left it."""
        ...

    def not_counted(self, count: int) -> Sequence[TrajectoryGroup]:
        """The groups that arrived after the first `count`, in an earlier process."""
        ...


@dataclass(slots=True)
class Stages:
    """The stages of one run. Implements `watch.watched.Watched`."""

    rollouts: Rollouts
    buffer: RunBuffer
    trainer: RunTrainer
    weight_sync: WeightSync
    synced_engine: Engine
    """The engine as the loop has it: an update goes through `weight_sync`."""
    engine: RunEngine
    """The engine itself; several in other processes are one here."""
    close_engines: Callable[[], None]
    """Ends the processes that engines run in, where there are any."""
    session: Session
    """Owns the engine: hold it to use the engine between two steps."""
    store: GroupStore
    """Where the buffer keeps its groups."""
    model: LoadedModel
    """The network that is trained. An engine in this process samples from it."""
    held_out: Sequence[Task]
    sleeper: Sleeper | None = None
    """The engine, where it sleeps while the trainer works."""
    elsewhere: EnginesElsewhere | None = None
    """The engines, where they have processes of their own."""

    def run(self, watch: Watch, steps: int, trainer: Trainer | None = None) -> None:
        """Run the loop until the trainer has taken `steps` steps in all, or the watch ends it. `trainer` stands in for the
        stages' own: the same one, with something around it."""
        trainer = trainer or self.trainer
        if self.sleeper:
            trainer = TrainerOfSleeper(trainer, self.sleeper, self.session)
        loop.run(self.rollouts, self.buffer, trainer, self.weight_sync, self.synced_engine, steps=steps, watch=watch)

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Scored attempts at held-out tasks. Blocks; meanwhile no group under way grows older."""
        patience_s = self.buffer.patience_s
        with self.buffer.clock_stands_still():
            return self.rollouts.evaluate(tasks, patience_s)

    def memory(self) -> Counter[str]:
        """Bytes by kind that the stages hold."""
        kinds: Counter[str] = Counter()
        for held in (self.trainer.memory(), self.engine.memory(), self.rollouts.memory()):
            kinds.update(held)
        return kinds

    def queues(self) -> dict[str, float]:
        """How much waits where, by name. Does not block."""
        metrics, stats = self.buffer.metrics, self.engine.stats
        return {
            "buffer: groups under way": metrics["buffer/in_flight"],
            "buffer: groups that may be under way or waiting": metrics["buffer/target"],
            **self.rollouts.queues(),
            **{f"rollouts: {kind} workers": count for kind, count in self.rollouts.num_workers().items()},
            **self.trainer.queues(),
            "engine: sequences running": stats.running,
            "engine: sequences waiting": stats.waiting,
            "engine: KV blocks in use": stats.kv_blocks_used,
            "engine: KV blocks": stats.kv_blocks_total,
            **(self.elsewhere.unanswered() if self.elsewhere else {}),
        }

    def stacks_elsewhere(self) -> Mapping[str, Sequence[str]]:
        """Process → its stack, of those that no other process of this machine can look at. Does not block."""
        return self.elsewhere.stacks() if self.elsewhere else {}

    def engine_stats(self) -> EngineStats:
        """What the engine has done so far. Does not block."""
        return self.engine.stats

    def buffer_metrics(self) -> Mapping[str, float]:
        return self.buffer.metrics

    def worker_metrics(self) -> Mapping[str, float]:
        return {f"rollouts/{kind}_workers": count for kind, count in self.rollouts.num_workers().items()}

    def news(self) -> Sequence[str]:
        return self.buffer.news()

    def flush_store(self) -> None:
        """Block until the disk has what became of every group."""
        self.store.flush()

    def close(self) -> None:
        """Cancel what is under way, end all threads and close the files. Blocks for some seconds at most."""
        try:
            self.rollouts.close()
        finally:
            self.close_engines()
            self.store.close()
            self.trainer.close()
