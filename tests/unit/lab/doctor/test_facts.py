"""What the doctor reads of a run: its last process, its newest steps, and what lies between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.run_folders import append, step_row, write_run

from redline.lab.doctor import facts as facts_module
from redline.lab.doctor.facts import BETWEEN, EVALUATION, Facts
from redline.runs import Run
from redline.telemetry.delays import PLAN, TOTAL


def recorded(path: Path, rows: list[dict[str, Any]], evaluations: list[dict[str, Any]] | None = None) -> Run:
    folder = write_run(path, 1)
    for file, written in ((folder.metrics, rows), (folder.evaluations, evaluations or [])):
        file.write_text("")
        append(file, written)
    return Run.open(folder.path)


def row(step: int, time_s: float, step_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "run/step_s": step_s, "run/time_s": time_s, "timeline/training_s": step_s, **more}


def test_after_a_resume_only_steps_of_the_last_process_count(tmp_path: Path) -> None:
    old = [row(step, 10.0 * step, 9.0, **{"run/began_s": 5.0}) for step in range(1, 21)]
    new = [row(step, 1000 + step, **{"run/began_s": 990.0}) for step in range(21, 31)]
    found = Facts.of(recorded(tmp_path / "run", old + new))
    assert found.num_steps + 2 == 10
    assert found.wall_s == pytest.approx(8.0)


def test_of_a_long_run_the_newest_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "MOST_STEPS", 50)
    found = Facts.of(recorded(tmp_path / "run", [row(step, float(step)) for step in range(1, 301)]))
    assert found.column("step").tolist() == list(range(252, 301))
    assert not found.first
    assert found.ledger_steps == 300


def test_time_between_steps_counts_and_says_what_of_it_was_an_evaluation(tmp_path: Path) -> None:
    times = np.cumsum([1.0] * 5 + [1.5] + [1.0] * 5)
    rows = [row(step, float(time)) for step, time in enumerate(times, 1)]
    found = Facts.of(recorded(tmp_path / "run", rows, [{"step": 5, "evaluation/seconds": 0.4}]))
    assert found.total(BETWEEN) == pytest.approx(0.5)
    assert found.total(EVALUATION) == pytest.approx(0.4)
    assert found.wall_s == pytest.approx(found.num_steps + 0.5)


def test_a_clock_that_was_set_or_a_machine_that_slept_is_no_time_between_steps(tmp_path: Path) -> None:
    times = np.cumsum([1.1] * 6 + [86_401.0] + [1.1] * 6)
    rows = [row(step, float(time)) for step, time in enumerate(times, 1)]
    assert Facts.of(recorded(tmp_path / "jump", rows)).wall_s == pytest.approx(11 * 1.1)
    evaluated = Facts.of(recorded(tmp_path / "evaluated", rows, [{"step": 6, "evaluation/seconds": 86_400.0}]))
    assert evaluated.total(EVALUATION) == pytest.approx(86_400)
    run = recorded(tmp_path / "written", rows)
    run.folder.config.write_text(json.dumps({**run.config, "run": {"checkpoint_every": 3}}))
    assert Facts.of(Run.open(run.folder.path)).total(BETWEEN) > 86_000


def test_steps_that_were_delayed_on_purpose_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    slow = {PLAN: "x", TOTAL: 4.0, "delays/buffer.pack_s": 4.0}
    rows = [row(step, 10.0 * step, 5.0 if step > 10 else 1.0, **(slow if step > 10 else {})) for step in range(1, 16)]
    run = recorded(tmp_path / "run", rows)
    lanes = {"main": {"wall_ns": 22 * 10**9, "rows": {"buffer.pack": 22 * 10**9}, "unaccounted_ns": 0}}
    run.folder.ledger.write_text(json.dumps({"lanes": lanes}))
    found = Facts.of(run)
    assert found.num_steps == 8
    assert found.steps["run/step_s"].max() == 1.0
    assert found.spans("buffer.pack").mean() == pytest.approx((22 - 5 * 4) / 15)
    assert Facts.of(run, with_delays=True).num_steps == 13


def test_the_ledger_of_a_resumed_process_is_divided_by_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "MOST_STEPS", 50)
    old = [row(step, float(step), **{"run/began_s": 5.0}) for step in range(1, 1001)]
    new = [row(step, 5000.0 + step, **{"run/began_s": 5990.0}) for step in range(1001, 1101)]
    run = recorded(tmp_path / "run", old + new)
    lanes = {"main": {"wall_ns": 100 * 10**9, "rows": {"buffer.pack": 30 * 10**9}, "unaccounted_ns": 70 * 10**9}}
    run.folder.ledger.write_text(json.dumps({"lanes": lanes}))
    found = Facts.of(run)
    assert found.ledger_steps == 100
    assert found.spans("buffer.pack").mean() == pytest.approx(0.3)


def test_a_step_without_a_phase_spent_no_time_in_it() -> None:
    steps = {
        "run/step_s": np.ones(4),
        "timeline/evaluation_s": np.array([np.nan, 0.4, np.nan, 0.4]),
        "x": np.array([np.nan, 2.0]),
    }
    found = Facts({}, steps)
    assert found.mean("timeline/evaluation_s") == pytest.approx(0.2)
    assert found.mean("x") == 2.0


def test_steps_that_are_no_numbers_are_never_a_traceback(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 12, max_lag=0)
    append(folder.evaluations, [{"step": [1], "evaluation/seconds": 1.0}])
    append(folder.metrics, [{**step_row(13, 12), "step": {"a": 1}}, step_row(14, 12)])
    assert Facts.of(Run.open(folder.path)).num_steps == 12
