from __future__ import annotations

import importlib
import re

import pytest
from support.fakes import Calls, FakeBuffer, FakeEngine, FakeRollouts, FakeTrainer, FakeWatch, FakeWeightSync

from redline import loop, ports, types


def run(steps: int, *, start: int = 0, stop_after: int | None = None) -> Calls:
    calls: Calls = []
    loop.run(
        FakeRollouts(calls),
        FakeBuffer(calls),
        FakeTrainer(calls, version=start),
        FakeWeightSync(calls),
        FakeEngine(calls),
        steps=steps,
        watch=FakeWatch(calls, stop_after),
    )
    return calls


def named(calls: Calls, name: str) -> list[tuple]:
    return [call[1:] for call in calls if call[0] == name]


def begun(calls: Calls) -> list[tuple]:
    """(groups, version), where there were any."""
    return [call for call in named(calls, "rollouts.begin") if call[0]]


def test_a_step_goes_through_the_stages_in_the_order_of_the_picture() -> None:
    assert run(steps=1) == [
        ("trainer.weights", 0),
        ("weight_sync.publish", 0),
        ("engine.apply", 0),
        ("watch.should_stop",),
        ("buffer.admit", 0),
        ("rollouts.begin", 2, 0),
        ("rollouts.finished",),
        ("watch.group_collected", "0/0"),
        ("watch.group_collected", "0/1"),
        ("buffer.offer", "0/0"),
        ("buffer.offer", "0/1"),
        ("buffer.admit", 0),
        ("rollouts.begin", 0, 0),
        ("buffer.next_batch", 0),
        ("trainer.step", 0),
        ("trainer.weights", 1),
        ("weight_sync.publish", 1),
        ("engine.apply", 1),
        ("buffer.trained",),
        ("watch.step_finished", 1),
    ]


def test_every_step_samples_from_the_version_that_the_last_one_made() -> None:
    calls = run(steps=3)
    assert begun(calls) == [(2, 0), (2, 1), (2, 2)]
    assert named(calls, "engine.apply") == [(0,), (1,), (2,), (3,)]
    assert named(calls, "watch.step_finished") == [(1,), (2,), (3,)]


def test_rollouts_are_asked_for_what_the_buffer_lacks() -> None:
    calls: Calls = []
    loop.run(
        FakeRollouts(calls),
        FakeBuffer(calls, wanted=5),
        FakeTrainer(calls),
        FakeWeightSync(calls),
        FakeEngine(calls),
        steps=1,
        watch=FakeWatch(calls),
    )
    assert begun(calls) == [(5, 0)]
    assert len(named(calls, "buffer.offer")) == 5


def test_a_resumed_trainer_goes_on_where_it_was() -> None:
    calls = run(steps=5, start=3)
    assert named(calls, "engine.apply") == [(3,), (4,), (5,)]
    assert begun(calls) == [(2, 3), (2, 4)]


@pytest.mark.parametrize("start", [4, 7])
def test_a_run_that_has_all_its_steps_takes_no_more(start: int) -> None:
    calls = run(steps=4, start=start)
    assert not begun(calls)
    assert named(calls, "engine.apply") == [(start,)], "an evaluation still needs the weights"


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_request_to_stop_ends_the_run_before_the_next_step(stop_after: int) -> None:
    calls = run(steps=10, stop_after=stop_after)
    assert len(named(calls, "trainer.step")) == stop_after
    assert len(named(calls, "watch.step_finished")) == stop_after
    assert calls[-1] == ("watch.should_stop",)


def test_what_the_buffer_gives_up_is_cancelled_before_others_are_begun() -> None:
    class Impatient(FakeBuffer):
        def cancel_late(self, version: int) -> list[int]:
            return [7, 9] if not named(self.calls, "rollouts.cancel") else []

    class Rollouts(FakeRollouts):
        def finished(self, patience_s: float | None = None, *, late: bool = False) -> list[types.TrajectoryGroup]:
            assert patience_s == 0.5
            return super().finished()

    calls: Calls = []
    stages = (Rollouts(calls), Impatient(calls, patience_s=0.5), FakeTrainer(calls), FakeWeightSync(calls), FakeEngine(calls))
    loop.run(*stages, steps=1, watch=FakeWatch(calls))
    order = [call[0] for call in calls]
    assert named(calls, "rollouts.cancel") == [(7, 9)]
    assert order.index("rollouts.cancel") < order.index("buffer.admit")


# ── the docstring ──────────────────────────────────────────────────────────────────────────────────────────────────────

PORT_OF = {"rollouts": "Rollouts", "engine": "Engine", "buffer": "Buffer", "trainer": "Trainer", "weight_sync": "WeightSync"}


def table() -> list[dict[str, str]]:
    """The rows of the table in loop.py's docstring."""
    lines = loop.__doc__.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("stage "))
    columns = re.split(r"\s{2,}", lines[head].strip())
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[head + 1 :]]
    return [dict(zip(columns, row, strict=True)) for row in rows[: next(i for i, row in enumerate(rows) if row == [""])]]


def test_the_table_in_the_docstring_names_every_stage_and_its_package_exists() -> None:
    assert sorted(row["stage"] for row in table()) == sorted(PORT_OF)
    for row in table():
        importlib.import_module(f"redline.{row['stage']}")
        assert hasattr(ports, PORT_OF[row["stage"]])


def test_every_record_in_the_docstring_is_one_of_types() -> None:
    in_table = {row[column] for row in table() for column in ("consumes", "produces")}
    in_picture = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", loop.__doc__.partition("stage ")[0]))
    assert in_picture == {"Task", "TrajectoryGroup", "TrainBatch", "WeightSet", "WeightUpdate", "Completion"}
    for name in in_table | in_picture:
        assert hasattr(types, name), name


def test_what_unblocks_a_stage_is_a_method_that_the_loop_calls() -> None:
    called = {call[0] for call in run(steps=1)}
    for row in table():
        stage, _, method = row["unblocked by"].partition(".")
        assert hasattr(getattr(ports, PORT_OF[stage]), method), row
        assert row["unblocked by"] in called
