"""Delays at spans: where they sleep, what they leave in a row, and that they end whatever happens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.errors import RunFolderError
from redline.telemetry import Recorder, RunFolder, recording, span
from redline.telemetry import spans as spans_module
from redline.telemetry.delays import PLAN, TOTAL, Delays, ask, delays_path, seconds_in, withdraw
from redline.telemetry.spans import Span, use_span_class

SLEEP_S = 0.01


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


@pytest.fixture
def delays(folder: RunFolder) -> Iterator[Delays]:
    made = Delays(folder)
    yield made
    made.close()


def step(delays: Delays) -> dict[str, float | str]:
    """What the row says of a step with one span of each name."""
    delays.step_begins()
    with recording(Recorder()):
        with span("trainer.forward"):
            pass
        with span("rollouts.reward"):
            pass
    return delays.mark()


def test_each_step_of_a_plan_sleeps_where_its_entry_says_and_its_row_says_for_how_long(
    folder: RunFolder, delays: Delays
) -> None:
    assert step(delays) == {}
    plan = ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}, {}, {"trainer.forward": SLEEP_S}], 60)
    first, second, third, after = (step(delays) for _ in range(4))
    assert seconds_in(first, "rollouts.reward") >= SLEEP_S
    assert seconds_in(first, "trainer.forward") == 0
    assert second == {PLAN: plan.id, TOTAL: 0}
    assert third[TOTAL] == seconds_in(third, "trainer.forward") >= SLEEP_S
    assert after == {}


def test_the_sleep_is_time_of_the_span_itself(folder: RunFolder, delays: Delays) -> None:
    ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}], 60)
    delays.step_begins()
    recorder = Recorder()
    with recording(recorder), span("rollouts.reward"):
        pass
    assert recorder.step_mark()["rollouts.reward"] >= SLEEP_S * 1e9


def test_spans_are_the_plain_class_before_and_after(folder: RunFolder, delays: Delays) -> None:
    assert spans_module._span_class is Span
    ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}], 60)
    step(delays)
    assert spans_module._span_class is not Span
    step(delays)
    assert spans_module._span_class is Span
    assert not delays_path(folder).exists()


def test_a_plan_that_is_withdrawn_ends_with_the_next_step(folder: RunFolder, delays: Delays) -> None:
    plan = ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}] * 100, 60)
    step(delays)
    withdraw(folder, plan)
    assert step(delays) == {}
    assert spans_module._span_class is Span


def test_an_expired_plan_delays_nothing_and_is_removed(folder: RunFolder, delays: Delays) -> None:
    plan = ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}] * 100, 60)
    delays_path(folder).write_text(json.dumps({**plan.as_json(), "expires": time.time() - 1}))
    assert step(delays) == {}
    assert not delays_path(folder).exists()


@pytest.mark.parametrize(
    "document",
    [
        "not json",
        "[]",
        '{"id": "x"}',
        '{"id": "x", "pid": 1, "expires": 1e300, "steps": [{"a": 1}]}',
        '{"id": "x", "pid": 1e999, "expires": 1, "steps": []}',
        "[" * 200_000,
    ],
    ids=["no JSON", "a list", "half", "for ever", "an endless number", "deep"],
)
def test_what_is_no_plan_is_removed(folder: RunFolder, delays: Delays, document: str) -> None:
    delays_path(folder).write_text(document)
    assert step(delays) == {}
    assert not delays_path(folder).exists()


def test_a_plan_for_another_process_is_removed_unread(folder: RunFolder, delays: Delays) -> None:
    """A run was killed in the middle of a plan, and resumed."""
    ask(folder, os.getppid(), [{"rollouts.reward": SLEEP_S}] * 100, 60)
    assert step(delays) == {}
    assert not delays_path(folder).exists()


def test_a_second_plan_is_refused_while_one_lies_there(folder: RunFolder) -> None:
    ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}], 60)
    with pytest.raises(RunFolderError, match="delayed already"):
        ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}], 60)


@pytest.mark.parametrize(("steps", "life_s"), [([{"a": 11.0}], 60), ([{}] * 1001, 60), ([{}], 4000)])
def test_a_plan_beyond_the_bounds_is_refused(folder: RunFolder, steps: list[dict[str, float]], life_s: float) -> None:
    with pytest.raises(RunFolderError, match="more than a run takes"):
        ask(folder, os.getpid(), steps, life_s)


def test_the_end_of_a_run_ends_its_delays(folder: RunFolder, delays: Delays) -> None:
    ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}] * 100, 60)
    step(delays)
    delays.close()
    assert spans_module._span_class is Span
    assert not delays_path(folder).exists()


def test_a_profiler_that_changes_the_class_of_spans_leaves_delays_in_place(folder: RunFolder, delays: Delays) -> None:
    class Shown(Span):
        __slots__ = ()

    ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}], 60)
    delays.step_begins()
    use_span_class(Shown)
    try:
        with recording(Recorder()), span("rollouts.reward") as opened:
            assert opened is None
        assert seconds_in(delays.mark(), "rollouts.reward") >= SLEEP_S
        delays.close()
        assert spans_module._span_class is Shown
    finally:
        use_span_class(Span)


def test_between_steps_nothing_is_delayed(folder: RunFolder, delays: Delays) -> None:
    plan = ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}, {}], 60)
    assert seconds_in(step(delays), "rollouts.reward") >= SLEEP_S
    with recording(Recorder()), span("rollouts.reward"):  # an evaluation
        pass
    assert not delays._slept
    assert step(delays) == {PLAN: plan.id, TOTAL: 0}


def test_what_was_slept_under_one_plan_is_not_told_under_the_next(folder: RunFolder, delays: Delays) -> None:
    ask(folder, os.getpid(), [{"rollouts.reward": SLEEP_S}], 60)
    delays.step_begins()
    with recording(Recorder()), span("rollouts.reward"):
        pass
    delays_path(folder).unlink()
    plan = ask(folder, os.getpid(), [{}], 60)
    assert step(delays) == {PLAN: plan.id, TOTAL: 0}
