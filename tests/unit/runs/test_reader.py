"""What a page shows of a run, read from files that grow, are cut, thinned or torn."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from support.fakes import trajectory
from support.run_folders import append, step_row, write_run, write_trajectories

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.errors import TaskError
from redline.runs.columns import Columns
from redline.runs.listing import Runs
from redline.runs.reader import RunReader
from redline.runs.run import Run
from redline.runs.status import is_locked, status_of
from redline.runs.trajectories import Trajectories
from redline.runs.verdict import bound_of
from redline.telemetry import MetricsLog, Recorder, TraceWriter
from redline.telemetry.files.failure import recording_failure
from redline.telemetry.ledger import LaneLedger, Ledger
from redline.types import TrajectoryGroup
from redline.web.report import write_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"

# ── logs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_columns_keep_their_places_when_keys_come_and_go() -> None:
    columns = Columns("step")
    for row in (
        {"step": 1, "a": 1.23456789},
        {"step": 2, "b": True, "text": "x"},
        {"no": "step"},
        {"step": 3, "a": None, "b": 1},
    ):
        columns.add(row)
    assert columns.since(0) == {"step": [1, 2, 3], "a": [1.23457, None, None], "b": [None, 1, 1]}
    assert columns.since(1) == {"step": [2, 3], "a": None, "b": 1}
    assert columns.tail_mean("b", 2) == 1
    assert columns.tail_mean("missing", 2) is None


# ── a run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_whose_environment_brings_the_tasks_is_named_after_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 1)
    config = json.loads(folder.config.read_text())
    config["rollouts"] |= {"task": None, "environment": {"name": "calculator"}}
    folder.config.write_text(json.dumps(config))
    assert RunReader(folder.path).document()["head"]["task"] == "calculator"


def test_the_speed_and_the_time_to_go_of_a_run_are_those_of_its_recent_steps_together(tmp_path: Path) -> None:
    """Beside the trainer: steps that wait for samples and steps that find them there take turns, with evaluations."""
    folder = write_run(tmp_path / "run-001", 0, total=10)
    lane = "timeline_rollouts/generation_s"
    ended = (3.0, 100.0, 101.0, 110.0, 111.0)
    speeds = ((0.9, 1000.0), (0.9, 6000.0), (0.1, 1000.0), (0.9, 6000.0), (0.1, 1000.0))
    for step, (end, (seconds, speed)) in enumerate(zip(ended, speeds, strict=True), start=1):
        began = 1.0 if step == 1 else 90.0  # the run was resumed after its first step
        times = {"run/step_s": 1.0, "run/time_s": end, "run/began_s": began}
        append(folder.metrics, [{"step": step, **times, lane: seconds, "engine/tokens_per_s": speed}])
    reader = RunReader(folder.path)
    with folder.locked():
        head = reader.document()["head"]
    assert head["tokens_per_s"] == pytest.approx((0.9 * 1000 + 1.8 * 6000 + 0.2 * 1000) / 2.9)
    assert head["step_s"] == 1
    assert head["eta_s"] == pytest.approx(5 * 11 / 3)


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 50, total=100)
    reader = RunReader(folder.path)
    first = reader.document()
    assert first["whole"]
    assert first["steps"]["step"] == list(range(1, 51))
    assert first["head"]["steps_done"] == 50
    assert reader.document(first["cursor"]) == {"cursor": first["cursor"], "whole": False}
    append(folder.metrics, [step_row(51, 100)])
    append(folder.path / "alerts.jsonl", [{"step": 51, "kind": "reward_collapse"}])
    second = reader.document(first["cursor"])
    assert second["steps"]["step"] == [51]
    assert second["alerts"] == [{"step": 51, "kind": "reward_collapse"}]
    assert "samples" not in second
    assert "config" not in second
    assert len(json.dumps(second)) < len(json.dumps(first)) / 2


def test_a_resumed_run_is_sent_anew_to_those_who_have_what_it_forgot(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 50, total=100)
    reader = RunReader(folder.path)
    cursor = reader.document()["cursor"]
    folder.metrics.write_text("".join(json.dumps(step_row(step, 100)) + "\n" for step in range(1, 31)))
    again = reader.document(cursor)
    assert again["whole"]
    assert again["steps"]["step"] == list(range(1, 31))
    assert again["samples"]["time"]
    assert again["head"]["steps_done"] == 30


def test_a_resumed_run_is_explained_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 50, total=100)
    reader = RunReader(folder.path, lambda run: {"steps": run.steps})
    assert reader.document()["head"]["doctor"] == {"steps": 50}
    folder.metrics.write_text("".join(json.dumps(step_row(step, 100)) + "\n" for step in range(1, 31)))
    assert reader.document()["head"]["doctor"] == {"steps": 30}


@pytest.mark.parametrize("cursor", ["nonsense", "a.b.c.d.e.f", "x.-1.0.0.0.y", "x.1.0.0.0.y", "." * 5])
def test_a_cursor_that_is_none_gets_everything(tmp_path: Path, cursor: str) -> None:
    reader = RunReader(write_run(tmp_path / "run-001", 3).path)
    assert reader.document(cursor)["whole"]


def test_a_run_without_a_step_can_be_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 0, total=9, closed=False)
    document = RunReader(folder.path).document()
    assert document["head"]["verdict"]["headline"] == "No step is done yet."
    assert document["head"]["status"] == "killed"
    write_report(folder.path, tmp_path / "report.html")


def test_a_run_of_another_version_is_shown_without_targets(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3)
    folder.config.write_text('{"run": {"steps": 3, "unheard": "of"}, "model": "what"}')
    head = RunReader(folder.path).document()["head"]
    assert head["targets"] == []
    assert head["total_steps"] == 3


def test_the_status_tells_how_a_run_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    assert status_of(folder, 5, 5) == "finished"
    assert status_of(folder, 3, 5) == "stopped"
    os.utime(folder.ledger, (1, 1))  # of a process before the one that wrote the last metrics
    assert status_of(folder, 3, 5) == "killed"
    assert RunReader(folder.path).document()["head"]["ledger"] is None
    with folder.locked():
        assert status_of(folder, 3, 5) == "running"
    assert status_of(folder, 3, 5) == "killed"


def test_a_run_that_ended_because_it_reached_its_target_is_finished(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    folder.config.write_text(json.dumps({"run": {"steps": 5}, "rollouts": {"evaluation": {"stop_at": 0.9, "every": 1}}}))
    folder.evaluations.unlink(missing_ok=True)
    with MetricsLog(folder.evaluations) as log:
        log.append(0, {"evaluation/reward_mean": 0.95})
        log.append(2, {"evaluation/reward_mean": 0.8})
    assert RunReader(folder.path).summary()["status"] == "stopped"
    with MetricsLog(folder.evaluations) as log:
        log.append(3, {"evaluation/reward_mean": 0.9})
    assert RunReader(folder.path).summary()["status"] == "finished"


def test_a_log_that_cannot_be_read_takes_no_other_run_from_the_dashboard(tmp_path: Path) -> None:
    write_run(tmp_path / "run-001", 3)
    folder = write_run(tmp_path / "run-002", 3)
    folder.metrics.unlink()
    folder.metrics.mkdir()
    assert [run["steps_done"] for run in Runs([tmp_path]).changes("")["runs"]] == [3, 0]


def test_rows_with_values_of_other_kinds_take_neither_the_page_nor_another_run(tmp_path: Path) -> None:
    """Whole numbers that no float holds, and words where numbers belong: somebody wrote into the logs, or a disk did."""
    write_run(tmp_path / "run-001", 3)
    folder = write_run(tmp_path / "run-002", 3)
    append(folder.metrics, [{**step_row(4, 9), "rollouts/groups": 10**400}, {**step_row(5, 9), "run/steps": "many"}])
    append(folder.metrics, [{"step": 10**400, "run/step_s": 1.0}, {**step_row(6, 9), "run/step_s": 10**400}])
    with folder.metrics.open("a") as file:
        file.write('{"step": 1e999, "run/step_s": 1e999}\n')
    append(folder.evaluations, [{"step": 6, "evaluation/reward_mean": 10**400}])
    document = RunReader(folder.path).document()
    assert json.loads(json.dumps(document, allow_nan=False))["steps"]["step"] == [1, 2, 3, 4]
    assert document["steps"]["rollouts/groups"] == [8, 8, 8, None]
    assert [run["steps_done"] for run in Runs([tmp_path]).changes("")["runs"]] == [3, 4]


def test_a_run_that_recorded_a_failure_is_shown_as_failed_until_it_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    with pytest.raises(TaskError), folder.locked(), recording_failure(folder):
        raise TaskError("no such <task>", "look elsewhere")
    summary = RunReader(folder.path).summary()
    assert summary["status"] == "failed"
    assert summary["failure"]["line"] == "failed after step 3: no such <task>"
    assert summary["failure"]["hint"] == "look elsewhere"
    with folder.locked(), recording_failure(folder):
        assert status_of(folder, 3, 5) == "running"
    assert status_of(folder, 3, 5) == "stopped"
    assert RunReader(folder.path).summary()["failure"] is None


def test_a_row_with_texts_in_place_of_numbers_costs_its_figures_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 3, total=5)
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "run/step_s": "slow", "engine/tokens_per_s": "many", "rollouts/reward_mean": "good"}\n')
    document = RunReader(folder.path).document()
    assert document["head"]["steps_done"] == 4
    assert json.dumps(document, allow_nan=False)


def test_to_look_at_the_lock_is_not_to_take_it(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    assert not is_locked(lock)
    with lock.open("w") as file:
        assert not is_locked(lock)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_locked(lock)


def test_a_run_on_btrfs_whose_locks_are_listed_under_another_device_is_running(tmp_path: Path) -> None:
    lock, locks = tmp_path / ".lock", tmp_path / "locks"
    lock.write_text("4711")
    inode = lock.stat().st_ino
    for line, expected in (
        (f"1: FLOCK  ADVISORY  WRITE 4711 00:2f:{inode} 0 EOF", True),
        (f"1: FLOCK  ADVISORY  WRITE 4712 00:2f:{inode} 0 EOF", False),
        (f"1: FLOCK  ADVISORY  WRITE 4711 00:2f:{inode + 1} 0 EOF", False),
        (f"1: POSIX  ADVISORY  WRITE 4711 00:2f:{inode} 0 EOF", False),
    ):
        locks.write_text(line + "\n")
        assert is_locked(lock, locks) == expected, line


# ── the verdict ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ledger_of(**waits: float) -> Ledger:
    """A rollouts lane of 100 s that generates unless it waits."""
    rows = {f"wait.{name}": round(seconds * 1e9) for name, seconds in waits.items()}
    rows["engine.decode"] = 100_000_000_000 - sum(rows.values())
    return Ledger({"rollouts": LaneLedger(100_000_000_000, rows, 0)})


@pytest.mark.parametrize(
    ("phases", "ledger", "max_lag", "expected"),
    [
        ({"generation": 6.0, "training": 4.0}, None, 0, "Generation bounds this run: 60% of a step, training 40%."),
        ({"generation": 2.0, "training": 8.0}, None, 0, "Training bounds this run: 80% of a step, generation 20%."),
        ({"training": 4.0, "wait_for_rollouts": 6.0}, ledger_of(), 2, "the trainer waits for it 60% of the time"),
        ({"training": 10.0}, ledger_of(for_budget=30, for_weights=10), 2, "rollouts wait for it 40% of the time"),
        ({"training": 10.0}, ledger_of(for_budget=2), 2, "Neither side waits"),
        ({"training": 10.0}, ledger_of(for_budget=4, for_evaluation=80), 2, "rollouts wait for it 20% of the time"),
        ({"training": 8.0, "wait_for_rollouts": 2.0}, ledger_of(for_evaluation=80), 2, "the trainer waits for it 20% of the"),
        ({"training": 4.0, "wait_for_rollouts": 6.0}, None, 2, "Generation bounds this run so far"),
        ({"training": 10.0}, None, 2, "Training bounds this run so far"),
    ],
)
def test_the_verdict_says_who_waited_for_whom(
    phases: dict[str, float], ledger: Ledger | None, max_lag: int, expected: str
) -> None:
    assert expected in bound_of(phases, ledger, max_lag).headline


def test_the_verdict_mentions_whatever_else_took_long() -> None:
    details = " ".join(bound_of({"generation": 4.0, "training": 4.0, "reward": 2.0}, ledger_of(for_budget=9), 0).details)
    assert "Beside that, of a step: reward 20%." in details
    assert "Unaccounted is at most 0.0% of a lane (rollouts)." in details


# ── what was sampled ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_attempts_come_with_the_step_they_were_trained_at(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 7)
    write_trajectories(folder, ["one", EVIL], step=7)
    found = Trajectories(Run(folder)).of_step(7)
    assert [(group["step"], group["task"], len(group["attempts"])) for group in found["groups"]] == [
        (7, "one", 2),
        (7, EVIL, 2),
    ]
    said, failed = found["groups"][1]["attempts"]
    assert [(message["by"], message["text"]) for message in said["sequences"][0]["messages"]] == [("policy", EVIL)]
    assert said["roles"][0]["parts"] == {EVIL: 1.0}
    assert EVIL in failed["failure"]
    assert found["groups"][1]["prompt"] == [{"by": "prompt", "text": "what now?"}]
    assert "nothing was trained" in Trajectories(Run(folder)).of_step(3)["missing"]


def test_slow_environments_are_said_to_bound_a_run_and_not_the_engine_that_waits_for_them() -> None:
    lockstep = bound_of({"generation": 1.0, "training": 2.0, "wait_for_environments": 6.0, "environment": 1.0}, None, 0)
    assert lockstep.headline == "Environments bound this run: 70% of a step, generation 10%, training 20%."
    waits = {"engine.decode": 2 * 10**9, "wait.for_environments": 7 * 10**9, "wait.for_budget": 10**9}
    beside = Ledger({"rollouts": LaneLedger(10 * 10**9, waits, 0)})
    found = bound_of({"training": 4.0, "wait_for_rollouts": 6.0}, beside, 2)
    assert found.headline == "Environments bound this run: the engine waits for them 70% of the time."
    assert "rollouts waited 80% of theirs (for environments 70%, for budget 10%)" in found.details[0]
    slow_trainer = bound_of({"training": 10.0}, beside, 2)
    assert slow_trainer.headline.startswith("Training bounds this run")


def test_a_report_chooses_steps_from_the_first_to_the_last_and_what_failed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 7)
    write_trajectories(folder, ["one", "two", "three", "four"], step=7)
    (folder.model / "tokenizer.json").unlink()
    folder.config.write_text('{"model": {"path": "no/such-model"}}')
    chosen = Trajectories(Run(folder)).chosen()
    assert [group["task"] for group in chosen["groups"]] == ["one", "two", "three"]
    assert all(attempt["failure"] for group in chosen["failed"] for attempt in group["attempts"])
    assert len(chosen["failed"]) == 4
    assert chosen["groups"][0]["prompt"] is None


# ── long runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_a_long_log_older_rows_come_in_buckets_with_their_extremes_and_the_newest_one_by_one() -> None:
    columns, rows = Columns("step"), 5000
    for step in range(1, rows + 1):
        columns.add({"step": step, "a": 1000.0 if step == 1234 else float(step % 7), "b": 3, "c": None if step < 4000 else 0.5})
    found = columns.whole()
    assert found.thinned is not None
    size, points = found.thinned["size"], found.thinned["points"]
    assert (size, points, found.num_points) == (8, 588, 888)
    steps = found.rows["step"]
    assert len(steps) == len(found.rows["a"]) == 888
    assert steps[:3] == [8, 16, 24]
    assert steps[points - 1 :] == list(range(4700, 5001))
    bucket = next(i for i, step in enumerate(steps) if step >= 1234)
    in_bucket = [1000.0 if step == 1234 else step % 7 for step in range(steps[bucket] - 7, steps[bucket] + 1)]
    assert found.rows["a"][bucket] == pytest.approx(sum(in_bucket) / 8, rel=1e-4)
    assert found.thinned["high"]["a"][bucket] == 1000
    assert found.thinned["low"]["a"][bucket] == min(in_bucket)
    assert found.rows["a"][-300:] == [step % 7 for step in range(4701, 5001)]
    assert found.rows["b"] == 3
    assert found.rows["c"][0] is None
    assert "b" not in found.thinned["low"]
    assert found.thinned["quantiles"]["a"] == [0, 3, 6, 6, 1000]
    assert found.thinned["rows"] == rows


def test_a_page_of_a_long_run_is_small_and_what_follows_is_what_is_new(tmp_path: Path) -> None:
    sizes = {}
    for steps in (1000, 12_000):
        folder = write_run(tmp_path / f"run-{steps}", steps, total=20_000)
        reader = RunReader(folder.path)
        first = reader.document()
        sizes[steps] = len(json.dumps(first))
    assert sizes[12_000] < 2.5 * sizes[1000]
    assert first["steps_thinned"]["rows"] == 12_000
    append(folder.metrics, [step_row(12_001, 20_000)])
    second = reader.document(first["cursor"])
    assert not second["whole"]
    assert second["steps"]["step"] == [12_001]


def test_a_page_that_has_come_to_hold_too_many_points_gets_them_in_buckets(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 10, total=20_000)
    reader = RunReader(folder.path)
    document = reader.document()
    sent = []
    for begin in range(11, 8011, 500):
        append(folder.metrics, (step_row(step, 20_000) for step in range(begin, begin + 500)))
        document = reader.document(document["cursor"])
        sent.append((document["whole"], len(document["steps"]["step"])))
    assert {points for whole, points in sent if not whole} == {500}
    assert 1 <= sum(whole for whole, _ in sent) <= 4
    assert all(points < 1000 for _, points in sent)
    assert document["head"]["steps_done"] == 8010


def test_samples_that_were_thinned_are_sent_anew_and_the_steps_are_not_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 50, total=100)
    reader = RunReader(folder.path)
    cursor = reader.document()["cursor"]
    steps = reader.steps
    rows = [json.loads(line) for line in folder.samples.read_text().splitlines()][::2]
    folder.samples.write_text("".join(json.dumps(row | {"telemetry/samples_left_out": 25}) + "\n" for row in rows))
    again = reader.document(cursor)
    assert again["whole"]
    assert again["samples"]["time"] == [row["time"] for row in rows]
    assert reader.steps is steps
    assert again["head"]["left_out"] == ["samples.jsonl is thinner the older it is; 25 samples were let go."]


def test_a_page_says_what_the_files_of_the_run_no_longer_hold(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 5)
    folder.trajectories.mkdir()
    store = TrajectoryStore(folder.trajectories, max_bytes=1, segment_bytes=1)
    for number in range(3):
        store.add(TrajectoryGroup("t", [trajectory([1, 2], [3, 4], version=number)], np.zeros(1, dtype=np.float32), number))
        store.lease([number], number)
        store.trained([number], number)
    store.close()
    recorder = Recorder()
    with TraceWriter(folder.trace, 1 << 16) as trace:
        for _ in range(3000):
            with recorder.span("engine.decode"):
                pass
            trace.write(recorder.drain())
            trace.bound()
    trace_text, trajectories_text = RunReader(folder.path).document()["head"]["left_out"]
    assert re.fullmatch(
        r"trace\.json holds .*; [\d,]+ spans of the minutes \d+ to \d+ were let go \(telemetry.*\)\.", trace_text
    )
    assert "the attempts of 2 older ones were let go, as buffer.max_bytes = 8,589,934,592 asks for" in trajectories_text
    found = Trajectories(Run(folder)).of_step(1)
    assert found["groups"][0]["let_go"] == "as buffer.max_bytes = 8,589,934,592 asks for"
    assert found["groups"][0]["attempts"] == []


def test_a_report_of_many_evaluations_and_alerts_holds_some_of_them_and_says_how_many_there_were(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 5)
    append(
        folder.evaluations, ({"step": step, "evaluation/reward_mean": 0.5, "evaluation/samples": ["x"]} for step in range(3000))
    )
    append(folder.alerts, ({"step": step, "kind": "long_wait"} for step in range(3000)))
    document = RunReader(folder.path).document()
    assert len(document["evaluations"]) == 500
    assert document["evaluations"][0]["step"] == 0
    assert document["evaluations"][-1] == {"step": 2999, "evaluation/reward_mean": 0.5}
    assert len(document["alerts"]) == 500
    assert document["head"]["alerts"] == 3000


# ── other machines ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_other_machines_are_told_apart_from_rank_0s_with_what_they_did_lately(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 4)
    assert RunReader(folder.path).document()["head"]["machines"] == []
    folder.samples_elsewhere.mkdir()
    sample = {"host": "node-7", "process": "engine 2", "host/machine_cpu_percent": 40.0, "host/cores": 8}
    gpus = {"gpu/0/utilization_percent": 100.0, "gpu/1/utilization_percent": 50.0}
    append(
        folder.samples_elsewhere / "node-7-3f0c61d2.jsonl", [{"time": float(second), **sample, **gpus} for second in range(9)]
    )
    append(folder.samples_elsewhere / "node-8-3f0c61d3.jsonl", [{"time": 1.0, "host": "node-8"}])
    document = RunReader(folder.path).document()
    seven, eight = document["head"]["machines"]
    assert (seven["host"], seven["process"], seven["time"]) == ("node-7", "engine 2", 8.0)
    assert (seven["cpu_percent"], seven["cores"], seven["gpus"], seven["gpu_percent"]) == (40.0, 8.0, 2, 75.0)
    assert (eight["host"], eight["cpu_percent"], eight["gpu_percent"]) == ("node-8", None, None)
    assert len(document["samples"]["time"]) == 4, "the charts are of rank 0's"
