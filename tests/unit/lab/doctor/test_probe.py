"""The probe against a run that is played: its rows follow from the plan that lies in the folder, by arithmetic."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from support.run_folders import append, write_run

from redline.errors import RunFolderError
from redline.lab.doctor import probe as probe_module
from redline.lab.doctor.probe import blocks, probe
from redline.runs import Run
from redline.telemetry import RunFolder
from redline.telemetry.delays import PLAN, TOTAL, delays_path

STEP_S = 0.8
OPENS = {"engine.decode": 20, "trainer.forward": 4}
"""How often each span opens in a step."""


class PlayedRun(threading.Thread):
    """A run that takes a step as soon as somebody asks for one. Each span's delays reach the step by its slope."""

    def __init__(self, folder: RunFolder, slopes: Mapping[str, float], ends_after: int = 1000) -> None:
        super().__init__(daemon=True)
        self.folder, self.slopes, self.ends_after = folder, slopes, ends_after
        self.is_locked, self.end = threading.Event(), threading.Event()
        self.taken: dict[str, int] = {}

    def run(self) -> None:
        with self.folder.locked():
            self.is_locked.set()
            while not self.end.wait(0.002) and self.ends_after > 0:
                if (plan := self._plan()) and self.taken.setdefault(plan["id"], 0) < len(plan["steps"]):
                    self._take(plan)

    def _plan(self) -> dict | None:
        try:
            return json.loads(delays_path(self.folder).read_text())
        except (OSError, ValueError):
            return None

    def _take(self, plan: dict) -> None:
        assert plan["pid"] == os.getpid()
        delays = plan["steps"][self.taken[plan["id"]]]
        self.taken[plan["id"]] += 1
        self.ends_after -= 1
        slept = {span: OPENS.get(span, 0) * seconds for span, seconds in delays.items()}
        longer = sum(self.slopes.get(span, 0.0) * seconds for span, seconds in slept.items())
        row = {"step": 100 + sum(self.taken.values()), "run/step_s": STEP_S + longer, PLAN: plan["id"]}
        append(self.folder.metrics, [{**row, TOTAL: sum(slept.values()), **{f"delays/{s}_s": v for s, v in slept.items()}}])


@contextmanager
def played(path: Path, slopes: Mapping[str, float], ends_after: int = 1000, max_lag: int = 0) -> Iterator[Run]:
    folder = write_run(path, 20, max_lag=max_lag, closed=False)
    thread = PlayedRun(folder, slopes, ends_after)
    thread.start()
    thread.is_locked.wait()
    try:
        yield Run.open(folder.path)
    finally:
        thread.end.set()
        thread.join()


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_part_on_the_critical_path_is_told_from_one_that_is_hidden(tmp_path: Path, max_lag: int) -> None:
    with played(tmp_path / "run", {"engine.decode": 1.0, "trainer.forward": 0.0}, max_lag=max_lag) as run:
        proof = probe(run, lambda line: None)
        assert not delays_path(run.folder).exists()
    said = {each.part: (each.says, each.slope.value) for each in proof.probed}
    assert said["generation"] == ("critical", pytest.approx(1.0))
    assert said["training"] == ("hidden", pytest.approx(0.0))


def test_a_finding_is_borne_out_or_not(tmp_path: Path) -> None:
    with played(tmp_path / "run", {"engine.decode": 1.0}) as run:
        proof = probe(run, lambda line: None)
    assert all(proof.about(finding) in "\n".join(proof.lines()) for finding in proof.diagnosis.findings[:3])
    assert json.loads(json.dumps(proof.as_json()))["probe"]["parts"][0]["interval_95"] is not None


def test_a_span_that_never_opens_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(probe_module, "ALWAYS", ("generation", "environments"))
    with played(tmp_path / "run", {"engine.decode": 1.0}) as run:
        proof = probe(run, told.append)
    assert "environments" not in {each.part for each in proof.probed}
    assert any("rollouts.parse does not open" in line for line in told)


def test_a_run_that_ends_meanwhile_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with played(tmp_path / "run", {}, ends_after=5) as run:
        with pytest.raises(RunFolderError, match="ended while it was probed"):
            probe(run, lambda line: None)
        assert not delays_path(run.folder).exists()


def test_an_interrupt_leaves_no_delay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with played(tmp_path / "run", {}) as run:
        monkeypatch.setattr(probe_module, "_wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            probe(run, lambda line: None)
        assert not delays_path(run.folder).exists()


def test_a_run_that_is_over_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 20)
    with pytest.raises(RunFolderError, match="no run goes on"):
        probe(Run.open(folder.path), lambda line: None)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_as_many_steps_with_as_without_a_delay_count_and_none_that_feels_the_block_before(max_lag: int) -> None:
    pattern = blocks(max_lag)
    counted = [on for on, counts in pattern if counts]
    assert counted.count(True) == counted.count(False) >= 6
    since = 0
    for (before, _), (on, counts) in pairwise(pattern):
        since = since + 1 if on is before else 0
        assert not counts or on is before or max_lag == 0 or since > max_lag
