"""The environment that a recipe names, and where its tasks come from. Every mistake in it is found before a model is loaded."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from redline.config import Config
from redline.config.installation import how_to_install, missing_packages
from redline.config.sections.environment import EnvironmentConfig
from redline.config.sections.rollouts import RolloutsConfig
from redline.config.sections.tasks import ImportTask
from redline.environments.registry import ENVIRONMENTS
from redline.environments.stepped import as_environment, is_game
from redline.environments.workers.held import GameClass
from redline.environments.workers.kinds import make_workers
from redline.environments.workers.processes import ProcessWorkers, Scale
from redline.errors import TaskError
from redline.ports import Environment, TaskSource
from redline.rollouts import make_task_source
from redline.rollouts.rewards.parts import REWARD_WORKERS
from redline.rollouts.user_code.elsewhere import ScoredElsewhere
from redline.rollouts.user_code.imports import ImportPath
from redline.types import Task

KEY = "rollouts.environment.name"
ENDED_AFTER_S = 2.0
"""Seconds from the limit of a call of `score` until the process that makes it is ended."""
A_PLAY = "give it `async def play(self, task, policy)`, which returns the reward; see redline.ports.Environment"


def make_environment(config: EnvironmentConfig, seed: int, scale: Scale | None = None) -> Environment:
    """The environment that a recipe's `rollouts.environment` names. The number of its worker processes, where it has some,
    follows `scale`. Raises TaskError for whatever is wrong with it."""
    assert config.name is not None
    path, factory = _found(config, config.name)
    if is_game(factory):
        path.make(factory, seed)  # each attempt makes one; here, so that what is wrong with its parameters is found
        return _played_in_steps(config, GameClass(path.path, {"seed": seed, **config.params}, _folder(config), factory), scale)
    environment = path.make(factory, seed)
    _check_play(environment, config.name)
    return cast(Environment, environment)


def _folder(config: EnvironmentConfig) -> str | None:
    """Where worker processes find the module of an environment that does not ship with us."""
    return str(config.folder or Path.cwd()) if ":" in str(config.name) else None


def _played_in_steps(config: EnvironmentConfig, game: GameClass, scale: Scale | None) -> Environment:
    run_in = "threads" if config.run_in == "auto" else config.run_in
    return as_environment(game, make_workers(run_in, config.workers, config.call_timeout_s, scale))


def worker_scale(rollouts: RolloutsConfig) -> Scale:
    """How a recipe wants the number of worker processes to follow what there is to do."""
    return Scale(rollouts.min_workers, rollouts.worker_idle_s)


def _found(config: EnvironmentConfig, name: str) -> tuple[ImportPath, Any]:
    if ":" in name:
        path = ImportPath(name, KEY, config.folder, config.params)
        return path, path.find()
    if name not in ENVIRONMENTS:
        close = get_close_matches(name, ENVIRONMENTS, 1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(ENVIRONMENTS)) or 'none'}"
        raise TaskError(f"{KEY} = {name!r}: no such environment", f"{hint}; one of your own is `package.module:Class`")
    shipped = ENVIRONMENTS[name]
    if shipped.extra and (missing := missing_packages(shipped.extra)):
        raise TaskError(f"{KEY} = {name!r}: it needs {' and '.join(missing)}", how_to_install(shipped.extra))
    module, _, attribute = shipped.path.partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    return ImportPath(shipped.path, KEY, None, config.params), factory


def _check_play(environment: Any, name: str) -> None:
    if not callable(getattr(environment, "play", None)):
        raise TaskError(
            f"{KEY} = {name!r} gives a {type(environment).__name__} without `play`, or a game's `reset` and `step`", A_PLAY
        )
    signature = inspect.signature(environment.play)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TaskError(f"{KEY} = {name!r}: play{signature} cannot be called: {error}", A_PLAY) from error


# ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class OwnTasks:
    """The tasks that an environment brings. Implements `ports.TaskSource`."""

    def __init__(self, environment: Any) -> None:
        self.train, self.held_out = environment.train, environment.held_out

    def score(self, task: Task, text: str) -> float:
        raise AssertionError("the environment returns the score")


def task_source(config: Config, environment: Environment | None) -> TaskSource:
    """Where the tasks of a recipe come from: `rollouts.task`, or an environment that has `train` and `held_out`. Raises
    TaskError where neither or both would give them."""
    rollouts = config.rollouts
    own = [method for method in ("train", "held_out") if callable(getattr(environment, method, None))]
    if rollouts.task is None:
        if len(own) == 2:
            return OwnTasks(environment)
        missing: Sequence[str] = [method for method in ("train", "held_out") if method not in own]
        raise TaskError(
            f"rollouts.task: required; {type(environment).__name__} brings no tasks of its own: it has no {', '.join(missing)}",
            "set rollouts.task, or give the environment the methods train(index) and held_out(count)",
        )
    if own:
        raise TaskError(
            f"rollouts.task: {rollouts.environment.name} brings its own tasks ({', '.join(own)})", "leave rollouts.task out"
        )
    return make_task_source(rollouts.task, config.run.seed)


def scored_elsewhere(config: Config, source: TaskSource) -> ScoredElsewhere:
    """A source of the user's own whose `score` is called in worker processes. None is started before there is something to
    score."""
    rollouts, task = config.rollouts, config.rollouts.task
    assert isinstance(task, ImportTask), "config/effects.py refuses any other"
    keywords = {"seed": config.run.seed, **task.params}
    made_as = {"path": task.path, "folder": str(task.folder or Path.cwd()), "keywords": keywords}
    count = rollouts.max_reward_workers or REWARD_WORKERS
    # The thread that waits gives a late call up, and says so; the process that made it is ended after that.
    limit_s = None if rollouts.reward_timeout_s is None else rollouts.reward_timeout_s + ENDED_AFTER_S
    processes = ProcessWorkers(count, limit_s, worker_scale(rollouts), name="reward process")
    return ScoredElsewhere(source, made_as, processes)
