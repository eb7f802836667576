"""The environment that a recipe names: what it becomes, and what is wrong with it, before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.config import validate
from redline.config.sections.environment import EnvironmentConfig
from redline.environments import registry
from redline.environments.registry import Shipped
from redline.environments.stepped import Stepped
from redline.errors import TaskError
from redline.launch import environments
from redline.launch.environments import make_environment, task_source
from redline.launch.preflight import load_tasks
from redline.types import Task

SOURCE = """
from redline.types import Reaction, Task


class Bare:
    def __init__(self, seed, rounds=2):
        self.seed, self.rounds = seed, rounds

    async def play(self, task, policy):
        return 1.0


class WithTasks(Bare):
    def train(self, index):
        return Task(f"train/{index}", [])

    def held_out(self, count):
        return [Task(f"held/{i}", []) for i in range(count)]


class OnlyTrain(Bare):
    def train(self, index):
        return Task(f"train/{index}", [])


class WithoutPlay:
    def __init__(self, seed): ...


class PlaysAlone(WithoutPlay):
    async def play(self, policy):
        return 1.0


class Steps:
    def __init__(self, seed, size=3):
        self.size = size

    def reset(self, task):
        return "go"

    def step(self, reply):
        return Reaction(done=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine_to_load.py").write_text(SOURCE)
    return tmp_path


def made(folder: Path, name: str, **params: Any) -> Any:
    return make_environment(EnvironmentConfig(name=f"mine_to_load:{name}", folder=folder, params=params), 7)


def refused(folder: Path, name: str, **params: Any) -> TaskError:
    with pytest.raises(TaskError) as caught:
        made(folder, name, **params)
    return caught.value


def test_a_class_is_made_with_the_seed_and_the_params(folder: Path) -> None:
    environment = made(folder, "Bare", rounds=5)
    assert (environment.seed, environment.rounds) == (7, 5)


def test_a_game_is_played_in_steps(folder: Path) -> None:
    assert isinstance(made(folder, "Steps"), Stepped)


@pytest.mark.parametrize(
    ("name", "params", "message", "hint"),
    [
        ("Nothing", {}, "mine_to_load.py) has no Nothing", "it has Bare, WithTasks, "),
        ("Bare", {"size": 3}, "could not be made: TypeError", "it takes (seed, rounds=2)"),
        ("Steps", {"rounds": 3}, "could not be made: TypeError", "it takes (seed, size=3)"),
        (
            "WithoutPlay",
            {},
            "gives a WithoutPlay without `play`, or a game's `reset` and `step`",
            "async def play(self, task, policy)",
        ),
        (
            "PlaysAlone",
            {},
            "play(policy) cannot be called: too many positional arguments",
            "async def play(self, task, policy)",
        ),
    ],
)
def test_a_mistake_gets_its_reason_and_its_fix(
    folder: Path, name: str, params: dict[str, Any], message: str, hint: str
) -> None:
    error = refused(folder, name, **params)
    assert message in error.message
    assert hint in error.hint


def test_a_module_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"rollouts\.environment\.name: no module 'nowhere'") as caught:
        make_environment(EnvironmentConfig(name="nowhere:Thing", folder=tmp_path), 0)
    assert str(tmp_path) in caught.value.hint


def test_an_unknown_name_gets_the_nearest_and_the_form_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ENVIRONMENTS", {"chess": Shipped("a:B", "a game")})
    with pytest.raises(TaskError, match="no such environment") as caught:
        make_environment(EnvironmentConfig(name="ches"), 0)
    assert caught.value.hint == "did you mean chess?; one of your own is `package.module:Class`"


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "missing_packages", lambda extra: ["diplomacy"])
    assert registry.ENVIRONMENTS["diplomacy"].extra == "diplomacy"
    with pytest.raises(TaskError, match="it needs diplomacy") as caught:
        make_environment(EnvironmentConfig(name="diplomacy"), 0)
    assert "[diplomacy]" in caught.value.hint


# ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def recipe(folder: Path, name: str, **rollouts: Any) -> Any:
    environment = {"name": f"mine_to_load:{name}", "folder": str(folder)}
    return validate({"model": {"path": "builtin:tiny"}, "rollouts": {"environment": environment, **rollouts}})


def test_an_environment_may_bring_tasks_without_messages(folder: Path) -> None:
    tasks = load_tasks(recipe(folder, "WithTasks", evaluation={"num_tasks": 2}))
    assert tasks.source.train(3) == Task("train/3", [])
    assert [task.id for task in tasks.held_out] == ["held/0", "held/1"]
    assert tasks.environment is not None


@pytest.mark.parametrize("name", ["Bare", "OnlyTrain"])
def test_an_environment_without_tasks_needs_those_of_the_recipe(folder: Path, name: str) -> None:
    config = recipe(folder, name)
    with pytest.raises(TaskError, match=r"^rollouts\.task: required; .*: it has no .*held_out"):
        task_source(config, make_environment(config.rollouts.environment, 0))


def test_tasks_that_nobody_would_ask_are_refused(folder: Path) -> None:
    config = recipe(folder, "WithTasks", task={"kind": "import", "path": "mine_to_load:WithTasks", "folder": str(folder)})
    with pytest.raises(TaskError, match="brings its own tasks") as caught:
        task_source(config, make_environment(config.rollouts.environment, 0))
    assert caught.value.hint == "leave rollouts.task out"
