"""`ray job submit` as docs/ray.md has it: a job of a cluster that runs already, from a folder that travels with it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.ports import free_port
from support.processes import REDLINE, succeed, write_letters
from support.ray_runs import Trained, quiet_ray, trained  # noqa: F401  the fixture is for every test here

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RAY = Path(sys.executable).with_name("ray")
STEPS = 6


def letters(folder: Path) -> Path:
    folder.mkdir()
    return write_letters(folder, run={"steps": STEPS, "checkpoint_every": 2})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    succeed("train", letters(folder), cwd=folder)
    return trained(folder)


@contextmanager
def head(folder: Path) -> Iterator[str]:
    """A cluster of one node that was started by `ray start --head`. Gives the address of its dashboard."""
    ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", *(f"--{name}={port}" for name, port in ports.items())]
    with (folder / "ray.txt").open("wb") as said:
        cluster = subprocess.Popen(command, stdout=said, stderr=said, cwd=folder)
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        until = time.monotonic() + 120
        while not _answers(f"{address}/api/version"):
            assert cluster.poll() is None, (folder / "ray.txt").read_text()
            assert time.monotonic() < until, (folder / "ray.txt").read_text()
            time.sleep(0.2)
        yield address
    finally:
        cluster.terminate()
        cluster.wait(60)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def submit(address: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_a_job_takes_the_steps_of_one_process_and_its_log_is_that_of_rank_0(tmp_path: Path, alone: Trained) -> None:
    sent, there = tmp_path / "sent", tmp_path / "there"
    letters(sent)
    there.mkdir()
    train = (REDLINE, "train", "letters.yaml", "placement.cluster=ray", f"run.folder={there / 'runs'}")
    with head(tmp_path) as address:
        done = submit(address, *train, "rollouts.reward_run_in=processes", cwd=sent)
        assert done.returncode == 0, done.stdout + done.stderr
        refused = submit(address, *train, "placement.engines=64", "run.steps=0", cwd=sent)
    assert trained(there) == alone
    assert not (sent / "runs").exists(), "the job had a copy of the folder"
    assert f"step {STEPS}" in done.stdout + done.stderr or f"{STEPS}/{STEPS}" in done.stdout + done.stderr
    assert refused.returncode != 0
    assert "run.steps" in refused.stdout + refused.stderr, "why it was refused is in the job's log"
