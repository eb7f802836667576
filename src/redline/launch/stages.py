"""The five stages of a process, connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline import loop
from redline.buffer import GroupBuffer, GroupStore
from redline.engine import EngineSession, NativeEngine
from redline.models.files.hf import AnyDecoder
from redline.ports import Rollouts, Trainer, Watch
from redline.trainer import PolicyTrainer
from redline.types import EngineStats, Task, Trajectory
from redline.weight_sync import WeightProtocol


@dataclass(slots=True)
class Stages:
    """The five stages of one process, connected."""

    rollouts: Rollouts
    buffer: GroupBuffer
    trainer: PolicyTrainer
    weight_sync: WeightProtocol
    engine: NativeEngine
    session: EngineSession
    """Owns the engine."""
    decoder: AnyDecoder
    source: Path
    """The folder the model was loaded from."""
    store: GroupStore
    held_out: list[Task]

    def run(self, watch: Watch, steps: int, trainer: Trainer | None = None) -> None:
        """Run the loop until the trainer has taken `steps` steps in all, or the watch ends it. `trainer` stands in for the
        stages' own: the same one, with something around it."""
        trainer = trainer or self.trainer
        loop.run(self.rollouts, self.buffer, trainer, self.weight_sync, self.weight_sync.engine, steps=steps, watch=watch)

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Scored attempts at held-out tasks. Blocks; meanwhile no group under way grows older."""
        patience_s = self.buffer.patience_s
        with self.buffer.clock_stands_still():
            return self.rollouts.evaluate(tasks, patience_s)

    def memory(self) -> Counter[str]:
        """Bytes by kind that the stages hold."""
        kinds = Counter(self.trainer.memory())
        for stage in (self.engine, self.rollouts):
            kinds.update(stage.memory())
        return kinds

    def queues(self) -> dict[str, float]:
        """How much waits where, by name. Does not block."""
        metrics, stats = self.buffer.metrics, self.engine.stats
        return {
            "buffer: groups under way": metrics["buffer/in_flight"],
            "buffer: groups that may be under way or waiting": metrics["buffer/target"],
            **self.rollouts.queues(),
            "engine: sequences running": stats.running,
            "engine: sequences waiting": stats.waiting,
            "engine: KV blocks in use": stats.kv_blocks_used,
            "engine: KV blocks": stats.kv_blocks_total,
        }

    def engine_stats(self) -> EngineStats:
        return self.engine.stats

    def buffer_metrics(self) -> Mapping[str, float]:
        return self.buffer.metrics

    def news(self) -> list[str]:
        """Sentences about what the buffer's controllers have changed at the last step."""
        told = {"groups under way or waiting": self.buffer.decision, "workers for rewards": self.buffer.worker_decision}
        return [
            f"buffer: {f'{decision.old} → ' if decision.is_change else ''}{decision.new} {what}, {decision.why}"
            for what, decision in told.items()
            if decision.is_change or decision.is_news
        ]

    def flush_store(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.rollouts.close()
        self.store.close()
