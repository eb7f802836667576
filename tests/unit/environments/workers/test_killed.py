"""Worker processes that are killed at random while a run plays in them."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.fakes import FakeEngine, FakeTasks, completion
from support.odd_games import OddGame

from redline.config.schema import RolloutsConfig
from redline.engine import EngineSession
from redline.environments.stepped import Stepped
from redline.environments.workers.held import GameClass
from redline.environments.workers.processes import ProcessWorkers
from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.types import Completion, GenerateRequest, TrajectoryGroup

SUPPORT = str(Path(__file__).parents[3])
ROUNDS = 20
GROUPS_PER_ROUND = 2
GROUP_SIZE = 8


def answer(request: GenerateRequest, index: int) -> Completion:
    return completion(np.random.default_rng([int(request.prompt_ids.sum()), index]).integers(3, 60, 3).tolist(), version=1)


def rollouts_in(workers: ProcessWorkers, retries: int) -> Dispatcher:
    game = GameClass("support.odd_games:OddGame", {"moves": 4}, SUPPORT, OddGame)
    config = RolloutsConfig.model_validate(
        {
            "task": {"kind": "import", "path": "tests:Fake"},
            "group_size": GROUP_SIZE,
            "max_new_tokens": 9,
            "environment": {"name": "tests:Fake", "retries": retries},
        }
    )
    setup = RolloutSetup(FakeTasks(), lambda score: Stepped(game, workers), Chat(tiny_tokenizer(), None, ""), config, (3,), 5)
    return Dispatcher(EngineSession(FakeEngine(answer=answer)), setup, beside=True)


def finished(rollouts: Dispatcher, count: int, limit_s: float = 60.0) -> list[TrajectoryGroup]:
    groups: list[TrajectoryGroup] = []
    deadline = time.monotonic() + limit_s
    while len(groups) < count:
        assert time.monotonic() < deadline, f"{len(groups)} of {count} groups came"
        groups += rollouts.finished(1.0)
    return groups


@pytest.mark.slow
def test_killing_workers_at_random_for_20_rounds_loses_no_attempt_and_hangs_nothing() -> None:
    draw = random.Random(0)
    workers = ProcessWorkers(3, 30.0)
    rollouts = rollouts_in(workers, retries=2)
    killed, started, failures, end = 0, set[int](), list[str](), threading.Event()

    def kill_at_random() -> None:
        nonlocal killed
        while not end.wait(draw.uniform(0.05, 0.5)):
            if pids := workers.pids:
                started.update(pids)
                os.kill(draw.choice(pids), 9)
                killed += 1

    killer = threading.Thread(target=kill_at_random)
    killer.start()
    try:
        for number in range(ROUNDS):
            indices = range(number * GROUPS_PER_ROUND, (number + 1) * GROUPS_PER_ROUND)
            rollouts.begin(list(indices), number)
            groups = finished(rollouts, GROUPS_PER_ROUND)
            assert {group.index for group in groups} == set(indices)
            for group in groups:
                assert {trajectory.attempt for trajectory in group.trajectories} == set(range(GROUP_SIZE))
                for trajectory in group.trajectories:
                    if trajectory.failure is None:
                        assert trajectory.reward == 4.0
                    else:
                        failures.append(trajectory.failure.reason)
    finally:
        end.set()
        killer.join()
        rollouts.close()
    assert killed >= ROUNDS // 2
    assert all("SIGKILL" in reason for reason in failures), set(failures)
    assert len(failures) < ROUNDS * GROUPS_PER_ROUND * GROUP_SIZE / 2, "most attempts end well"
    assert not any(psutil.pid_exists(pid) for pid in started)
    print(f"{killed} kills, {len(failures)} attempts of {ROUNDS * GROUPS_PER_ROUND * GROUP_SIZE} failed three times")


def test_a_game_that_crashes_its_process_is_a_recorded_failure_with_the_reason() -> None:
    workers = ProcessWorkers(1, 30.0)
    game = GameClass("support.odd_games:CrashingGame", {}, SUPPORT)
    config = RolloutsConfig.model_validate(
        {
            "task": {"kind": "import", "path": "tests:Fake"},
            "group_size": 2,
            "max_new_tokens": 9,
            "environment": {"name": "tests:Fake", "retries": 0},
        }
    )
    setup = RolloutSetup(FakeTasks(), lambda score: Stepped(game, workers), Chat(tiny_tokenizer(), None, ""), config, (3,), 5)
    rollouts = Dispatcher(EngineSession(FakeEngine(answer=answer)), setup)
    rollouts.begin([0], 0)
    [group] = rollouts.finished()
    rollouts.close()
    assert len(group.trajectories) == 2
    for trajectory in group.trajectories:
        assert trajectory.failure is not None
        assert trajectory.failure.stage == "environment"
        assert trajectory.failure.reason == "its worker process ended with exit code 3: no coal left"
    assert group.advantages.tolist() == [0.0, 0.0]
