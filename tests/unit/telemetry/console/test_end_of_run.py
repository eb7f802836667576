"""The last screen of a run."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from redline.telemetry import Ledger
from redline.telemetry.console.end_of_run import EndOfRun, end_of_run
from redline.telemetry.console.progress import SampleAnswer
from redline.telemetry.ledger import LaneLedger
from redline.telemetry.summary.held_out import Evaluation, HeldOut
from redline.telemetry.summary.targets import Verdict

ROWS = {f"engine.part{index:02d}": (60 - index) * 1_000_000_000 for index in range(60)}
LEDGER = Ledger({"main": LaneLedger(sum(ROWS.values()) + 500_000_000, ROWS, 500_000_000)})
BEFORE = Evaluation(0, 0.1, 0.1, 100, 100, (0.1, 0.0, 0.2, 0.1, 0.1))
AFTER = Evaluation(15, 0.93, 0.93, 100, 100, (0.9, 1.0, 0.9, 0.9, 0.95))
MISSED = Verdict("MFU", 12.3, "%", "≥ 30", False, "")
ENDED = EndOfRun(
    run="runs/demo-001",
    steps=15,
    finished=True,
    held_out=HeldOut(BEFORE, AFTER),
    samples=None,
    remarks=(),
    model="runs/demo-001/model",
    targets=[MISSED, Verdict("steps", 4.0, "steps/h", "≥ 1", True, "")],
    ledger=LEDGER,
)


def printed(width: int = 80, **changes: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in end_of_run(replace(ENDED, **changes)):
        console.print(part, soft_wrap=isinstance(part, Text))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_held_out_comes_first_then_the_model_then_a_short_ledger_then_targets() -> None:
    lines = printed()
    assert lines[0] == "held-out, before   accuracy 10.0%  100 answers"
    assert lines[1].startswith("held-out, step 15  accuracy 93.0%  100 answers  +83.0 points (95% interval +")
    assert lines[2] == "trained model: runs/demo-001/model"
    assert lines[3] == "serve it with: redline serve runs/demo-001"
    assert lines[5].split() == ["where", "the", "time", "went", "seconds", "share"]
    assert lines[-1] == "targets: 1 met, 1 missed (MFU 12.3%, not ≥ 30), 0 not measured"
    assert len(lines) <= 18


def test_the_change_is_that_of_the_two_numbers_above_it_and_tasks_left_out_are_counted() -> None:
    before = Evaluation(0, 1.0, None, 7, 7, (None, 1.0, 1.0, 1.0, 1.0, 1.0, None))
    after = Evaluation(2, 0.7, None, 7, 7, (0.0, 0.9, 0.9, 0.8, 0.9, 0.9, 0.5))
    lines = printed(held_out=HeldOut(before, after))
    assert lines[0] == "held-out, before   reward 1.000  7 answers"
    assert lines[1].startswith("held-out, step 2   reward 0.880  7 answers  -0.120 (95% interval -0.1")
    assert lines[2] == "2 of 7 tasks left out, not scored in both"


def test_the_ledger_has_its_largest_rows_and_sums_to_its_total() -> None:
    lines = [line.split() for line in printed() if line.endswith("%")]
    assert [line[0] for line in lines[:2]] == ["engine.part00", "engine.part01"]
    assert lines[-3][:2] == ["54", "others"]
    assert lines[-1] == ["total", "1,830.5", "100.0%"]
    assert sum(float(line[-2].replace(",", "")) for line in lines[:-1]) == pytest.approx(1830.5, abs=0.3)
    assert sum(float(line[-1].strip("%")) for line in lines[:-1]) == pytest.approx(100)


def test_a_run_that_was_stopped_says_how_to_go_on_and_has_no_model() -> None:
    lines = printed(finished=False, model=None)
    assert "stopped after step 15; continue with: redline train runs/demo-001 --resume" in lines
    assert not any("serve it" in line or "trained model" in line for line in lines)


def test_a_run_that_learned_nothing_says_why_and_calls_no_model_trained() -> None:
    lines = printed(model=None, remarks=["nothing was learned: every attempt failed"])
    assert "nothing was learned: every attempt failed" in lines
    assert not any("trained model" in line for line in lines)


def test_answers_before_and_after_stand_above_the_figures() -> None:
    answers = [SampleAnswer("1 + 1?", "[bold]3", 0.0)], [SampleAnswer("1 + 1?", "2", 1.0)]
    lines = printed(samples=answers)
    assert lines.index("held-out, before   accuracy 10.0%  100 answers") > next(
        i for i, line in enumerate(lines) if "1 + 1?" in line
    )
    assert any("[bold]3" in line for line in lines)


@pytest.mark.parametrize("held_out", [None, HeldOut(AFTER, AFTER)])
def test_no_change_is_claimed_where_there_is_none_to_tell(held_out: HeldOut | None) -> None:
    assert not any("points" in line for line in printed(held_out=held_out))


def test_no_number_is_cut_off_in_a_narrow_terminal() -> None:
    answers = [SampleAnswer("1 + 1?", "12345678901234567890" * 3, 0.0)], [SampleAnswer("1 + 1?", "2", 1.0)]
    text = "\n".join(printed(width=40, samples=answers))
    assert "…" not in text
    assert "1,830.5" in text
    assert "".join(re.findall(r"\d{5,}", text)) == "12345678901234567890" * 3
