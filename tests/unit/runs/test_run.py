"""A recorded run, as `Run.open` gives it: whole, going on, torn, killed or failed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.run_folders import append, step_row, write_run, write_trajectories

from redline.config.trained_step import record_step
from redline.errors import RunFolderError, TaskError
from redline.runs import Run
from redline.runs.tables import table_of
from redline.telemetry.files.failure import recording_failure


def test_a_run_is_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 16)
    append(folder.alerts, [{"step": 3, "kind": "stall", "seen": "nothing moves"}])
    run = Run.open(folder.path)
    assert (run.name, run.path, run.model) == ("run-001", folder.path, None)
    assert run.config["run"]["steps"] == run.steps == run.total_steps == 16
    assert run.environment["cpu"]["model"] == "a CPU"
    assert run.ledger is not None
    assert set(run.ledger.lanes) == {"main", "rollouts"}
    metrics = run.metrics()
    assert metrics["step"].to_pylist() == list(range(1, 17))
    assert metrics["rollouts/groups"].to_pylist() == [8] * 16
    assert metrics.schema.field("trainer/loss").type == pa.float64()
    assert run.evaluations()["step"].to_pylist() == list(range(0, 17, 2))
    assert run.samples().num_rows == 16
    assert run.alerts().to_pylist() == [{"step": 3, "kind": "stall", "seen": "nothing moves"}]
    assert {verdict.name: verdict.value for verdict in run.targets()}["steps"] > 0
    assert run.left_out() == []


def test_samples_of_another_machine_are_asked_for_by_its_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 16)
    run = Run.open(folder.path)
    assert run.hosts() == {}
    folder.samples_elsewhere.mkdir()
    append(folder.samples_elsewhere / "node-7-3f0c61d2.jsonl", [{"time": 1.0, "host": "node-7", "host/cpu_percent": 5.0}] * 3)
    assert run.hosts() == {"node-7": folder.samples_elsewhere / "node-7-3f0c61d2.jsonl"}
    assert run.samples("node-7")["host/cpu_percent"].to_pylist() == [5.0] * 3
    assert run.samples().num_rows == 16, "rank 0's, as ever"
    with pytest.raises(RunFolderError, match="node-8") as caught:
        run.samples("node-8")
    assert caught.value.hint == "there are node-7"


def test_every_call_sees_what_was_written_since_and_waits_for_a_torn_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=9, closed=False)
    run = Run.open(str(folder.path))
    with folder.metrics.open("a") as file:
        file.write(json.dumps(step_row(4, 9))[:40])
    assert (run.metrics().num_rows, run.steps) == (3, 3)
    folder.metrics.write_text("".join(json.dumps(step_row(step, 9)) + "\n" for step in range(1, 6)))
    assert (run.metrics().num_rows, run.steps) == (5, 5)


def test_a_file_that_is_missing_or_half_written_is_empty(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 0, total=9, closed=False)
    for path in (folder.metrics, folder.evaluations, folder.samples, folder.environment):
        path.unlink()
    folder.config.write_text('{"run": {"st')
    run = Run.open(folder.path)
    assert (run.config, run.environment, run.steps, run.ledger, run.failure) == ({}, {}, 0, None, None)
    assert [table.num_rows for table in (run.metrics(), run.evaluations(), run.samples(), run.alerts())] == [0] * 4
    assert run.targets() == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "config.json is empty"),
        ('{"run": {"st', "config.json is damaged (Unterminated string"),
        ("[]", "config.json holds no recipe"),
        ("{}", "config.json has no run.steps"),
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_run_whose_config_cannot_be_read_is_not_called_finished(tmp_path: Path, text: str, why: str, closed: bool) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5, closed=closed)
    folder.config.write_text(text)
    status = Run.open(folder.path).status
    assert status.state == "unreadable"
    assert status.why.startswith(why)
    assert status.why.endswith("put a copy of it back; step 3 is done")
    with folder.locked():
        assert str(Run.open(folder.path).status) == "running: step 3 is done"


def test_the_model_of_an_earlier_end_is_not_that_of_a_run_that_has_gone_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    folder.model.mkdir()
    record_step(folder.model, 2)
    run = Run.open(folder.path)
    assert run.model == folder.model
    (folder.checkpoints / "step-000002").mkdir(parents=True)
    assert run.model == folder.model
    (folder.checkpoints / "step-000003").mkdir()
    os.utime(folder.model)  # newer than the checkpoint, as in a copy
    assert run.model is None


@pytest.mark.parametrize(("done", "state"), [(5, "finished"), (3, "stopped")])
def test_the_status_says_how_a_run_ended_and_how_to_go_on(tmp_path: Path, done: int, state: str) -> None:
    folder = write_run(tmp_path / "run-001", done, total=5)
    run = Run.open(folder.path)
    assert run.status.state == state
    assert ("all 5 steps are done" if state == "finished" else f"redline train {folder.path} --resume") in run.status.why
    with folder.locked():
        assert str(run.status) == f"running: step {done} of 5 is done"
    os.utime(folder.ledger, (1, 1))  # of a process before the one that wrote the last metrics
    assert run.status.state == "killed"
    assert f"after step {done} of 5" in run.status.why


def test_a_run_that_reached_its_target_says_that_this_ended_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    folder.config.write_text(json.dumps({"run": {"steps": 5}, "rollouts": {"evaluation": {"stop_at": 0.01}}}))
    status = Run.open(folder.path).status
    assert (status.state, status.why) == (
        "finished",
        "an evaluation reached rollouts.evaluation.stop_at after step 3 of 5",
    )


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    with pytest.raises(TaskError), folder.locked(), recording_failure(folder):
        raise TaskError("no such task", "look elsewhere")
    run = Run.open(folder.path)
    assert str(run.status) == "failed: failed after step 3: no such task"
    assert run.failure is not None
    assert run.failure.hint == "look elsewhere"


def test_trajectories_are_a_table_of_attempts_with_the_step_that_trained_on_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 7)
    write_trajectories(folder, ["one", "two"], step=7)
    table = Run.open(folder.path).trajectories()
    assert table["step"].to_pylist() == [7] * 4
    assert table["state"].to_pylist() == ["trained"] * 4
    assert table["group"].to_pylist() == [0, 0, 1, 1]
    assert table["text"].to_pylist() == ["one", "no", "two", "no"]
    assert table["token_ids"].to_pylist()[0] == [1, 2, 3, 4]
    assert table["reward_parts"].to_pylist()[0] == [{"name": "one", "value": 1.0}]
    assert table["failure"].to_pylist()[:2] == [None, "reward: one"]
    assert Run.open(folder.path).trajectories(step=7) == table
    with pytest.raises(RunFolderError, match="nothing was trained at step 6"):
        Run.open(folder.path).trajectories(step=6)


def test_a_run_without_trajectories_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 1)
    folder.trajectories.mkdir()
    with pytest.raises(RunFolderError) as caught:
        Run.open(folder.path).trajectories()
    assert "max_bytes" in caught.value.hint


def test_a_run_whose_trajectories_were_not_copied_has_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 1)
    assert not folder.trajectories.exists()
    for step in (None, 1):
        with pytest.raises(RunFolderError, match="no trajectories to show"):
            Run.open(folder.path).trajectories(step)


def test_what_is_no_run_folder_is_refused_with_the_place_to_look(tmp_path: Path) -> None:
    folder, other = write_run(tmp_path / "demo-001", 1), write_run(tmp_path / "sums-001", 1)
    os.utime(other.config, (0, 0))
    recipe = tmp_path / "demo.yaml"
    recipe.write_text("model: {}")
    hints = {
        recipe: "give the folder that the run left",
        folder.config: f"give its folder: {folder.path}",
        tmp_path: f"the newest run there is {folder.path}",
        tmp_path / "sum-001": f"did you mean {other.path}?",
        tmp_path / "demo-002": f"the newest run there is {folder.path}",
    }
    for path, hint in hints.items():
        with pytest.raises(RunFolderError) as caught:
            Run.open(path)
        assert caught.value.hint == hint


def test_values_of_one_key_that_have_no_common_type_become_numbers_or_text() -> None:
    rows = [{"a": 1, "b": True}, {"a": 2.5, "c": [1]}, {"b": 3, "c": "x"}, {"a": 2**70}]
    table = table_of(rows)
    assert table["a"].to_pylist() == [1.0, 2.5, None, 2.0**70]
    assert table["b"].to_pylist() == [1.0, None, 3.0, None]
    assert table["c"].to_pylist() == [None, "[1]", '"x"', None]
    assert table_of([]).num_rows == 0


def test_what_is_no_path_and_what_is_no_step_are_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="None is no run folder") as caught:
        Run.open(None)  # type: ignore[arg-type]
    assert "such as runs/demo-001" in caught.value.hint
    folder = write_run(tmp_path / "run-001", 3)
    write_trajectories(folder, ["one"], step=1)
    run = Run.open(folder.path)
    for step in ("1", 1.5):
        with pytest.raises(RunFolderError, match=f"{step!r} is no step") as caught:
            run.trajectories(step)  # type: ignore[arg-type]
        assert "a whole number, from 1" in caught.value.hint
    assert run.trajectories(np.int64(1)) == run.trajectories(1)
