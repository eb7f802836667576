"""What a resumed run knows of the groups of an earlier process, with a real store, buffer and rollouts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.fakes import FakeTasks, group
from support.small_models import CONFIGS, write_model

from redline.buffer import GroupBuffer, TrajectoryStore
from redline.config.sections.buffer import BufferConfig
from redline.config.sections.engine import EngineConfig
from redline.config.sections.rollouts import RolloutsConfig
from redline.engine import EngineSession, NativeEngine
from redline.environments.single_turn import SingleTurn
from redline.launch.resume.state import go_on
from redline.models.files.hf import load_decoder
from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.types import TrajectoryGroup

CONFIG = RolloutsConfig(task={"kind": "import", "path": "tests:Fake"}, group_size=2, max_new_tokens=4)  # type: ignore[arg-type]


class Watch:
    """Over a run whose rows have counted this many groups."""

    def __init__(self, num_groups_counted: int | None) -> None:
        self.rows = SimpleNamespace(num_groups_counted=num_groups_counted)
        self.taken_over: list[TrajectoryGroup] = []

    def resume(self) -> None: ...

    def take_over(self, groups: Sequence[TrajectoryGroup]) -> None:
        self.taken_over += groups


def rollouts_on(folder: Path) -> Dispatcher:
    tokenizer, config = tiny_tokenizer(), copy.deepcopy(CONFIGS["llama, tied"])
    config.vocab_size = len(tokenizer)
    write_model(folder, config, seed=1)
    engine = NativeEngine(load_decoder(folder), EngineConfig(max_num_seqs=8), tokenizer)
    return Dispatcher(EngineSession(engine), RolloutSetup(FakeTasks(), SingleTurn, Chat(tokenizer, None, ""), CONFIG, (3,), 5))


def expected_after_a_resume(tmp_path: Path, num_groups_counted: int | None) -> list[tuple[int, float | None]]:
    """Three groups sampled at version 0, beside the trainer; the second and the third are at one task. The run goes on at
    version 1, whose rows have counted some of them."""
    before = TrajectoryStore(tmp_path / "trajectories")
    before.begin(range(3), 0)
    for index, task in enumerate(["first", "second", "second"]):
        before.add(replace(group([1.0, -1.0], task_id=task), index=index))
    before.close()
    store, rollouts = TrajectoryStore(tmp_path / "trajectories"), rollouts_on(tmp_path / "model")
    buffer = GroupBuffer(BufferConfig(max_lag=2, depth=3), 2, store)
    buffer.resume(1)
    watch, progress = Watch(num_groups_counted), SimpleNamespace(note=lambda _: None)
    stages: Any = SimpleNamespace(rollouts=rollouts, store=store, buffer=buffer, trainer=SimpleNamespace(version=1))
    go_on(SimpleNamespace(progress=progress), stages, watch)  # type: ignore[arg-type]
    rollouts.close()
    store.close()
    return [(found.index, found.expected_tokens) for found in watch.taken_over]


def test_nothing_is_expected_of_a_group_from_itself(tmp_path: Path) -> None:
    """Beside the trainer a group that no row has counted may have been sampled before the checkpoint as a whole."""
    assert expected_after_a_resume(tmp_path, num_groups_counted=1) == [(1, None), (2, None)]


def test_what_rows_have_counted_is_expected_of_what_they_have_not(tmp_path: Path) -> None:
    assert expected_after_a_resume(tmp_path, num_groups_counted=2) == [(2, 1.5)]


def test_without_the_rows_nothing_is_taken_over(tmp_path: Path) -> None:
    assert expected_after_a_resume(tmp_path, num_groups_counted=None) == []
