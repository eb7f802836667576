"""What a run says of itself at the end: whether it learned, and what its numbers are called."""

from __future__ import annotations

from typing import Any

import pytest
from support.fakes import trajectory

from redline.rollouts.rewards.accuracy import accuracy
from redline.telemetry.summary.learning import Learning
from redline.types import Failure


def step(**changes: Any) -> dict[str, Any]:
    """A row of metrics in which the weights moved."""
    row = {
        "rollouts/groups": 4,
        "rollouts/groups_with_signal": 2,
        "rollouts/reward_mean": 0.5,
        "rollouts/reward_std": 0.5,
        "rollouts/failures": 0,
        "trainer/grad_norm": 1.0,
        "trainer/learning_rate": 1e-3,
        "trainer/skipped": False,
    }
    return row | {name.replace("__", "/"): value for name, value in changes.items()}


ALIKE = {"rollouts__groups_with_signal": 0, "rollouts__reward_mean": 0.25, "trainer__grad_norm": 0.0}
FAILED = {"rollouts__groups_with_signal": 0, "rollouts__reward_mean": 0.0, "rollouts__failures": 32, "trainer__grad_norm": 0.0}
SKIPPED = {"trainer__grad_norm": None, "trainer__skipped": True}


@pytest.mark.parametrize(
    ("rows", "why_not"),
    [
        ([ALIKE, ALIKE], "in every group all attempts scored alike (mean reward 0.250)"),
        ([FAILED, FAILED], "every attempt failed"),
        ([SKIPPED, SKIPPED], "every step was skipped, because its loss or gradient was not finite"),
        ([ALIKE, SKIPPED], "no step had a gradient"),
        ([{"trainer__learning_rate": 0.0}], "no step had a gradient"),
        ([ALIKE, {}, ALIKE], None),
        ([SKIPPED, {}], None),
        ([{"trainer__skipped": True, "trainer__updates": 3}], None),
        ([SKIPPED | {"trainer__updates": 0}], "every step was skipped, because its loss or gradient was not finite"),
        ([], None),
    ],
)
def test_a_run_whose_weights_never_moved_says_why(rows: list[dict[str, Any]], why_not: str | None) -> None:
    found = Learning([step(**row) for row in rows], group_size=8)
    assert found.why_not == why_not
    assert found.moved_weights is (why_not is None and bool(rows))


@pytest.mark.parametrize(
    ("fractions", "said"),
    [
        ((1.0, 1.0), ", and all of them ended at a budget"),
        ((0.5, 0.25), ", and 38% of them ended at a budget"),
        ((0.0, 0.125), ""),
        ((None, 0.0), ""),
    ],
)
def test_attempts_that_a_budget_ended_are_told_with_those_that_scored_alike(
    fractions: tuple[float | None, float], said: str
) -> None:
    found = Learning([step(**ALIKE, rollouts__truncated_fraction=share) for share in fractions], group_size=8)
    assert found.why_not == f"in every group all attempts scored alike (mean reward 0.250){said}"
    assert found.is_cut_short is bool(said)


def test_the_last_steps_without_signal_are_counted_and_steps_without_groups_are_not() -> None:
    rows = [step(**ALIKE), step(), step(**ALIKE), step(rollouts__groups=0, rollouts__groups_with_signal=0), step(**ALIKE)]
    assert Learning(rows, group_size=8).steps_without_signal == 2


# ── what is an accuracy ────────────────────────────────────────────────────────────────────────────────────────────────


def answers(*parts: dict[str, float] | None) -> list[Any]:
    """One attempt for each, None for one that failed."""
    failed = trajectory([1], [2], failure=Failure("reward", "no"))
    return [failed if each is None else trajectory([1], [2], reward_parts=each) for each in parts]


@pytest.mark.parametrize("name", ["correct", "accuracy"])
def test_a_part_that_is_called_so_and_is_0_or_1_is_the_accuracy_whatever_else_is_rewarded(name: str) -> None:
    assert accuracy(answers({name: 1.0, "style": 7.0}, {name: 0.0, "style": 9.0})) == 0.5


def test_an_attempt_that_failed_is_not_right() -> None:
    assert accuracy(answers({"correct": 1.0}, None, None, {"correct": 1.0})) == 0.5


@pytest.mark.parametrize("parts", [{"letters": 1.0}, {"correct": 0.5}, {"correct": 7.5}, {}])
def test_any_other_reward_is_no_accuracy(parts: dict[str, float]) -> None:
    assert accuracy(answers(parts, parts)) is None
    assert accuracy(answers(None, None)) is None
