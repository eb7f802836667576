"""Every data set of reasoning_gym, by its name."""

from __future__ import annotations

import time

import pytest

from redline.config.sections.tasks import ReasoningGymTask
from redline.ports import TaskSource
from redline.rollouts.tasks.sources import make_task_source
from redline.types import Task

factory = pytest.importorskip("reasoning_gym.factory")

SPECIAL = {
    "composite": "a mixture: it needs params.datasets",
    "game_of_life_halting": "refused: its scorer takes any answer for right",
}
MANY_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""They accept many answers and name none."""
SLOW_S = {"futoshiki": 10.0, "knight_swap": 10.0, "puzzle24": 5.0}
"""Seconds that one task may take on a slow core; any other takes one at most."""


def question(task: Task) -> str:
    return str(task.messages[-1]["content"])


def made(name: str) -> TaskSource:
    return make_task_source(ReasoningGymTask(kind="reasoning_gym", dataset=name), seed=0)


def test_the_data_sets_that_need_something_special_exist() -> None:
    assert {*SPECIAL, *MANY_ANSWERS, *SLOW_S} <= factory.DATASETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(factory.DATASETS.keys() - SPECIAL.keys()))
def test_a_data_set_gives_tasks_that_its_own_answers_solve(name: str) -> None:
    source = made(name)
    source.train(10_000)  # words and boards are loaded once
    began = time.process_time()
    tasks = [source.train(index) for index in range(4)]
    assert (time.process_time() - began) / 4 < SLOW_S.get(name, 1.0)
    held_out = source.held_out(2)
    assert len(held_out) == 2
    assert not {question(task) for task in held_out} & {question(task) for task in tasks}
    assert [question(task) for task in tasks] == [question(made(name).train(index)) for index in range(4)]
    assert all((task.answer == "") == (name in MANY_ANSWERS) for task in tasks)
    assert all(source.score(task, task.answer) == {"correct": 1.0} for task in tasks if task.answer)
    assert all(source.score(task, "?") == {"correct": 0.0} for task in tasks)
