from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from redline.config.load import validate
from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry import RunFolder
from redline.telemetry.listeners import MAX_FAILURES, Listeners, StepListener

CONFIG = validate({"model": {"path": "builtin:tiny"}, "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}}})


class Heard:
    """Keeps what it is told, and fails where it is asked to."""

    def __init__(self, name: str = "heard", fails: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.heard: list[tuple[str, int]] = []
        self.fails = fails
        self.closed = 0

    def started(self, folder: RunFolder, config: Config) -> None: ...

    def step(self, row: Mapping[str, Any]) -> None:
        if row["step"] in self.fails:
            raise ValueError(f"no step {row['step']}")
        self.heard.append(("step", row["step"]))

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self.heard.append(("evaluation", row["step"]))

    def alert(self, row: Mapping[str, Any]) -> None:
        self.heard.append(("alert", row["step"]))

    def close(self) -> None:
        self.closed += 1


class Unstartable(Heard):
    def started(self, folder: RunFolder, config: Config) -> None:
        raise ConfigError("nobody is logged in", "log in")


class Blocked(Heard):
    def __init__(self) -> None:
        super().__init__("blocked")
        self.taken, self.go = threading.Event(), threading.Event()

    def step(self, row: Mapping[str, Any]) -> None:
        self.taken.set()
        self.go.wait()
        super().step(row)


def start(folder: Path, *listeners: StepListener, **settings: Any) -> tuple[Listeners, list[str]]:
    told: list[str] = []
    several = Listeners(listeners, tell=told.append, **settings)
    several.started(RunFolder(folder), CONFIG)
    return several, told


def test_each_listener_hears_every_row_in_order_and_is_closed(tmp_path: Path) -> None:
    first, second = Heard(), Heard()
    listeners, told = start(tmp_path, first, second)
    for step in range(3):
        listeners.step({"step": step})
    listeners.evaluation({"step": 2})
    listeners.alert({"step": 2})
    listeners.close()
    for listener in (first, second):
        assert listener.heard == [("step", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("alert", 2)]
        assert listener.closed == 1
    assert told == []
    assert not (tmp_path / "sinks.log").exists()


def test_one_that_cannot_start_says_so_at_once_and_those_before_it_are_closed(tmp_path: Path) -> None:
    first = Heard()
    with pytest.raises(ConfigError, match="nobody is logged in"):
        start(tmp_path, first, Unstartable())
    assert first.closed == 1


def test_a_failure_is_told_once_and_logged_with_its_traceback_while_the_others_go_on(tmp_path: Path) -> None:
    failing, well = Heard("failing", frozenset({1, 3})), Heard("well")
    listeners, told = start(tmp_path, failing, well)
    for step in range(5):
        listeners.step({"step": step})
    listeners.close()
    assert failing.heard == [("step", 0), ("step", 2), ("step", 4)]
    assert len(well.heard) == 5
    assert len(told) == 1
    assert "failing: step failed: ValueError: no step 1; the run goes on" in told[0]
    log = (tmp_path / "sinks.log").read_text()
    assert "no step 1" in log
    assert "no step 3" in log
    assert "Traceback" in log


def test_one_that_keeps_failing_is_switched_off_and_closed(tmp_path: Path) -> None:
    failing = Heard("failing", frozenset(range(1, 100)))
    listeners, told = start(tmp_path, failing)
    for step in range(100):
        listeners.step({"step": step})
    listeners.close()
    assert (tmp_path / "sinks.log").read_text().count("step failed") == MAX_FAILURES
    assert f"switched off after {MAX_FAILURES} failures in a row" in told[-1]
    assert failing.closed == 1


def test_a_slow_one_holds_up_nobody_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    slow, quick = Blocked(), Heard("quick")
    listeners, told = start(tmp_path, slow, quick, max_queued=2)
    listeners.step({"step": 0})
    slow.taken.wait()
    for step in range(1, 6):
        listeners.step({"step": step})
    slow.go.set()
    listeners.close()
    assert slow.heard == [("step", 0), ("step", 1), ("step", 2)]
    assert any("blocked: behind by 2 rows" in line for line in told)
    assert "blocked: 3 rows were dropped; the run folder has them" in told


def test_the_end_of_a_run_does_not_wait_for_one_that_hangs(tmp_path: Path) -> None:
    hanging = Blocked()
    listeners, told = start(tmp_path, hanging, close_s=0.05)
    listeners.step({"step": 0})
    hanging.taken.wait()
    listeners.step({"step": 1})
    listeners.close()
    hanging.go.set()
    assert any("blocked: not finished after 0.05 s" in line for line in told)


def test_an_alert_that_the_last_row_raises_reaches_those_added_after_its_finder(tmp_path: Path) -> None:
    class Finder(Heard):
        def step(self, row: Mapping[str, Any]) -> None:
            listeners.alert({"step": row["step"], "kind": "nan"})

    last = Heard()
    listeners = Listeners()
    listeners.add(Finder())
    listeners.add(last)
    listeners.started(RunFolder(tmp_path), CONFIG)
    listeners.step({"step": 7})
    listeners.close()
    assert ("alert", 7) in last.heard


def test_a_full_disk_under_the_log_stops_nobody(tmp_path: Path) -> None:
    failing = Heard("failing", frozenset({0}))
    (tmp_path / "sinks.log").mkdir()  # cannot be appended to
    listeners, told = start(tmp_path, failing)
    listeners.step({"step": 0})
    listeners.step({"step": 1})
    listeners.close()
    assert failing.heard == [("step", 1)]
    assert "failing: step failed" in told[0]


def test_a_sink_that_fails_now_and_then_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.telemetry.listeners.MAX_LOG_BYTES", 3000)
    listeners, _ = start(tmp_path, Heard(fails=frozenset(range(0, 200, 2))))
    for step in range(200):
        listeners.step({"step": step})
    listeners.close()
    log = (tmp_path / "sinks.log").read_text()
    assert len(log) < 6000
    assert log.endswith("this file is large enough: no further failure is written here\n")
