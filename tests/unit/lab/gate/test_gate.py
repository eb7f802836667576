from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from redline.errors import CompareError
from redline.lab.gate import perf as gate
from redline.lab.gate import reference
from redline.lab.gate.baseline import RATIO, Baseline, Figure, device_class
from redline.lab.gate.counts import count
from redline.lab.gate.reference import Reference
from redline.lab.gate.workloads import trainer_step

CPU = torch.device("cpu")
IDENTITY = {
    "machine": {"cpu": "x"},
    "reference": 1,
    "libraries": {"python": "3.11", "torch": "2.13.0"},
    "source": {"commit": "abc"},
}


# ── counts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_operators_bytes_and_products_are_counted_by_hand() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 5)

    def work() -> torch.Tensor:
        product = a @ b
        return product.view(10).clone()

    counts = count(work)
    assert counts.operators == 3
    assert counts.copies == 1
    assert counts.allocated_bytes == 2 * 10 * 4  # the view has none
    assert counts.flops == 2 * 2 * 3 * 5


def test_what_is_written_in_place_allocates_nothing() -> None:
    a = torch.ones(4)
    assert count(lambda: a.add_(1)).allocated_bytes == 0


def test_python_is_counted_too() -> None:
    def inner() -> None:
        pass

    def work(times: int) -> None:
        for _ in range(times):
            inner()

    assert count(lambda: work(50)).python_calls - count(lambda: work(20)).python_calls == 30


def test_a_training_step_counts_the_same_twice_and_one_more_operator_shows() -> None:
    with trainer_step("builtin:tiny", CPU) as work:
        first, again = count(work), count(work)
        assert first.flops > 0
        assert replace(first, python_calls=0) == replace(again, python_calls=0)
        assert first.python_calls == pytest.approx(again.python_calls, rel=0.01)
        extra = count(lambda: (work(), torch.zeros(1000).clone()))
    assert extra.operators == first.operators + 2
    assert extra.allocated_bytes == first.allocated_bytes + 8000


# ── the baseline ───────────────────────────────────────────────────────────────────────────────────────────────────────


def figure(value: float, kind: str = "operators", interval: tuple[float, float] | None = None, sampled: bool = False) -> Figure:
    return Figure(f"step: {kind}", kind, value, [value], interval, sampled)


def state(before: Figure, now: Figure, **identity: object) -> str:
    [check] = Baseline(IDENTITY, [before], []).check({**IDENTITY, **identity}, [now])
    return check.state


def test_one_percent_more_operators_is_worse_and_one_percent_less_is_better() -> None:
    assert state(figure(1000), figure(1000)) == "same"
    assert state(figure(1000), figure(1010)) == "worse"
    assert state(figure(1000), figure(990)) == "better"
    assert state(figure(0, "copies"), figure(1, "copies")) == "worse"


def test_counts_have_slack_where_libraries_or_samples_differ() -> None:
    other = {"python": "3.13", "torch": "2.13.0"}
    assert state(figure(1000), figure(1040), libraries=other) == "same"
    assert state(figure(1000), figure(1100), libraries=other) == "worse"
    assert state(figure(1000, sampled=True), figure(1040, sampled=True)) == "same"


def test_a_ratio_is_worse_only_beyond_its_interval_and_the_tolerance() -> None:
    before = figure(2.0, RATIO, (1.9, 2.1))
    assert state(before, figure(2.6, RATIO, (2.5, 2.7))) == "same"
    assert state(before, figure(3.0, RATIO, (2.5, 3.5))) == "same"
    assert state(before, figure(3.0, RATIO, (2.9, 3.1))) == "worse"
    assert state(before, figure(1.0, RATIO, (0.9, 1.1))) == "better"


def test_a_ratio_of_another_machine_is_not_comparable() -> None:
    before, now = figure(2.0, RATIO, (1.9, 2.1)), figure(9.0, RATIO, (8.9, 9.1))
    assert state(before, now, machine={"cpu": "y"}) == "not comparable"
    assert state(before, now, reference=2) == "not comparable"
    assert state(figure(1000), figure(1010), machine={"cpu": "y"}) == "worse"


def test_what_is_in_c_is_not_compared_with_what_is_torchs() -> None:
    """Torch counts next to nothing of it: without a compiler everything would be worse, with one nothing ever."""
    before, now = figure(1000, "flops"), figure(10, "flops")
    assert state(before, now, in_c=True) == "not comparable"
    assert state(before, now) == "better"


def test_an_update_keeps_every_reason(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    first = Baseline({}, [], []).updated(IDENTITY, [figure(1000)], "the first")
    first.updated(IDENTITY, [figure(900)], "a faster optimizer").write(path)
    read = Baseline.read(path)
    assert [(change["reason"], change["commit"]) for change in read.changes] == [
        ("the first", "abc"),
        ("a faster optimizer", "abc"),
    ]
    assert read.figures == [figure(900)]
    assert Baseline.read(tmp_path / "missing.json") is None
    path.write_text(json.dumps({"results": []}))
    with pytest.raises(CompareError, match="not a baseline"):
        Baseline.read(path)


def test_an_update_needs_a_reason() -> None:
    with pytest.raises(CompareError, match="--update changes"):
        gate.require_reason(True, " ")
    with pytest.raises(CompareError, match="--reason is for --update"):
        gate.require_reason(False, "why not")
    assert gate.require_reason(True, " faster ") == "faster"


def test_a_class_of_device_is_a_file_name() -> None:
    assert device_class("NVIDIA H200") == "nvidia-h200"
    assert device_class("cpu") == "cpu"


# ── the whole ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reference_computes_the_same_every_time() -> None:
    reference = Reference(CPU)
    assert reference.run() == reference.run()


def test_perf_without_a_baseline_sets_one_with_a_reason_and_then_finds_what_got_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = Console(quiet=True)
    monkeypatch.setattr(gate, "WORKLOADS", {"trainer step": trainer_step})
    monkeypatch.setattr(gate, "TIMED", "builtin:tiny")
    monkeypatch.setattr(gate, "ROUNDS", 6)
    monkeypatch.setattr(reference, "BLOCKS", 1)
    assert gate.perf("cpu", tmp_path, None, quiet).exit_code == 2
    assert gate.perf("cpu", tmp_path, "the first", quiet).exit_code == 0
    path = tmp_path / "cpu.json"
    document = json.loads(path.read_text())
    assert document["changes"][0]["reason"] == "the first"
    [operators] = [result for result in document["results"] if result["kind"] == "operators"]
    operators["value"] *= 0.98
    path.write_text(json.dumps(document))
    outcome = gate.perf("cpu", tmp_path, None, quiet)
    assert outcome.exit_code == 1
    assert [check.figure.kind for check in outcome.checks if check.state == "worse"] == ["operators"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="no NVIDIA device"):
        gate.perf("cuda", tmp_path, None, Console(quiet=True))


def test_a_file_is_no_folder_of_baselines(tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text("{}")
    with pytest.raises(CompareError, match="no folder"):
        gate.perf("cpu", tmp_path / "cpu.json", "a reason", Console(quiet=True))
