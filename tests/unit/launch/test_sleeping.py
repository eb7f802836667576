"""An engine that sleeps while the trainer works."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.tiny_engines import ask, assert_same, make_model

from redline.engine import EngineSession, NativeEngine
from redline.errors import EngineMemoryError
from redline.launch.sleeping import TrainerOfSleeper
from redline.ports import Trainer
from redline.types import TrainBatch


class FakeTrainer:
    """Looks at the engine's cache during its step."""

    def __init__(self, engine: NativeEngine) -> None:
        self.version = 0
        self.engine = engine
        self.seen: list[int] = []

    def step(self, batch: TrainBatch) -> Any:
        self.seen.append(self.engine.memory()["kv_cache"])
        self.version += 1
        return "report"


class NoRoomEngine(NativeEngine):
    def wake(self) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 7.00 GiB\nand much more that nobody reads")


def test_the_engine_has_no_cache_during_a_step_and_samples_the_same_afterwards(tmp_path: Path) -> None:
    engine = make_model(tmp_path).engine()
    session = EngineSession(engine)
    fake = FakeTrainer(engine)
    trainer = TrainerOfSleeper(cast("Trainer", fake), engine, session)
    [before] = session.generate([ask(9, 12)])
    assert trainer.step(cast("TrainBatch", None)) == "report"
    assert fake.seen == [0]
    assert trainer.version == 1
    [after] = session.generate([ask(9, 12)])
    assert_same(after, before)


def test_an_engine_that_finds_no_room_when_it_wakes_says_which_keys_to_change(tmp_path: Path) -> None:
    engine = make_model(tmp_path).engine(kind=NoRoomEngine)
    trainer = TrainerOfSleeper(cast("Trainer", FakeTrainer(engine)), engine, EngineSession(engine))
    with pytest.raises(EngineMemoryError, match=r"no room for its KV cache: tried to allocate 7.00 GiB\n") as error:
        trainer.step(cast("TrainBatch", None))
    assert "engine.gpu_memory_utilization" in str(error.value.hint)
