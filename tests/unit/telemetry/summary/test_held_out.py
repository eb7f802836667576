"""What the first and the last evaluation say together."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest
from support.fakes import trajectory

from redline.rollouts.rewards.accuracy import accuracy, task_scores
from redline.telemetry.summary.held_out import Evaluation, HeldOut
from redline.types import Failure


def row(step: int, scores: list[float], accuracy: float | None = None, **more: Any) -> dict[str, Any]:
    found = {"step": step, "evaluation/reward_mean": fmean(scores), "evaluation/task_scores": scores}
    found |= {"evaluation/num_answers": len(scores), "evaluation/num_tasks": len(scores)}
    return found | ({"evaluation/accuracy": accuracy} if accuracy is not None else {}) | more


BEFORE, AFTER = [1.0] * 10 + [0.0] * 90, [1.0] * 93 + [0.0] * 7


def test_a_rise_that_chance_does_not_explain_is_a_rise() -> None:
    found = HeldOut.read([row(0, BEFORE, 0.1), row(5, BEFORE, 0.1), row(15, AFTER, 0.93)])
    assert found is not None
    assert found.word == "rose"
    assert found.interval is not None
    assert found.interval == pytest.approx((0.755, 0.905), abs=0.001)
    assert (
        found.sentence == "held-out accuracy rose from 10.0% to 93.0%, by 83.0 points (95% interval 75.5 to 90.5, 100 answers)"
    )


def test_a_fall_is_told_in_positive_numbers() -> None:
    found = HeldOut.read([row(0, AFTER), row(15, BEFORE)])
    assert found is not None
    assert found.word == "fell"
    assert found.sentence == "held-out reward fell from 0.930 to 0.100, by 0.830 (95% interval 0.755 to 0.905, 100 answers)"


def test_a_change_that_may_be_chance_is_called_so() -> None:
    chance = random.Random(0)
    before = [chance.random() for _ in range(20)]
    after = [value + chance.choice([-0.5, 0.55]) for value in before]
    found = HeldOut.read([row(0, before), row(9, after)])
    assert found is not None
    assert found.word == "unclear"
    assert "which may be chance" in found.sentence


def test_the_interval_holds_the_truth_about_nineteen_times_in_twenty() -> None:
    chance, hits = random.Random(1), 0
    for _ in range(2000):
        before = [chance.gauss(0, 1) for _ in range(12)]
        after = [value + chance.gauss(0.3, 1) for value in before]
        found = HeldOut.read([row(0, before), row(1, after)])
        assert found is not None
        assert found.interval is not None
        hits += found.interval[0] <= 0.3 <= found.interval[1]
    assert 0.935 < hits / 2000 < 0.965


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([row(0, [0.0] * 4), row(3, [1.0, 1.0, 1.0, 0.9])], "rose"),  # too few tasks
        ([row(0, [0.0] * 8), row(3, [1.0] * 8)], "rose"),  # all changed alike
        ([row(0, [0.5] * 8), row(3, [0.5] * 8)], "same"),
        ([row(0, [0.5, 0.6] * 8)], "once"),
        ([row(0, [0.5, 0.6] * 8), row(3, [0.5, 0.7] * 9)], "rose"),  # other tasks
    ],
)
def test_where_there_is_no_interval_none_is_claimed(rows: list[dict[str, Any]], word: str) -> None:
    found = HeldOut.read(rows)
    assert found is not None
    assert (found.word, found.interval) == (word, None)
    assert "interval" not in found.sentence


def test_rows_that_are_damaged_or_older_are_read_as_far_as_they_go() -> None:
    assert HeldOut.read([{"step": 1}, {"evaluation/reward_mean": None, "step": 2}]) is None
    old = {"step": 3, "evaluation/reward_mean": 0.25}
    assert Evaluation.read(old) == Evaluation(3, 0.25, None, 0, 0)
    broken = row(0, BEFORE) | {"evaluation/task_scores": [None, 1.0]}
    found = HeldOut.read([broken, row(9, AFTER)])
    assert found is not None
    assert found.interval is None
    assert found.as_json()["before"] == {"step": 0, "reward": 0.1, "accuracy": None, "answers": 100, "tasks": 100}


def test_scores_of_tasks_average_to_the_accuracy_or_to_the_reward() -> None:
    right = trajectory([1], [2], reward=1.5, reward_parts={"correct": 1.0})
    wrong = trajectory([1], [2], reward=0.5, reward_parts={"correct": 0.0})
    failed = trajectory([1], [2], reward=0.0, failure=Failure("reward", "it raised"))
    groups = [[right, wrong], [right, failed]]
    assert task_scores(groups) == [0.5, 0.5]
    assert accuracy([attempt for group in groups for attempt in group]) == 0.5
    assert task_scores([[trajectory([1], [2], reward=2.0), trajectory([1], [2], reward=1.0)]]) == [1.5]


def test_a_task_without_a_scored_attempt_has_no_reward_and_no_right_answer() -> None:
    failed = trajectory([1], [2], failure=Failure("reward", "it raised"))
    right = trajectory([1], [2], reward=1.5, reward_parts={"correct": 1.0})
    assert task_scores([[trajectory([1], [2], reward=2.0), failed], [failed, failed]]) == [2.0, None]
    assert task_scores([[right, failed], [failed, failed]]) == [0.5, 0.0]
    assert accuracy([right, failed, failed, failed]) == 0.25


def scored(step: int, scores: list[float | None], **more: Any) -> dict[str, Any]:
    found = row(step, [score for score in scores if score is not None], **more)
    return found | {"evaluation/task_scores": scores, "evaluation/num_answers": len(scores)}


def test_the_change_its_interval_and_the_word_are_over_the_tasks_that_were_scored_in_both() -> None:
    outage = [None if index % 2 else 1.0 for index in range(16)]
    after = [0.9 + 0.001 * (index % 7) for index in range(16)]
    found = HeldOut.read([scored(0, outage), scored(2, list(after))])
    assert found is not None
    assert found.interval is not None
    assert (found.word, found.left_out, found.values) == ("fell", 8, (1.0, fmean(after[::2])))
    assert found.interval[0] < found.change < found.interval[1] < 0
    assert found.sentence.endswith(", 16 answers; 8 of 16 tasks left out, not scored in both)")
    assert found.as_json()["left_out"] == 8


def test_means_over_answers_do_not_contradict_those_over_tasks() -> None:
    """Some attempts at each task failed, so that the mean over answers weighs the tasks otherwise."""
    before, after = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.2, 0.31, 0.4, 0.52, 0.6, 0.7]
    found = HeldOut.read([row(0, before) | {"evaluation/reward_mean": 0.6}, row(2, after) | {"evaluation/reward_mean": 0.5}])
    assert found is not None
    assert found.interval is not None
    assert found.interval[0] < found.change < found.interval[1]
    assert (found.word, found.left_out) == ("rose", 0)


def test_where_no_task_was_scored_in_both_nothing_is_claimed() -> None:
    found = HeldOut.read([scored(0, [0.1, None] * 8), scored(2, [None, 0.9] * 8)])
    assert found is not None
    assert (found.word, found.interval, found.left_out) == ("unclear", None, 16)
    assert "16 of 16 tasks left out" in found.sentence


def test_accuracies_of_tasks_are_not_set_beside_rewards() -> None:
    found = HeldOut.read([row(0, [0.0, 1.0] * 8, 0.5, **{"evaluation/reward_mean": 3.0}), row(2, [2.0, 2.5] * 8)])
    assert found is not None
    assert (found.measure, found.values, found.interval, found.word) == ("reward", (3.0, 2.25), None, "fell")
