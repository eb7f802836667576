"""Each kind of Ray actor is killed at random moments, again and again, in a run that must complete as if nothing had happened.

REDLINE_KILL_ROUNDS=20 pytest -m slow tests/e2e/test_ray_kills.py      as many kills of each kind; the seconds are printed
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.processes import num_rows, only_run, rows, started, succeed, write_letters
from support.ray_runs import LOCAL, Trained, assert_same_but_for_rounding, engines, quiet_ray, ranks, trained, workers  # noqa: F401  the fixture is for every test

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("REDLINE_KILL_ROUNDS", "2"))
STEPS = 8 * ROUNDS + 8
"""Of the run to which nothing happens."""
NO_END = 100_000
"""Steps of a run that is interrupted after the last kill, however fast the others go on, and then goes on to its end."""
RECOVERS_S = 600.0
"""Within which a run begins, or goes on after a kill: a bound on a hang, for a machine with much else to do."""
TASK = '''

import time
from redline.types import Reaction

class Slowly(Letters):
    """The same, at a pace at which there is time to kill something."""

    def score(self, task, text):
        time.sleep(0.01)
        return super().score(task, text.replace("q", ""))

class Word:
    def __init__(self, seed):
        pass

    def reset(self, task):
        return task.messages[0]["content"]

    def step(self, reply):
        time.sleep(0.02)
        return Reaction("", {"letter": reply.count("e") / max(1, len(reply))}, True)
'''
KINDS: dict[str, tuple[Callable[[], list[psutil.Process]], tuple[str, ...]]] = {
    "rank": (lambda: ranks(0), ()),
    "engine": (engines, ("placement.engines=2",)),
    "environment worker": (workers, ("rollouts.environment.run_in=processes", "rollouts.environment.workers=2")),
    "reward worker": (workers, ("rollouts.reward_run_in=processes", "rollouts.max_reward_workers=2")),
}


def recipe(folder: Path, kind: str, steps: int = NO_END) -> Path:
    folder.mkdir()
    rollouts: dict[str, object] = {"task": {"kind": "import", "path": "letters:Slowly"}, "evaluation": {"num_tasks": 0}}
    if kind == "environment worker":
        rollouts["environment"] = {"name": "letters:Word", "retries": 3}
    path = write_letters(folder, run={"steps": steps, "checkpoint_every": 2}, rollouts=rollouts)
    with (folder / "letters.py").open("a") as module:
        module.write(TASK)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", recipe(folder, "rank", STEPS), cwd=folder)
    return trained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_completes_however_often_actors_of_a_kind_are_killed(tmp_path: Path, alone: Trained, kind: str) -> None:
    find, more = KINDS[kind]
    folder, seconds = tmp_path / "run", []
    limits = (f"placement.max_restarts={ROUNDS + 3}",)
    with started("train", recipe(folder, kind), *LOCAL, *more, *limits, cwd=folder) as driver:
        metrics = folder / "runs" / "letters-001" / "metrics.jsonl"
        _wait(lambda: num_rows(metrics) >= 2, driver, folder)
        for _ in range(ROUNDS):
            time.sleep(random.uniform(0.0, 1.5))
            seconds.append(_kill_one(find, metrics, driver, folder))
        driver.send_signal(signal.SIGINT)
        assert driver.wait(RECOVERS_S) == 130, (folder / "stderr.txt").read_text()
    last = num_rows(metrics) + 2
    succeed("train", str(only_run(folder).path), "--resume", f"run.steps={last}", cwd=folder)
    taken = rows(metrics)
    assert [row["step"] for row in taken] == list(range(1, last + 1)), "nothing is trained twice"
    assert {row["rollouts/attempts"] for row in taken} == {32}
    found, expected = trained(folder)[:STEPS], alone[:last]
    if kind in ("rank", "reward worker"):
        assert found == expected
    elif kind == "engine":
        assert_same_but_for_rounding(found, expected)
    figures = {"kind": kind, "rounds": ROUNDS, "min_s": min(seconds), "median_s": statistics.median(seconds)}
    print(json.dumps({**figures, "max_s": max(seconds), "failures": sum(row["rollouts/failures"] for row in taken)}))


def _kill_one(find: Callable[[], list[psutil.Process]], metrics: Path, driver: subprocess.Popen[str], folder: Path) -> float:
    """Kill a process of the kind, or the actor that holds it. Returns the seconds until a new one is there and the run has
    taken a step that it had not taken before."""
    _wait(lambda: bool(find()), driver, folder)
    before = find()
    victim = random.choice(before)
    last = max((row["step"] for row in rows(metrics)), default=0)
    parent = victim.parent()
    is_hosted = parent is not None and parent.name().startswith("ray::ProcessHost")
    (parent if is_hosted and random.random() < 0.5 else victim).kill()
    began = time.monotonic()
    _wait(lambda: max((row["step"] for row in rows(metrics)), default=0) > last, driver, folder)
    _wait(lambda: any(process not in before for process in find()), driver, folder)
    return time.monotonic() - began


def _wait(reached: Callable[[], bool], driver: subprocess.Popen[str], folder: Path) -> None:
    until = time.monotonic() + RECOVERS_S
    while not reached():
        assert driver.poll() is None, (folder / "stderr.txt").read_text()
        assert time.monotonic() < until, (folder / "stderr.txt").read_text()
        time.sleep(0.05)
