"""Where tasks come from: a reasoning_gym data set, files, or a class of the user's."""

from __future__ import annotations

from typing import cast

from redline.config.sections.tasks import FileTask, ImportTask, ReasoningGymTask, TaskConfig
from redline.ports import TaskSource
from redline.rollouts.tasks.checks import check_methods
from redline.rollouts.tasks.files import FileTasks
from redline.rollouts.tasks.reasoning_gym import ReasoningGymTasks
from redline.rollouts.user_code.imports import ImportPath


def make_task_source(config: TaskConfig, seed: int) -> TaskSource:
    """The source a recipe's `rollouts.task` asks for; every mistake in it is found here, before anything is loaded."""
    if isinstance(config, ReasoningGymTask):
        return ReasoningGymTasks(config, seed)
    if isinstance(config, FileTask):
        return FileTasks(config, seed)
    if isinstance(config, ImportTask):
        return import_task_source(config, seed)
    raise TypeError(f"no task source for {config!r}")


# ── the user's code ────────────────────────────────────────────────────────────────────────────────────────────────────


def import_task_source(config: ImportTask, seed: int) -> TaskSource:
    """`package.module:Name`, called as `Name(seed=seed, **params)`."""
    path = ImportPath(config.path, "rollouts.task.path", config.folder, config.params)
    source = path.make(path.find(), seed)
    check_methods(source, config.path)
    return cast(TaskSource, source)
