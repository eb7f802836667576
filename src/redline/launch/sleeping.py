"""An engine that sleeps while the trainer works: each has the GPU's memory in turn.

rollouts: engine awake ──► sleep: its KV cache is given up ──► trainer.step ──► wake: a new, empty cache ──► rollouts
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from redline.errors import EngineMemoryError
from redline.ports import Session, Trainer
from redline.telemetry import span
from redline.types import StepReport, TrainBatch, WeightSet


class Sleeper(Protocol):
    """An engine that can give up its KV cache and make it again."""

    def sleep(self) -> object: ...

    def wake(self) -> object: ...


class TrainerOfSleeper:
    """A trainer during whose steps the engine sleeps. Implements `ports.Trainer`."""

    def __init__(self, trainer: Trainer, engine: Sleeper, session: Session) -> None:
        self._trainer = trainer
        self._engine = engine
        self._session = session

    @property
    def version(self) -> int:
        return self._trainer.version

    def step(self, batch: TrainBatch) -> StepReport:
        """Take a step with the engine's memory. Raises EngineMemoryError where the engine finds no room again afterwards."""
        with self._session.held():
            with span("engine.sleep"):
                self._engine.sleep()
            report = self._trainer.step(batch)
            with span("engine.wake"):
                self._wake()
        return report

    def _wake(self) -> None:
        try:
            self._engine.wake()
        except torch.OutOfMemoryError as error:
            raise EngineMemoryError(
                f"the engine wakes, and the trainer has left no room for its KV cache: {str(error).partition(chr(10))[0]}",
                "lower engine.gpu_memory_utilization, or set engine.kv_cache_memory_bytes",
            ) from error

    def weights(self) -> WeightSet:
        return self._trainer.weights()

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)

    def flush(self) -> None:
        self._trainer.flush()
