"""Runs on a Ray cluster of this machine: the same losses as one process, and what happens when a part of it is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import only_run, redline, rows, started, succeed, wait_until, write_letters

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RAY = ("placement.cluster=ray", "placement.address=local")
STEPS = 8


@pytest.fixture(autouse=True)
def quiet_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No token in the home folder, no statistics, and no process of Ray left behind."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    before = ray_processes()
    yield
    deadline = time.monotonic() + 30
    while (left := ray_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


def ray_processes() -> set[int]:
    """Processes of Ray, and those that its actors started."""
    found = set()
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        words = " ".join([process.info["name"] or "", *(process.info["cmdline"] or ())])
        if "raylet" in words or "gcs_server" in words or "ray::" in words or "ray_hosted" in words:
            found.add(process.info["pid"])
    return found


def letters(folder: Path) -> Path:
    folder.mkdir()
    return write_letters(folder, run={"steps": STEPS, "checkpoint_every": 2})


def losses(folder: Path) -> list[float]:
    """Of every step, in order."""
    return [row["trainer/loss"] for row in rows(only_run(folder).metrics)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", letters(folder), cwd=folder)
    return losses(folder)


def test_a_run_on_ray_has_the_losses_of_one_process(tmp_path: Path, alone: list[float]) -> None:
    folder = tmp_path / "run"
    succeed("train", letters(folder), *RAY, cwd=folder)
    assert losses(folder) == alone


@pytest.mark.parametrize("victim", ["rank", "actor"])
def test_a_killed_rank_goes_on_from_its_newest_checkpoint(tmp_path: Path, alone: list[float], victim: str) -> None:
    folder = tmp_path / "run"
    with started("train", letters(folder), *RAY, cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        assert wait_until(lambda: (own / "checkpoints" / "step-000002").exists(), driver)
        time.sleep(random.random())
        rank = psutil.Process(int((own / ".lock").read_text()))
        (rank if victim == "rank" else rank.parent()).kill()
        assert driver.wait(120) == 0
    assert losses(folder) == alone
    assert "restart 1 of 3" in (folder / "stderr.txt").read_text()


def test_a_run_that_is_lost_too_often_ends_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started("train", letters(folder), *RAY, "placement.max_restarts=0", cwd=folder) as driver:
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
    with started("train", letters(folder), *RAY, "run.steps=5000", "run.checkpoint_every=0", cwd=folder) as driver:
        own = folder / "runs" / "letters-001"
        assert wait_until(lambda: (own / "metrics.jsonl").exists() and (own / "metrics.jsonl").stat().st_size > 0, driver)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(60) == 130
    assert list((own / "checkpoints").glob("step-*"))
    assert "--resume" in (folder / "stderr.txt").read_text()


def test_no_cluster_at_the_address_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = redline("train", letters(folder), "placement.cluster=ray", "placement.address=127.0.0.1:1", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster answers" in done.stderr
    assert "ray start --head" in done.stderr
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())
