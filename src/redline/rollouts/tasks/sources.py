"""Where tasks come from: a reasoning_gym data set, files, or a class of the user's."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, cast

from redline.config.sections.tasks import FileTask, ImportTask, ReasoningGymTask, TaskConfig
from redline.errors import RedlineError, TaskError, boundary
from redline.ports import TaskSource
from redline.rollouts.tasks.checks import check_methods
from redline.rollouts.tasks.files import FileTasks
from redline.rollouts.tasks.modules import FOLDER_IMPORTS
from redline.rollouts.tasks.reasoning_gym import ReasoningGymTasks


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
    factory = _import_object(config.path, (config.folder or Path()).absolute())
    with boundary() as caught:
        source = factory(seed=seed, **config.params)
    if isinstance(caught.error, RedlineError):
        raise caught.error
    if caught.error is not None:
        raise TaskError(
            f"{config.path} could not be made: {type(caught.error).__name__}: {caught.error}", _calling(config, factory, seed)
        ) from caught.error
    check_methods(source, config.path)
    return cast(TaskSource, source)


def _import_object(path: str, folder: Path) -> Any:
    module_name, _, names = path.partition(":")
    found: Any = _import_module(module_name, folder)
    for name in names.split("."):
        if not hasattr(found, name):
            public = [public for public in vars(found) if not public.startswith("_")]
            raise TaskError(
                f"rollouts.task.path = {path!r}: {module_name} ({_file_of(module_name)}) has no {name}",
                f"it has {', '.join(public) or 'no public names'}",
            )
        found = getattr(found, name)
    return found


def _import_module(name: str, folder: Path) -> Any:
    with boundary() as caught:
        module = FOLDER_IMPORTS.load(name, folder)
    if caught.error is None:
        return module
    if isinstance(caught.error, RedlineError):
        raise caught.error
    if isinstance(caught.error, ModuleNotFoundError) and f"{name}.".startswith(f"{caught.error.name}."):
        raise TaskError(
            f"rollouts.task.path: no module {caught.error.name!r}",
            f"start redline where {name.replace('.', '/')}.py is (it was looked for in {folder}), or install the package",
        ) from caught.error
    raise TaskError(
        f"rollouts.task.path: importing {name} raised {type(caught.error).__name__}: {caught.error}",
        f"`python -c 'import {name}'` must work in {folder}",
    ) from caught.error


def _file_of(module_name: str) -> str:
    return getattr(sys.modules[module_name], "__file__", None) or "built in"


def _calling(config: ImportTask, factory: Any, seed: int) -> str:
    given = "".join(f", {name}={value!r}" for name, value in config.params.items())
    call = f"it is called as {config.path.rpartition(':')[2]}(seed={seed}{given}) with rollouts.task.params"
    try:
        return f"{call}; it takes {inspect.signature(factory)}"
    except (TypeError, ValueError):
        return call
