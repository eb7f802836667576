"""Workers of environments and rewards as actors of a Ray cluster: where they run, how many there are, and their loss."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import only_run, rows, started, succeed, wait_until, write_letters
from support.ray_runs import LOCAL, Trained, cluster, quiet_ray, trained, workers  # noqa: F401  the fixture is for every test here

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

GAME = '''

from redline.types import Reaction

class TwoWords:
    """Two replies, scored as one is."""

    def __init__(self, seed):
        self.left = 2

    def reset(self, task):
        self.left = 2
        return task.messages[0]["content"]

    def step(self, reply):
        self.left -= 1
        return Reaction("once more", {"letter": reply.count("e") / max(1, len(reply))}, self.left == 0)
'''
STEPS = 12


def letters(folder: Path, **environment: object) -> Path:
    folder.mkdir()
    sections = {"run": {"steps": STEPS, "checkpoint_every": 2}}
    if environment:
        sections["rollouts"] = {"environment": {"name": "letters:TwoWords", **environment}, "max_new_tokens": 8}
    recipe = write_letters(folder, **sections)
    with (folder / "letters.py").open("a") as module:
        module.write(GAME)
    return recipe


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", letters(folder), cwd=folder)
    return trained(folder)


@pytest.mark.parametrize("victim", ["none", "worker"])
def test_rewards_in_actors_leave_the_losses_as_they_are_also_where_one_is_killed(
    tmp_path: Path, alone: Trained, victim: str
) -> None:
    folder = tmp_path / "run"
    more = ("rollouts.reward_run_in=processes", "rollouts.max_reward_workers=2")
    with started("train", letters(folder), *LOCAL, *more, cwd=folder) as driver:
        if victim == "worker":
            own = folder / "runs" / "letters-001"
            assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
            workers()[0].kill()
        assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert trained(folder) == alone
    assert max(row["rollouts/reward_workers"] for row in rows(only_run(folder).metrics)) in (1, 2)


def test_games_in_actors_go_on_where_one_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started("train", letters(folder, run_in="processes", workers=2), *LOCAL, cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
        workers()[0].kill()
        assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    taken = rows(only_run(folder).metrics)
    assert [row["step"] for row in taken] == list(range(1, STEPS + 1))
    assert {row["rollouts/attempts"] for row in taken} == {32}
    assert max(row["rollouts/environment_workers"] for row in taken) == 2
    assert sum(row["rollouts/failures_environment"] for row in taken if "rollouts/failures_environment" in row) <= 32


# ── up and down ────────────────────────────────────────────────────────────────────────────────────────────────────────

SCALES = """
import asyncio, json, sys, time
import ray
from redline.environments.workers.held import GameClass
from redline.environments.workers.process import start_processes_with
from redline.environments.workers.processes import ProcessWorkers, Scale
from redline.launch.workers.ray_workers import RayWorker
from redline.types import Task

address, num_games = sys.argv[1], int(sys.argv[2])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
start_processes_with(RayWorker)
workers = ProcessWorkers(4, 20.0, Scale(least=1, idle_s=2.0))
game = GameClass("letters:TwoWords", {"seed": 0}, ".")
task = Task("t", [{"role": "user", "content": "a word"}])
seen = []

async def play():
    games = await asyncio.gather(*(workers.make(game) for _ in range(num_games)))
    for held in games:
        assert await held.call("reset", task) == "a word"
    seen.append(workers.num_running)
    for held in games:
        held.drop()
    return len({held.process.node for held in games})

nodes = asyncio.run(play())
until = time.monotonic() + 30
while workers.num_running > 1 and time.monotonic() < until:
    time.sleep(0.1)
seen.append(workers.num_running)
asyncio.run(play())
workers.close()
print(json.dumps({"running": seen, "nodes": nodes}))
"""


def run_scaled(folder: Path, address: str, num_games: int) -> dict[str, object]:
    """What a program saw that played so many games at once, let go of them, and played them again."""
    letters(folder)
    done = subprocess.run(
        [sys.executable, "-c", SCALES, address, str(num_games)], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_actors_follow_the_number_of_games_up_and_down_and_are_spread_over_the_nodes(tmp_path: Path) -> None:
    with cluster(2, 2) as (address, _):
        assert run_scaled(tmp_path / "run", address, 6) == {"running": [4, 1, 4], "nodes": 2}


def test_where_the_cluster_has_room_for_fewer_the_games_share_those(tmp_path: Path) -> None:
    with cluster(2) as (address, _):
        began = time.monotonic()
        assert run_scaled(tmp_path / "run", address, 6) == {"running": [2, 1, 2], "nodes": 1}
        assert time.monotonic() - began < 120
