"""Scores of two models at one task, which are compared in one unit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.fakes import trajectory

from redline.config import make_config, resolve
from redline.lab.evaluate.answers import Answers
from redline.lab.evaluate.figures import Document
from redline.types import Task
from redline.watch.evaluation import evaluation_row

RECIPE = {"run": {"device": "cpu"}, "model": {"path": "builtin:tiny"}, "rollouts": {"environment": {"name": "guess_number"}}}


def answers(model: str, correct: Sequence[float], part: str = "correct") -> Answers:
    """One answer to each question, with twice the part as its reward."""
    config = resolve(make_config(RECIPE, [], "a test")).config
    tasks = [Task(f"t/{place}", [{"role": "user", "content": "a"}]) for place in range(len(correct))]
    attempts = [[trajectory([1], [2], reward=2 * value, reward_parts={part: value})] for value in correct]
    return Answers("t", model, config, tasks, attempts, evaluation_row(tasks, attempts, 1.0, ""), 0)


def test_models_of_which_one_has_no_accuracy_are_both_scored_by_reward_and_compared() -> None:
    document = Document.of([answers("a", [1, 0, 1])], [answers("b", [1, 0, 0.5])])
    assert [(score.unit, score.value) for score in document.scores] == [("reward", pytest.approx(4 / 3)), ("reward", 1.0)]
    [difference] = document.differences
    assert (difference.as_json()["unit"], difference.value) == ("reward", pytest.approx(1 / 3))
    assert [list(score.as_json()["samples"].values()) for score in document.scores] == [[2, 0, 2], [2, 0, 1]]
    assert all("accuracy" not in score.as_json() for score in document.scores)


def test_models_that_both_have_an_accuracy_are_compared_by_it() -> None:
    document = Document.of([answers("a", [1, 0, 1])], [answers("b", [1, 0, 0])])
    assert [score.as_json()["accuracy"] for score in document.scores] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert document.differences[0].as_json()["unit"] == "accuracy"


def test_models_whose_accuracies_are_different_parts_of_the_reward_are_compared_by_reward() -> None:
    document = Document.of([answers("a", [1, 0])], [answers("b", [1, 1], part="accuracy")])
    assert {score.unit for score in document.scores} == {"reward"}


def test_the_unit_of_a_task_does_not_depend_on_other_tasks() -> None:
    ours = [answers("a", [1, 0]), answers("a", [1, 0])]
    document = Document.of(ours, [answers("b", [1, 0.5]), answers("b", [1, 1])])
    assert [score.unit for score in document.scores] == ["reward", "accuracy", "reward", "accuracy"]
    assert [score.answers.model for score in document.scores] == ["a", "a", "b", "b"]
