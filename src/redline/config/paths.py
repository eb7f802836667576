"""Paths of a recipe: relative to the folder in which redline is called, absolute in the config that a run keeps."""

from __future__ import annotations

from pathlib import Path

from redline.config.schema import Config
from redline.config.sections.tasks import ImportTask, JsonlTask, TaskConfig


def with_absolute_paths(config: Config) -> Config:
    """The config with every path of this machine spelled from the root, so that the run can be resumed from any folder. Names
    of built-in models and of models on the hub stay as they are."""
    rollouts = config.rollouts
    judge = rollouts.reward_model
    if judge.path is not None:
        judge = judge.model_copy(update={"path": _model(judge.path)})
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": config.run.folder.absolute()}),
            "model": config.model.model_copy(update={"path": _model(config.model.path)}),
            "rollouts": rollouts.model_copy(update={"task": _task(rollouts.task), "reward_model": judge}),
        }
    )


def _model(path: str) -> str:
    local = Path(path).expanduser()
    return str(local.absolute()) if not path.startswith("builtin:") and local.exists() else path


def _task(task: TaskConfig) -> TaskConfig:
    if isinstance(task, JsonlTask):
        return task.model_copy(update={"path": task.path.absolute()})
    if isinstance(task, ImportTask):
        return task.model_copy(update={"folder": (task.folder or Path()).absolute()})
    return task
