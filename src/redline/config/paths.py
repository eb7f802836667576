"""Paths of a recipe: relative to the folder in which redline is called, absolute in the config that a run keeps."""

from __future__ import annotations

import os
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from redline.config.schema import Config
from redline.config.sections.environment import EnvironmentConfig
from redline.config.sections.tasks import FileTask, ImportTask, TaskConfig
from redline.config.trained_step import checkpoints_in, is_of_newest_checkpoint, step_of
from redline.errors import ConfigError

MOST_NAMES = 10_000
"""Names of a folder that are looked at for one that was meant."""


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
            "rollouts": rollouts.model_copy(
                update={
                    "task": _task(rollouts.task),
                    "environment": _environment(rollouts.environment),
                    "reward_model": judge,
                }
            ),
        }
    )


def is_run_folder(path: Path) -> bool:
    """Whether a run has made this folder. A model's folder has a config.json too, but its weights lie beside it. A text that is
    too long for a path is none: `Path.is_file` would raise."""
    has_both = os.path.isfile(path / "config.json") and os.path.isdir(path / "checkpoints")
    return has_both and not any(path.glob("*.safetensors"))


def named_alike(path: Path) -> str:
    """`did you mean …?` with what lies where this file or folder would and has almost its name; empty where nothing does."""
    try:
        names = [found.name for found in islice(path.parent.iterdir(), MOST_NAMES) if found.name != path.name]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"did you mean {path.parent / near[0]}?" if near else ""


def runs_beside(path: Path) -> list[str]:
    """The names of the run folders that lie where this one would."""
    found = path.parent.glob("*-[0-9][0-9][0-9]*") if os.path.isdir(path.parent) else ()
    return sorted(beside.name for beside in found if is_run_folder(beside))


def run_of_checkpoint(path: Path) -> Path | None:
    """The folder of the run that a checkpoint belongs to; None for any other path. Raises `ConfigError` for a checkpoint that
    the run does not have."""
    whole = Path(os.path.abspath(path))  # `.` and `../step-000004` too have a name
    folder, run = whole.parent, whole.parent.parent
    if folder.name != "checkpoints" or not is_run_folder(run):
        return None
    if whole not in (there := checkpoints_in(folder)):
        names = ", ".join(checkpoint.name for checkpoint in reversed(there)) or "none"
        raise ConfigError(f"{path}: the run has no such checkpoint", f"those that it has: {names}")
    says_it = len(path.parts) > 2 and ".." not in path.parts
    return path.parent.parent if says_it else run  # as it was called, where the name says so much


def is_adapter(path: Path) -> bool:
    """Whether a folder holds a LoRA adapter as PEFT writes it, without the model that it belongs to."""
    return os.path.isfile(path / "adapter_config.json") and not os.path.isfile(path / "config.json")


def model_of_run(run: Path) -> Path:
    """Return the folder of the model that a run has trained; where only its adapter is left, that one. Raises `ConfigError`,
    which names the newest checkpoint, where the run has not ended, or has gone on after its end."""
    model, adapter = run / "model", run / "adapter"
    if (model / "config.json").is_file() and is_of_newest_checkpoint(model):
        return model
    if is_adapter(adapter) and is_of_newest_checkpoint(adapter):
        return adapter
    checkpoints = checkpoints_in(run / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"{run}: the run has no model, and no checkpoint either", f"train it: redline train {run} --resume")
    newest, steps = checkpoints[0], step_of(checkpoints[0])
    raise ConfigError(
        f"{run}: the run has no model yet; its newest checkpoint is {newest.relative_to(run)}",
        f"make a model of it: redline export {run}; or finish the run: redline train {run} --resume, or end it there: redline"
        f" train {run} --resume run.steps={steps}",
    )


def _model(path: str) -> str:
    local = Path(path).expanduser()
    if is_run_folder(local):
        return str(model_of_run(local).absolute())
    return str(local.absolute()) if not path.startswith("builtin:") and os.path.exists(local) else path


def _environment(environment: EnvironmentConfig) -> EnvironmentConfig:
    if environment.name is None or ":" not in environment.name:
        return environment
    return environment.model_copy(update={"folder": (environment.folder or Path()).absolute()})


def _task(task: TaskConfig) -> TaskConfig:
    if isinstance(task, FileTask):
        return task.model_copy(update={"path": task.path.absolute()})
    if isinstance(task, ImportTask):
        return task.model_copy(update={"folder": (task.folder or Path()).absolute()})
    return task
