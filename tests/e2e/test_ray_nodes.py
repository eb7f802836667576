"""Runs over several nodes of a Ray cluster, all on this machine: what is placed where, and the loss of a node."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.processes import only_run, rows, started, succeed, wait_until, write_letters
from support.ray_runs import Trained, assert_same_but_for_rounding, cluster, quiet_ray, trained  # noqa: F401  the fixture is for every test here

from redline.telemetry.machine.hosts import sampled_hosts

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

STEPS = 120
"""So many that a run is still under way when the processes of a lost node have noticed, seconds later, that it is."""
NODES = {"node-0", "node-1", "node-2", "node-3"}
HOSTED, ENGINE = "redline.launch.workers.ray_hosted", "redline.launch.workers.engine_worker"


def letters(folder: Path) -> Path:
    folder.mkdir()
    return write_letters(folder, run={"steps": STEPS, "checkpoint_every": 2}, telemetry={"sample_every_s": 0.1})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", letters(folder), cwd=folder)
    return trained(folder)


@pytest.mark.parametrize("lost", [False, True])
def test_ranks_on_two_nodes_go_on_where_one_node_is_lost_and_another_has_room(
    tmp_path: Path, alone: Trained, lost: bool
) -> None:
    folder = tmp_path / "run"
    with cluster(0, 1, 1, 1) as (address, raylets):  # the loss of the head is that of the cluster
        ray = ("placement.cluster=ray", f"placement.address={address}", "placement.trainers=2")
        with started("train", letters(folder), *ray, cwd=folder) as driver:
            own = folder / "runs" / "letters-001"
            assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
            if lost:
                busy = next(raylet for raylet in raylets[1:] if hosts(raylet, "redline"))
                busy.kill()
            assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert_same_but_for_rounding(trained(folder), alone)
    assert ("restart 1 of 3" in (folder / "stderr.txt").read_text()) == lost
    assert_sampled(folder, "rank 1")


@pytest.mark.parametrize("lost", [False, True])
def test_an_engine_on_another_node_samples_and_is_started_again_on_a_third(tmp_path: Path, alone: Trained, lost: bool) -> None:
    folder = tmp_path / "run"
    with cluster(0, 1, 1, 1) as (address, raylets):  # the loss of the head is that of the cluster
        ray = ("placement.cluster=ray", f"placement.address={address}", "placement.engines=1", "placement.transport=broadcast")
        with started("train", letters(folder), *ray, cwd=folder) as driver:
            own = folder / "runs" / "letters-001"
            assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
            there = [hosts(raylet, ENGINE) for raylet in raylets]
            assert there.count(True) == 1
            assert not hosts(raylets[there.index(True)], "--json"), "rank 0 is on another node"
            if lost:
                raylets[there.index(True)].kill()
            assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert_same_but_for_rounding(trained(folder), alone)
    assert_sampled(folder, "engine 1")


def assert_sampled(folder: Path, process: str) -> None:
    """Nodes beside rank 0's have samples, which this process took of each."""
    own = only_run(folder)
    files = sampled_hosts(own.samples_elsewhere)
    assert files
    assert set(files) <= NODES
    assert {row["process"] for path in files.values() for row in rows(path)} == {process}
    here = {row["host"] for row in rows(own.samples)}
    assert here <= NODES
    if len(here) == 1:  # else rank 0 was on two nodes, one after the other
        assert here.isdisjoint(files)


def hosts(raylet: psutil.Process, word: str) -> bool:
    """Whether a node has a process of the run with this word in its command."""
    found = False
    for process in raylet.children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            found |= HOSTED in words and word in words
    return found


def test_a_node_with_workers_of_rewards_is_lost_and_the_run_goes_on(tmp_path: Path, alone: Trained) -> None:
    folder = tmp_path / "run"
    with cluster(2, 2) as (address, raylets):
        ray = ("placement.cluster=ray", f"placement.address={address}")
        more = ("rollouts.reward_run_in=processes", "rollouts.max_reward_workers=2", "placement.max_restarts=3")
        with started("train", letters(folder), *ray, *more, cwd=folder) as driver:
            own = folder / "runs" / "letters-001"
            assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
            raylets[1].kill()
            assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert len(rows(only_run(folder).metrics)) == STEPS


def test_a_node_that_has_workers_of_rewards_alone_is_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with cluster(1, 1) as (address, _):  # rank 0 leaves no room beside it
        ray = ("placement.cluster=ray", f"placement.address={address}")
        more = ("rollouts.reward_run_in=processes", "rollouts.max_reward_workers=1", "run.steps=10")
        with started("train", letters(folder), *ray, *more, cwd=folder) as driver:
            assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert_sampled(folder, "reward process 1")
