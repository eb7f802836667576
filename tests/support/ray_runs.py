"""Runs on Ray clusters of this machine, and the processes of which they consist."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.processes import only_run, rows

LOCAL = ("placement.cluster=ray", "placement.address=local")
WORKER = "ray::WorkerActor"
"""What Ray calls the process of a worker of environments or rewards."""


@pytest.fixture(autouse=True)
def quiet_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No token in the home folder, no statistics, and no process of Ray left behind."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    mark = uuid.uuid4().hex
    monkeypatch.setenv("REDLINE_TEST", mark)
    yield
    deadline = time.monotonic() + 30
    while (left := [" ".join(process.cmdline()) for process in own_processes()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


def own_processes() -> list[psutil.Process]:
    """Processes that the running test started, of Ray or by its actors: they inherit what marks the test."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("REDLINE_TEST") == os.environ["REDLINE_TEST"]:
                found.append(process)
    return found


def own(is_it: Callable[[list[str], dict[str, str]], bool]) -> list[psutil.Process]:
    """The test's processes whose words and environment are these."""
    found = []
    for process in own_processes():
        with suppress(psutil.Error):
            if is_it(process.cmdline(), process.environ()):
                found.append(process)
    return found


def ranks(index: int) -> list[psutil.Process]:
    """The process of a rank, once it has begun its work."""
    return own(lambda words, env: "redline.launch.workers.ray_hosted" in words and env.get("RANK") == str(index))


def engines() -> list[psutil.Process]:
    """Processes of engines in actors."""
    wanted = {"redline.launch.workers.ray_hosted", "redline.launch.workers.engine_worker"}
    return own(lambda words, env: wanted <= set(words))


def workers() -> list[psutil.Process]:
    """Actors that hold games or score."""
    return own(lambda words, env: bool(words) and words[0].startswith(WORKER))


TRAINED = ("trainer/loss", "trainer/grad_norm", "rollouts/reward_mean", "trainer/trained_tokens")
"""What tells whether a step was the same."""
Trained = list[tuple[float, ...]]


def trained(folder: Path) -> Trained:
    """`TRAINED` of every step of the only run there, in order."""
    return [tuple(row[name] for name in TRAINED) for row in rows(only_run(folder).metrics)]


def assert_same_but_for_rounding(found: Trained, expected: Trained) -> None:
    """The losses themselves are rounding in lockstep: norms of gradients, rewards and tokens tell."""
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def ray_command(*arguments: str) -> None:
    """Run `ray` to its end, which must be a good one."""
    done = subprocess.run(
        [Path(sys.executable).with_name("ray"), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def cluster(*cpus: int) -> Iterator[tuple[str, list[psutil.Process]]]:
    """A cluster of one node with so many CPUs for each number, all on this machine and called node-0, node-1, …. Gives its
    address, and the raylet of each node: killing that is the loss of the node."""
    from ray.cluster_utils import Cluster

    called = [{"env_vars": {"REDLINE_HOST": f"node-{number}"}} for number in range(len(cpus))]
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False, **called[0]})
    try:
        nodes = [
            made.head_node,
            *(made.add_node(num_cpus=count, **name) for count, name in zip(cpus[1:], called[1:], strict=True)),
        ]
        raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes]
        yield made.address, raylets
    finally:
        made.shutdown()
