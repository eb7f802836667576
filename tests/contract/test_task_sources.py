"""What every task source promises (`ports.TaskSource`), whether redline ships it or a user writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow.parquet import write_table
from support.paths import ROOT

from redline.config.sections.tasks import FileTask, ImportTask, ReasoningGymTask
from redline.ports import TaskSource
from redline.rollouts.tasks.checks import check_methods, held_out_tasks, training_task
from redline.rollouts.tasks.sources import make_task_source
from redline.types import Task


def gym(folder: Path, seed: int) -> TaskSource:
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return make_task_source(ReasoningGymTask(kind="reasoning_gym", dataset="chain_sum", params=sums), seed)


def jsonl(folder: Path, seed: int) -> TaskSource:
    path = folder / "sums.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task_source(FileTask(kind="file", path=path), seed)


def parquet(folder: Path, seed: int) -> TaskSource:
    table = pa.table({"prompt": [f"{i} + 1 =" for i in range(120)], "answer": [i + 1 for i in range(120)]})
    write_table(table, folder / "sums.parquet", row_group_size=50)
    return make_task_source(FileTask(kind="file", path=folder / "sums.parquet", extract="last_number"), seed)


def imported(folder: Path, seed: int) -> TaskSource:
    """A user's class: the one of `examples/`."""
    task = ImportTask(kind="import", path="custom_task:ReverseWord", params={"length": 2}, folder=ROOT / "examples")
    return make_task_source(task, seed)


SOURCES: dict[str, Callable[[Path, int], TaskSource]] = {
    "reasoning_gym": gym,
    "jsonl": jsonl,
    "parquet": parquet,
    "imported": imported,
}
"""Name → a source with this seed, which may use the folder. Each has few enough questions to see all of them."""
NUM_QUESTIONS = {"reasoning_gym": 200, "jsonl": 120, "parquet": 120, "imported": 100}


@dataclass
class Maker:
    """Makes sources of one kind."""

    name: str
    folder: Path

    def __call__(self, seed: int = 0) -> TaskSource:
        return SOURCES[self.name](self.folder, seed)


@pytest.fixture(params=SOURCES)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Maker(request.param, tmp_path)


def question(task: Task) -> str:
    return task.messages[-1]["content"]


def test_it_has_the_methods_that_are_called_and_every_task_can_be_used(make: Maker) -> None:
    source = make()
    check_methods(source, "it")
    for index in range(50):
        training_task(source, index)
    assert held_out_tasks(source, 5)


def test_no_training_task_is_held_out(make: Maker) -> None:
    source = make()
    held_out = {question(task) for task in source.held_out(1000)}
    train = {question(source.train(i)) for i in range(3000)}
    assert held_out
    assert not held_out & train
    assert len(held_out | train) == NUM_QUESTIONS[make.name]


def test_held_out_tasks_are_distinct_and_at_most_as_many_as_asked_for(make: Maker) -> None:
    source = make()
    for count in (1, 10, 1000):
        tasks = source.held_out(count)
        assert len({question(task) for task in tasks}) == len(tasks) <= count


def test_asking_for_fewer_held_out_tasks_gives_the_first_of_them(make: Maker) -> None:
    source = make()
    assert source.held_out(5) == source.held_out(15)[:5]


def test_held_out_tasks_do_not_depend_on_the_seed(make: Maker) -> None:
    assert make(0).held_out(1000) == make(1).held_out(1000)


def test_the_same_index_gives_the_same_task_in_another_instance_and_another_order(make: Maker) -> None:
    first, second = make(), make()
    forward = [first.train(i) for i in range(300)]
    backward = [second.train(i) for i in reversed(range(300))]
    assert forward == backward[::-1]


def test_another_seed_gives_other_tasks_or_another_order(make: Maker) -> None:
    first, second = ([question(source.train(i)) for i in range(50)] for source in (make(0), make(1)))
    assert first != second


def test_training_goes_on_without_end_and_any_index_is_at_hand(make: Maker) -> None:
    assert training_task(make(), 10**9).messages


def test_an_id_names_one_question(make: Maker) -> None:
    source = make()
    tasks = [source.train(i) for i in range(1000)] + list(source.held_out(30))
    assert len({task.id for task in tasks}) == len({(task.id, question(task)) for task in tasks})


def test_the_right_answer_scores_more_than_any_other(make: Maker) -> None:
    source = make()
    tasks = [*(source.train(i) for i in range(20)), *source.held_out(5)]
    for task in tasks:
        other = next(other for other in tasks if other.answer != task.answer)
        right, wrong, nothing = (total(source.score(task, text)) for text in (task.answer, other.answer, "?"))
        assert right > wrong
        assert right > nothing


def total(score: object) -> float:
    return sum(score.values()) if isinstance(score, Mapping) else float(score)  # type: ignore[arg-type]
