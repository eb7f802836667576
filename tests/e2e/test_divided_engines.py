"""Engines of a run that several processes divide (`engine.tensor_parallel_size`): the same tokens as a whole one, by every
transport, and a rank that is killed costs time alone."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from support.processes import num_rows, only_run, redline, rows, started, succeed, wait_for_run, wait_until, write_letters

from redline.telemetry import RunFolder
from redline.telemetry.ledger import Ledger

DIVIDED = ("placement.engines=1", "engine.tensor_parallel_size=2")


def write_recipe(cwd: Path, steps: int, max_lag: int = 0) -> None:
    cwd.mkdir(exist_ok=True)
    rollouts = {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 8, "evaluation": {"num_tasks": 4}}
    write_letters(cwd, run={"steps": steps, "device": "cpu"}, rollouts=rollouts, buffer={"max_lag": max_lag})


def trained(cwd: Path, *overrides: str, steps: int = 5, max_lag: int = 0) -> RunFolder:
    write_recipe(cwd, steps, max_lag)
    succeed("train", "letters.yaml", *overrides, cwd=cwd)
    return only_run(cwd)


def figures(folder: RunFolder, name: str) -> list[float]:
    return [row[name] for row in rows(folder.metrics)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("one"))


def assert_same_tokens(found: RunFolder, expected: RunFolder) -> None:
    assert figures(found, "rollouts/reward_mean") == figures(expected, "rollouts/reward_mean")
    assert figures(found, "trainer/loss") == pytest.approx(figures(expected, "trainer/loss"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "broadcast", "checkpoint_engine"])
def test_a_divided_engine_takes_the_steps_of_one_process_by_any_transport(
    tmp_path: Path, one_process: RunFolder, transport: str
) -> None:
    found = trained(tmp_path, *DIVIDED, f"placement.transport={transport}")
    assert_same_tokens(found, one_process)
    assert [row["evaluation/reward_mean"] for row in rows(found.evaluations)] == [
        row["evaluation/reward_mean"] for row in rows(one_process.evaluations)
    ]
    assert max(figures(found, "weight_sync/bytes_moved")) > 0
    assert {"engine-1", "engine-1-rank-1"} <= {path.name.rpartition("-")[0] for path in found.spans.iterdir()}
    lanes = Ledger.from_json(json.loads(found.ledger.read_text())).lanes
    assert {name: lane.unaccounted_fraction for name, lane in lanes.items() if lane.unaccounted_fraction > 0.02} == {}


@pytest.mark.slow
def test_beside_the_trainer_two_divided_engines_sample_within_the_lag(tmp_path: Path) -> None:
    found = trained(tmp_path, "placement.engines=2", "engine.tensor_parallel_size=2", max_lag=1)
    assert max(figures(found, "buffer/policy_lag_steps")) <= 1
    assert max(kl or 0.0 for kl in figures(found, "trainer/mismatch_kl")) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_of_which_a_rank_is_killed_is_started_again(tmp_path: Path, rank: int) -> None:
    write_recipe(tmp_path, steps=40)
    with started("train", "letters.yaml", *DIVIDED, cwd=tmp_path) as run:
        folder = wait_for_run(tmp_path, run)
        assert wait_until(lambda: num_rows(folder.metrics) >= 3, run)
        ranks = ranks_of(psutil.Process(run.pid))
        ranks[rank].kill()
        assert run.wait(300) == 0, (tmp_path / "stderr.txt").read_text()
    assert [row["step"] for row in rows(folder.metrics)] == list(range(1, 41))
    assert "engine 1 is back after" in (tmp_path / "stderr.txt").read_text()
    _, alive = psutil.wait_procs(ranks, 10)
    assert not alive, "the other rank ended with it"


@pytest.mark.slow
def test_a_run_with_a_divided_engine_goes_on_in_one_process(tmp_path: Path) -> None:
    found = trained(tmp_path, *DIVIDED, steps=2)
    succeed(
        "train", found.path, "run.steps=3", "placement.engines=0", "engine.tensor_parallel_size=1", "--resume", cwd=tmp_path
    )
    assert [row["step"] for row in rows(found.metrics)] == [1, 2, 3]


def ranks_of(run: psutil.Process) -> list[psutil.Process]:
    """The two processes of the engine that a run has started, rank 0 first."""
    found = {}
    for child in run.children(recursive=True):
        words = " ".join(child.cmdline())
        found |= {word: child for word in ("workers.engine_worker", "workers.engine_rank") if word in words}
    return [found["workers.engine_worker"], found["workers.engine_rank"]]


@pytest.mark.slow
def test_a_model_that_so_many_cannot_divide_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_recipe(tmp_path, steps=1)
    done = redline("train", "letters.yaml", "placement.engines=1", "engine.tensor_parallel_size=3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be divided among 3 ranks" in done.stderr
    assert not (tmp_path / "runs").exists()
