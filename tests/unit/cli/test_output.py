"""What verbs print: results on stdout, whole at every width."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from support.run_folders import append, write_run
from support.stored_groups import numbered
from typer.testing import CliRunner

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.cli import app
from redline.errors import RunFolderError
from redline.lab.bench.every import AllDocument, CaseRun
from redline.lab.bench.table import render as render_bench
from redline.lab.gate import perf
from redline.lab.gate.baseline import Check, Figure
from redline.runs.run import Run
from redline.telemetry import Ledger
from redline.telemetry.ledger import LaneLedger

NUMBERS = r"\d[\d.,]*\d|\d"
WIDTHS = pytest.mark.parametrize("columns", [80, 60, 40])


def printed(found: RenderableType, columns: int) -> str:
    console = Console(file=io.StringIO(), width=columns)
    console.print(found)
    return console.file.getvalue()  # type: ignore[attr-defined]


def is_whole(narrow: str, wide: str, columns: int) -> bool:
    assert max(map(len, narrow.splitlines())) <= columns
    assert "…" not in narrow
    return set(re.findall(NUMBERS, wide)) <= set(re.findall(NUMBERS, narrow))


def all_document() -> AllDocument:
    peer = {"name": "transformers", "value": 4321.0, "ratio": 3.21, "interval_95": [3.05, 3.44], "pairs": 12, "p_value": 0.001}
    result: dict[str, Any] = {
        "name": "throughput with the longest name",
        "value": 1_234_567.0,
        "unit": "tok/s",
        "interval_95": [1.11, 1.29],
        "parts": {"prefill": 123_456.0, "decode": 234_567.0},
        "peer_parts": {"decode": 345_678.0},
        "beside": "vllm was not installed",
        "bound": {"value": 7_654_321.0, "why": "weights are read"},
        "fraction_of_bound": 0.1613,
        "peer": peer,
    }
    document = {"identity": {"device": "cpu"}, "results": [result, result | {"name": "alone", "peer": None}]}
    return AllDocument([CaseRun("generate", 1.0, document, None), CaseRun("trainer", 1.0, document, None)])


@WIDTHS
def test_a_bench_loses_no_number(columns: int) -> None:
    wide, narrow = (printed(render_bench(all_document()), width) for width in (1000, columns))
    assert is_whole(narrow, wide, columns)
    assert "generate: throughput" in wide
    assert "trainer: alone" in wide


@WIDTHS
def test_perf_loses_no_number(columns: int) -> None:
    figures = [Figure("trainer step: operators", "operators", 123_456, [123_456])]
    figures.append(Figure("trainer step: time", "ratio", 1.234, [1.2], (1.11, 1.35)))
    before = [replace(figures[0], value=110_000), figures[1]]
    checks = [Check(figure, was, "worse", 0.0) for figure, was in zip(figures, before, strict=True)]
    outcome = perf.Outcome({}, figures, checks, None)
    wide, narrow = (printed(perf.render(outcome), width) for width in (1000, columns))
    assert is_whole(narrow, wide, columns)
    assert "+12.2%" in narrow


@WIDTHS
def test_show_loses_no_number(columns: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store = TrajectoryStore(tmp_path / "trajectories")
    store.begin([12345], 98765)
    store.add(numbered(12345, version=98765))
    store.close()
    wide, narrow = (CliRunner().invoke(app, ["show", str(tmp_path)], env={"COLUMNS": str(n)}).stdout for n in (1000, columns))
    assert "12345" in wide
    assert is_whole(narrow, wide, columns)


def test_the_ledger_of_a_resumed_run_is_said_to_be_of_its_last_process(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run-001", 0, total=5)
    for step in range(1, 6):
        append(folder.metrics, [{"step": step, "run/began_s": 10.0 if step < 4 else 20.0}])
    folder.ledger.write_text(json.dumps(Ledger({"main": LaneLedger(5, {"engine.decode": 5}, 0)}).to_json()))
    said = "ledger.json is of the last process alone, which took the steps 4 to 5;"
    assert said in CliRunner().invoke(app, ["show", str(folder.path), "--ledger"]).stderr
    assert any(said in sentence for sentence in Run.open(folder.path).left_out())
    folder.metrics.write_text(folder.metrics.read_text().replace("20.0", "10.0"))
    os.utime(folder.ledger)
    assert CliRunner().invoke(app, ["show", str(folder.path), "--ledger"]).stderr == ""
    assert Run.open(folder.path).left_out() == []


def test_show_prints_the_whole_ledger_of_a_run_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    unfinished = CliRunner().invoke(app, ["show", str(tmp_path), "--ledger"])
    assert isinstance(unfinished.exception, RunFolderError)
    assert "no ledger to show" in str(unfinished.exception)
    rows = {f"engine.part{index}": 1_000_000_000 for index in range(40)}
    ledger = Ledger({"main": LaneLedger(40_000_000_000, rows, 0), "rollouts": LaneLedger(5, {"engine.decode": 5}, 0)})
    (tmp_path / "ledger.json").write_text(json.dumps(ledger.to_json()))
    text = CliRunner().invoke(app, ["show", str(tmp_path), "--ledger"]).stdout
    assert all(f"part{index} " in text for index in range(40))
    assert "lane rollouts" in text
    assert json.loads(CliRunner().invoke(app, ["show", str(tmp_path), "--ledger", "--json"]).stdout) == ledger.to_json()
