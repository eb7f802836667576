"""Spans of Ray actors, where Ray is installed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from redline.telemetry import Recorder, recording, span
from redline.telemetry.processes import (
    SPANS_VARIABLE,
    expecting_processes,
    keep_offset,
    measure_offset,
    read_processes,
    recording_process,
)

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

NAP_S = 0.05


class Rewards:
    """Records for as long as it lives."""

    def __init__(self) -> None:
        self._at_end = ExitStack()
        self._at_end.enter_context(recording_process("rewards"))

    def score(self, version: int) -> int:
        with span("reward.score", version=version):
            time.sleep(NAP_S)
        return os.getpid()

    def clock_ns(self) -> int:
        return time.perf_counter_ns()

    def close(self) -> None:
        self._at_end.close()


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_actors_have_lanes_of_their_own_on_the_clock_of_the_run(tmp_path: Path) -> None:
    with recording(Recorder()) as recorder, expecting_processes(tmp_path / "spans"):
        environment = {"env_vars": {SPANS_VARIABLE: os.environ[SPANS_VARIABLE]}}
        actors = [ray.remote(Rewards).options(runtime_env=environment).remote() for _ in range(2)]
        for number, actor in enumerate(actors):
            with span("wait.for_rewards", version=number):
                pid = ray.get(actor.score.remote(number))
            offset = measure_offset(lambda actor=actor: ray.get(actor.clock_ns.remote()))  # type: ignore[misc]
            keep_offset(tmp_path / "spans" / f"rewards-{pid}.jsonl", offset)
        ray.get([actor.close.remote() for actor in actors])
        waits = {mine.args["version"]: mine for mine in recorder.drain() if mine.name == "wait.for_rewards"}
    processes = read_processes(tmp_path / "spans")
    assert len({process.os_pid for process in processes}) == 2
    assert os.getpid() not in {process.os_pid for process in processes}
    for process in processes:
        assert process.ledger is not None
        [score] = [found for found in process.spans if found.name == "reward.score"]
        assert score.end_ns - score.start_ns >= NAP_S * 1e9
        wait, slack = waits[score.args["version"]], process.clock.uncertainty_ns
        assert process.clock.how == "shortest of several round trips"
        assert wait.start_ns - slack <= score.start_ns
        assert score.end_ns <= wait.end_ns + slack
