"""Runs on a Ray cluster of this machine: the same losses as one process, and what happens when a part of it is killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import num_rows, redline, started, succeed, wait_until, write_letters
from support.ray_runs import LOCAL, TRAINED, Trained, assert_same_but_for_rounding, engines, quiet_ray, ranks, trained  # noqa: F401  the fixture is for every test here

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

STEPS = 30
"""So many that a run is still under way when something of it is killed, after step 2 or 4."""


def letters(folder: Path) -> Path:
    folder.mkdir()
    return write_letters(folder, run={"steps": STEPS, "checkpoint_every": 2})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", letters(folder), cwd=folder)
    return trained(folder)


def test_a_run_on_ray_has_the_losses_of_one_process(tmp_path: Path, alone: Trained) -> None:
    folder = tmp_path / "run"
    succeed("train", letters(folder), *LOCAL, cwd=folder)
    assert trained(folder) == alone


def test_two_ranks_on_ray_have_the_losses_of_one_process_but_for_rounding(tmp_path: Path, alone: Trained) -> None:
    folder = tmp_path / "run"
    succeed("train", letters(folder), *LOCAL, "placement.trainers=2", "trainer.sharding=full", cwd=folder)
    assert_same_but_for_rounding(trained(folder), alone)


@pytest.mark.parametrize(
    ("trainers", "victims"), [(1, ["rank 0"]), (1, ["actor 0"]), (2, ["rank 1", "actor 1"]), (2, ["rank 0", "actor 0"])]
)
def test_a_run_goes_on_after_a_kill_from_its_newest_checkpoint(
    tmp_path: Path, alone: Trained, trainers: int, victims: list[str]
) -> None:
    """Each victim is killed at a random moment of the steps after a checkpoint; nothing is trained twice."""
    folder = tmp_path / "run"
    with started("train", letters(folder), *LOCAL, f"placement.trainers={trainers}", cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        for kills, victim in enumerate(victims):
            step = f"step-{2 * kills + 2:06d}"
            assert wait_until(lambda step=step: (own / "checkpoints" / step).exists(), driver)
            time.sleep(random.random() / 2)
            what, _, index = victim.partition(" ")
            assert wait_until(lambda index=index: ranks(int(index)), driver)  # the one before may just be started again
            [rank] = ranks(int(index))
            (rank if what == "rank" else rank.parent()).kill()
        assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    if trainers == 1:
        assert_same_as_stored(trained(folder), alone)
    assert_same_but_for_rounding(trained(folder), alone)
    assert f"restart {len(victims)} of 3" in (folder / "stderr.txt").read_text()


def assert_same_as_stored(found: Trained, expected: Trained) -> None:
    """Attempts that the store kept have their rewards as float32; all else is the same to the last digit."""
    for name, *columns in zip(TRAINED, zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        assert columns[0] == (pytest.approx(columns[1], rel=1e-6) if name == "rollouts/reward_mean" else columns[1]), name


@pytest.mark.parametrize("victim", ["none", "engine", "actor"])
def test_engines_on_ray_leave_the_losses_as_they_are_also_where_one_is_killed(
    tmp_path: Path, alone: Trained, victim: str
) -> None:
    folder = tmp_path / "run"
    with started("train", letters(folder), *LOCAL, "placement.engines=2", cwd=folder) as driver:
        if victim != "none":
            own = folder / "runs" / "letters-001"
            assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
            engine = engines()[0]
            (engine if victim == "engine" else engine.parent()).kill()
        assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert_same_but_for_rounding(trained(folder), alone)  # two engines have half of the rows each
    assert "restart 1 of" not in (folder / "stderr.txt").read_text(), "the ranks were not lost"


def test_an_engine_that_two_processes_divide_has_the_losses_of_one_process_but_for_rounding(
    tmp_path: Path, alone: Trained
) -> None:
    folder = tmp_path / "run"
    succeed("train", letters(folder), *LOCAL, "placement.engines=1", "engine.tensor_parallel_size=2", "run.steps=6", cwd=folder)
    assert_same_but_for_rounding(trained(folder), alone[:6])


def test_a_run_that_is_lost_too_often_ends_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started("train", letters(folder), *LOCAL, "placement.max_restarts=0", cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
        os.kill(int((own / ".lock").read_text()), signal.SIGKILL)
        assert driver.wait(60) == 2
    said = (folder / "stderr.txt").read_text()
    assert "rank 0 on" in said
    assert "was ended by SIGKILL" in said
    assert "placement.max_restarts = 0" in said
    assert "Traceback" not in said


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started("train", letters(folder), *LOCAL, "run.steps=5000", "run.checkpoint_every=0", cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        assert wait_until(lambda: (own / "metrics.jsonl").exists() and (own / "metrics.jsonl").stat().st_size > 0, driver)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(60) == 130
    assert list((own / "checkpoints").glob("step-*"))
    assert "--resume" in (folder / "stderr.txt").read_text()


SLOW_FILES = """
import os, time
if os.environ.get("RANK") == "0" and "REDLINE_RAY_GROUP" in os.environ:
    import redline.trainer.checkpoints.folder as folder
    flush = folder._flush
    def slow_flush(path):
        if str(path).endswith("trainer.safetensors"):
            time.sleep(40)
        flush(path)
    folder._flush = slow_flush
"""


def test_a_checkpoint_at_ctrl_c_may_take_longer_than_the_end_of_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_FILES)
    monkeypatch.setenv("PYTHONPATH", f"{slow}:{os.environ['PYTHONPATH']}")
    folder = tmp_path / "run"
    more = ("run.steps=5000", "run.checkpoint_every=0", "placement.trainers=2")
    with started("train", letters(folder), *LOCAL, *more, cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        assert wait_until(lambda: num_rows(own / "metrics.jsonl") > 1, driver)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(120) == 130, (folder / "stderr.txt").read_text()
    assert list((own / "checkpoints").glob("step-*"))


DIES_EARLY = """
import os, signal
if os.environ.get("RANK") == "0" and "REDLINE_RAY_GROUP" in os.environ and not os.path.exists({mark!r}):
    open({mark!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_from_scratch_is_not_forgotten_where_the_first_start_dies_early(
    tmp_path: Path, alone: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    succeed("train", letters(folder), "run.steps=4", *LOCAL, cwd=folder)
    before, early = trained(folder), tmp_path / "early"
    early.mkdir()
    (early / "sitecustomize.py").write_text(DIES_EARLY.format(mark=str(tmp_path / "died")))
    monkeypatch.setenv("PYTHONPATH", f"{early}:{os.environ['PYTHONPATH']}")
    with started("train", "runs/letters-001", *LOCAL, "--resume", "--from-scratch", cwd=folder) as driver:
        assert driver.wait(240) == 0, (folder / "stderr.txt").read_text()
    assert "restart 1 of 3" in (folder / "stderr.txt").read_text()
    assert trained(folder) == before == alone[:4], "all steps were taken again"
    assert list((folder / "runs" / "letters-001" / "set-aside-001" / "checkpoints").iterdir())


def test_no_cluster_at_the_address_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = redline("train", letters(folder), "placement.cluster=ray", "placement.address=127.0.0.1:1", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster answers" in done.stderr
    assert "ray start --head" in done.stderr
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_a_token_of_ray_s_own_that_is_not_there_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"placement.address=127.0.0.1:{head.getsockname()[1]}"
        done = redline("train", letters(folder), "placement.cluster=ray", address, cwd=folder, env=dict(os.environ))
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster answers" in done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_on_ray_with_a_token_of_ray_s_own_has_the_same_losses(
    tmp_path: Path, alone: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "run"
    succeed("train", letters(folder), *LOCAL, "placement.engines=1", "run.steps=4", cwd=folder)
    assert_same_but_for_rounding(trained(folder), alone[:4])


# ── engines ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ENGINE = """
import os, sys, threading, time
from redline.config import EngineRecipe
from redline.config.sections.placement import PlacementConfig
from redline.engine import EngineSession
from redline.engine.remote.client import open_engine
from redline.errors import EngineLostError
from redline.launch.workers.ray_cluster import GROUP_VARIABLE, group_name, joined, room
from redline.launch.workers.ray_engines import RayActors
from redline.launch.workers.spawn import EngineSpec
from redline.types import GenerateRequest, SamplingParams
import numpy as np

recipe = {"model": {"path": "builtin:tiny", "dtype": "float32"}}
spec = EngineSpec(EngineRecipe.model_validate(recipe).model_dump(mode="json"), name="engine 0")
request = GenerateRequest(np.arange(3, 9, dtype=np.int32), SamplingParams(max_tokens=8, seed=3))

def sampled(worker):
    engine = open_engine(worker.address, worker.token, "engine 0", why_ended=worker.why_ended)
    try:
        return EngineSession(engine).generate([request])[0][0].token_ids.tolist()
    finally:
        engine.close()

def ended(worker):
    began = time.monotonic()
    while worker.is_alive():
        assert time.monotonic() < began + 30
        time.sleep(0.05)
    return worker.why_ended()

with joined(PlacementConfig(cluster="ray", address="local"), 1), room([{"CPU": 1}]) as bundles:
    os.environ[GROUP_VARIABLE] = group_name(bundles[0])
    actors = RayActors(0)
    first = actors.spawn(spec)
    assert first.address.startswith("127.0.0.1:") and first.is_alive() and first.why_ended() == "", first.why_ended()
    tokens = sampled(first)
    assert "exit code 0" in ended(first), first.why_ended()  # its parent's connection has ended
    first.kill()
    second = actors.spawn(spec)
    os.kill(second.pid, 9)
    assert "engine 0 on" in ended(second) and "SIGKILL" in second.why_ended(), second.why_ended()
    second.kill()
    third = actors.spawn(spec)
    os.kill(int(open(f"/proc/{third.pid}/stat").read().rpartition(")")[2].split()[1]), 9)  # its actor
    assert "lost its actor" in ended(third), third.why_ended()
    fourth = actors.spawn(spec)
    assert sampled(fourth) == tokens
    fourth.kill()
    broken = EngineSpec({**spec.recipe, "model": {"path": "/nothing"}}, name="engine 0")
    try:
        actors.spawn(broken)
    except EngineLostError as error:
        assert "engine 0 did not start" in error.message and "/nothing" in error.message, error.message
        print("all is well")
"""


def test_an_engine_in_an_actor_samples_and_every_end_of_it_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.endswith("all is well\n"), done.stderr
