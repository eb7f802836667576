"""The public surface end to end: train, read back, go on, in one process, beside what the verbs say of the same run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.processes import rows, succeed

import redline
from redline.runs.reader import RunReader
from redline.telemetry import process_start_ns

SMOKE = ROOT / "recipes" / "smoke.yaml"
SMALL = {"run.num_threads": 1, "rollouts.groups_per_step": 2, "rollouts.group_size": 4, "rollouts.evaluation.num_tasks": 4}
LITTLE_NS = 0.4e9
"""More than a collection of all that a process of many tests holds; it takes a part of a run as short as these."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> redline.Run:
    folder = tmp_path_factory.mktemp("python")
    return redline.train(SMOKE, {**SMALL, "run.steps": 2, "run.folder": folder / "runs"})


def test_a_run_is_trained_and_read_back(trained: redline.Run) -> None:
    run = redline.Run.open(trained.path)
    assert str(run.status) == "finished: all 2 steps are done"
    assert run.config["run"]["steps"] == 2
    assert run.model is not None
    assert run.metrics()["step"].to_pylist() == [1, 2]
    assert run.metrics().to_pylist() == rows(run.folder.metrics)
    assert run.evaluations()["step"].to_pylist() == [0, 2]
    assert run.evaluations().column_names == list(rows(run.folder.evaluations)[0])


def test_the_ledger_begins_with_the_call_and_not_with_the_process(trained: redline.Run) -> None:
    assert trained.ledger is not None
    own = trained.ledger.lanes["main"]
    assert own.unaccounted_ns < max(0.3 * own.wall_ns, LITTLE_NS)
    since_process_start_ns = time.perf_counter_ns() - process_start_ns()
    assert own.wall_ns < since_process_start_ns


def test_trajectories_are_what_redline_show_prints(trained: redline.Run) -> None:
    table = trained.trajectories()
    assert set(table["step"].to_pylist()) == {1, 2}
    for step in (1, 2):
        shown = json.loads(succeed("show", trained.path, "--step", str(step), "--json", cwd=trained.path))
        attempts = [(group, attempt) for group in shown["groups"] for attempt in group["attempts"]]
        ours = trained.trajectories(step=step).to_pylist()
        assert len(ours) == 8
        for row, (group, attempt) in zip(ours, attempts, strict=True):
            assert (row["step"], row["group"], row["state"]) == (group["step"], group["index"], group["state"])
            for key in ("attempt", "task_id", "reward", "text", "token_ids", "logprobs", "finish_reason", "failure"):
                assert row[key] == attempt[key]


def test_what_the_report_says_is_what_the_run_says(trained: redline.Run) -> None:
    head = RunReader(trained.path).document()["head"]
    status = trained.status
    assert (head["status"], head["why"], head["steps_done"]) == (status.state, status.why, trained.steps)
    assert [verdict["value"] for verdict in head["targets"]] == [verdict.value for verdict in trained.targets()]
    assert head["left_out"] == trained.left_out() == []


def test_the_engine_answers_with_the_model_that_was_trained(trained: redline.Run) -> None:
    assert trained.model is not None
    said = []
    for path in (trained.path, trained.model):
        with redline.Engine.load(path, device="cpu") as engine:
            said.append([reply.tokens for reply in engine.generate(["one", "two"], max_tokens=8)])
    assert said[0] == said[1]


def test_ctrl_c_writes_a_checkpoint_before_it_raises_and_the_run_goes_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while not any(tmp_path.glob("runs/*/metrics.jsonl")) or not any(map(rows, tmp_path.glob("runs/*/metrics.jsonl"))):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        redline.train(SMOKE, {**SMALL, "run.steps": 5000, "run.folder": tmp_path / "runs"})
    assert signal.getsignal(signal.SIGINT) is before
    run = redline.Run.open(tmp_path / "runs" / "smoke-001")
    assert run.status.state == "stopped"
    steps = run.steps
    assert run.model is None
    assert redline.train(run.path, {"run.steps": steps + 1}, resume=True).status.state == "finished"
    assert run.model is not None
    copy = Path(shutil.copytree(run.path, tmp_path / "copy", copy_function=shutil.copyfile))
    os.utime(copy / "model", (1, 1))
    assert redline.Run.open(copy).model == copy / "model"
    assert run.metrics()["step"].to_pylist() == list(range(1, steps + 2))


def test_a_caller_who_turned_gradients_off_trains_the_same_and_finds_them_off(tmp_path: Path) -> None:
    learning = {**SMALL, "run.steps": 2, "trainer.entropy_coef": 0.1}  # a gradient even where rewards are all the same
    with_gradients = redline.train(SMOKE, {**learning, "run.folder": tmp_path / "on"})
    with torch.no_grad():
        without = redline.train(SMOKE, {**learning, "run.folder": tmp_path / "off"})
        assert not torch.is_grad_enabled()
    assert max(without.metrics()["trainer/grad_norm"].to_pylist()) > 0
    for name in ("trainer/loss", "trainer/grad_norm", "rollouts/reward_mean"):
        assert without.metrics()[name].to_pylist() == with_gradients.metrics()[name].to_pylist()


def test_in_the_event_loop_of_a_notebook_the_ledger_adds_up_all_the_same(tmp_path: Path) -> None:
    async def cell() -> tuple[redline.Run, asyncio.AbstractEventLoop]:
        run = redline.train(SMOKE, {**SMALL, "run.steps": 1, "run.folder": tmp_path / "runs"})
        return run, asyncio.get_running_loop()

    run, loop = asyncio.run(cell())
    assert loop is not None
    assert run.ledger is not None
    assert "main/task" not in run.ledger.lanes
    own = run.ledger.lanes["main"]
    assert own.unaccounted_ns < max(0.3 * own.wall_ns, LITTLE_NS)
