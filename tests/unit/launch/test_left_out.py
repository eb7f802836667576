"""Held-out tasks that the model cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redline.config.sections.rollouts import RolloutsConfig
from redline.config.sections.tasks import FileTask
from redline.environments.guess_number import GuessNumber
from redline.environments.single_turn import SingleTurn
from redline.errors import TaskError
from redline.launch import left_out
from redline.launch.left_out import askable, without_bad_prompts
from redline.launch.preflight import LoadedTasks
from redline.models.files.tiny import tiny_tokenizer
from redline.ports import Environment, TaskSource
from redline.rollouts import Chat, RolloutSetup
from redline.rollouts.tasks import files
from redline.rollouts.tasks.files import FileTasks
from redline.types import Task

LIMIT = 40


def setup_of(tasks: TaskSource) -> RolloutSetup:
    config = RolloutsConfig.model_validate({"task": {"kind": "import", "path": "a:B"}, "max_prompt_tokens": LIMIT})
    return RolloutSetup(tasks, SingleTurn, Chat(tiny_tokenizer(), None, ""), config, (3,), 5, max_prompt_tokens=LIMIT)


def question(name: str, words: int) -> Task:
    return Task(name, [{"role": "user", "content": "word " * words}])


class Given:
    """A source with these held-out tasks."""

    def __init__(self, *tasks: Task) -> None:
        self.tasks = tasks

    def train(self, index: int) -> Task:
        raise AssertionError("training tasks are not looked at")

    def held_out(self, count: int) -> list[Task]:
        return list(self.tasks[:count])

    def score(self, task: Task, text: str) -> float:
        return 0.0


def asked(*tasks: Task, environment: Environment | None = None) -> tuple[list[str], list[str]]:
    """Names of the tasks that are asked, and what is said."""
    source, said = Given(*tasks), list[str]()
    loaded = LoadedTasks(source, 1, list(tasks), environment)
    return [task.id for task in askable(loaded, loaded.held_out, setup_of(source), said.append)], said


def test_tasks_that_do_not_fit_or_cannot_be_rendered_are_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "AT_ONCE", 2)
    broken = Task("broken", [{"role": "user"}])
    found, said = asked(question("a", 1), question("b", 500), question("a", 2), broken, question("c", 1))
    assert found == ["a", "a", "c"]
    [line] = said
    assert line.startswith("left out of 5 held-out tasks: b (a prompt of ")
    assert line.endswith(" and 1 more")


def test_no_task_that_can_be_asked_is_an_error_with_the_fix() -> None:
    with pytest.raises(TaskError, match=r"none of 2 held-out tasks can be asked: a .* and 1 more") as caught:
        asked(question("a", 500), question("b", 500))
    assert "raise rollouts.max_prompt_tokens" in caught.value.hint


def test_an_environment_may_ask_something_else_than_messages_of_which_none_fits_and_tasks_may_have_none() -> None:
    game = GuessNumber(seed=0)
    assert asked(question("a", 500), environment=game) == (["a"], [])
    assert asked(Task("bare", []), question("a", 500), environment=game)[0] == ["bare"]


def test_held_out_rows_beyond_those_that_are_checked_before_a_run_are_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECKED_ROWS", 2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n} " * (1 if n % 3 else 300), "answer": "b"}) + "\n" for n in range(1, 13))
    )
    source = FileTasks(FileTask(kind="file", path=rows, held_out_fraction=1), 0)
    loaded = LoadedTasks(source, 1, source.held_out(99))
    for found in (
        askable(loaded, loaded.held_out, setup_of(source), lambda text: None),
        without_bad_prompts(loaded, setup_of(source), lambda text: None),
    ):
        assert {task.id for task in found} == {f"rows/{n}" for n in range(1, 13) if n % 3}
