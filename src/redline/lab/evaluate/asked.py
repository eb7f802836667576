"""What `redline eval MODEL TASK… KEY=VALUE…` asks: a recipe for each task. Loads no torch.

TASK                         the recipe
none                         that of the run which trained the model
a recipe, a run folder       itself, with MODEL in place of its model
a file or folder of rows     {kind: file}; every row is a question, of a folder with several splits those of `test`
an environment's name        as `redline env list` has it
any other name               {kind: reasoning_gym}

Of the last three, prompts and lengths are those of the run which trained the model, where one did.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.config import Config, make_config, recipe_values, resolve
from redline.config.paths import is_run_folder
from redline.config.sections.rollouts import EvaluationConfig
from redline.config.sections.tasks import FileTask, TaskConfig
from redline.environments.registry import ENVIRONMENTS
from redline.errors import ConfigError
from redline.lab.evaluate.policy import Policy
from redline.rollouts.tasks.splits import LEFT_OUT, SUFFIXES, find_splits

RECIPES = (".yaml", ".yml")
OF_ITS_TASKS = ("task", "environment", "evaluation", "reward_weights", "reward_model", "reward_run_in", "max_reward_workers")
"""Keys of `rollouts` that belong to the tasks of a run, and are not for others."""
ENGINES = ("native", "transformers")
"""Kinds of engine that sample from weights which are loaded here."""
DIVIDED = ("sharding", "replicate", "sequence_parallel_size", "pipeline_parallel_size")
"""Keys of `trainer` that need several processes."""
ALL_ROWS = 1_000_000
"""Most questions of a file."""
WHEN = ("every", "stop_at")
"""Keys of `rollouts.evaluation` that say when a run evaluates, and not how."""
HOW = [key for key in EvaluationConfig.model_fields if key not in WHEN]
"""Those that may be given without their section."""
_WORD = re.compile(r"[A-Za-z_][\w.]*=")
_OF_TRAINING = {
    "model.path": "it is MODEL",
    "rollouts.temperature": "set temperature (rollouts.evaluation.temperature)",
    "rollouts.group_size": "set samples_per_task (rollouts.evaluation.samples_per_task)",
    "rollouts.groups_per_step": "set num_tasks (rollouts.evaluation.num_tasks)",
    **{f"rollouts.{key}": "leave it out" for key in ("advantages", "overlong_fraction", "max_extra_rounds")},
    **{f"rollouts.evaluation.{key}": "leave it out" for key in WHEN},
}
"""Keys that only training reads → what to do instead."""


@dataclass(slots=True, frozen=True)
class Asked:
    """The questions of one task."""

    name: str
    config: Config
    """A resolved recipe, of which nothing is trained."""
    notes: tuple[str, ...] = ()
    """What a person may want to know."""


def divide(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tasks and overrides of a command line."""
    overrides = [word for word in words if _WORD.match(word) and not os.path.exists(word)]
    return [word for word in words if word not in overrides], [_whole(override) for override in overrides]


def _whole(override: str) -> str:
    """A key without a section is one of `rollouts.evaluation`."""
    key, _, value = override.partition("=")
    name = f"rollouts.evaluation.{key}" if key in EvaluationConfig.model_fields else key
    if "." not in name:
        near = difflib.get_close_matches(key, HOW, n=1)
        known = f"did you mean {near[0]}?" if near else f"{', '.join(HOW)}, or SECTION.KEY of a recipe, such as run.seed=1"
        raise ConfigError(f"{override}: no such key", known)
    if name.partition(".")[0] in ("buffer", "trainer", "placement", "telemetry") or name in _OF_TRAINING:
        raise ConfigError(f"{override}: without effect, since nothing is trained", _OF_TRAINING.get(name, "leave it out"))
    return f"{name}={value}"


def asked_of(policy: Policy, tasks: Sequence[str], overrides: Sequence[str], trained: Policy) -> list[Asked]:
    """Return a recipe for each task, to be put to `policy`. `trained` is the model whose run says how to ask: the same for both
    sides of a comparison. Raises `ConfigError` for whatever cannot be asked."""
    if not tasks and trained.run is None:
        raise ConfigError(
            f"{trained.name} is no run, and no task is named",
            f"name a recipe, a file of questions, or a task: redline eval {trained.name} recipes/demo.yaml",
        )
    return [_asked(policy, task, overrides, trained) for task in tasks or [str(trained.run.shown if trained.run else "")]]


def _asked(policy: Policy, task: str, overrides: Sequence[str], trained: Policy) -> Asked:
    base = trained.run_values()
    values = _recipe(task, base)
    engine, notes = _engine(values.get("engine") or {})
    recipe = {
        "run": values.get("run") or {},
        "model": {"path": policy.path, "dtype": (base.get("model") or {}).get("dtype") or "auto"},
        "rollouts": values["rollouts"] | {"evaluation": _how(values["rollouts"].get("evaluation"))},
        "trainer": {key: value for key, value in (values.get("trainer") or {}).items() if key not in DIVIDED},
        "engine": engine,
    }
    config = make_config(recipe, overrides, task)
    if config.engine.kind not in ENGINES:
        raise ConfigError(f"engine.kind = {config.engine.kind}: not for redline eval", "leave engine.kind out")
    if not config.rollouts.evaluation.num_tasks:
        raise ConfigError(f"{task}: rollouts.evaluation.num_tasks = 0 asks nothing", "add num_tasks=64")
    _refuse_trained_rows(config.rollouts.task, (base.get("rollouts") or {}).get("task") or {}, trained)
    resolved = resolve(config)
    return Asked(task, resolved.config, (*notes, *resolved.warnings))


def _how(evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (evaluation or {}).items() if key not in WHEN}


def _engine(engine: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The engine section for one process of ours."""
    kind = engine.get("kind", "native")
    if kind not in ENGINES:
        return {}, [f"engine.kind = {kind} in the recipe; evaluated with redline's own engine"]
    return {key: value for key, value in engine.items() if key != "tensor_parallel_size"}, []


def _recipe(task: str, base: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the recipe of a task says, section by section. `base` is that of the run which trained the model."""
    path = Path(task).expanduser()
    if is_run_folder(path):
        return recipe_values(path / "config.json")
    if path.suffix in RECIPES or path.name == "config.json":
        return recipe_values(path)
    rollouts = {key: value for key, value in (base.get("rollouts") or {}).items() if key not in OF_ITS_TASKS}
    if os.path.exists(path) or path.suffix in SUFFIXES or "/" in task:
        rows = {"kind": "file", "path": str(path), "split": _split(path), "held_out_fraction": 1}
        return {**base, "rollouts": rollouts | {"task": rows, "evaluation": {"num_tasks": ALL_ROWS}}}
    if task in ENVIRONMENTS:
        return {**base, "rollouts": rollouts | {"environment": {"name": task}}}
    return {**base, "rollouts": rollouts | {"task": {"kind": "reasoning_gym", "dataset": task}}}


# ── a file of questions ────────────────────────────────────────────────────────────────────────────────────────────────


def _split(path: Path) -> str | None:
    """The split to ask where there are several; None where there is nothing to choose."""
    return "test" if os.path.isdir(path) and len(find_splits(path).keys() - {LEFT_OUT}) > 1 else None


def _refuse_trained_rows(asked: TaskConfig, trained_on: Mapping[str, Any], trained: Policy) -> None:
    """Raise `ConfigError` where every row of a file would be asked, of a model that was trained on most of them."""
    if not isinstance(asked, FileTask) or asked.held_out_fraction < 1 or asked.held_out_split is not None:
        return
    path = Path(trained_on.get("path", "")).resolve()
    is_same = trained_on.get("kind") == "file" and asked.path.resolve() == path
    if is_same and (asked.split or "train") == (trained_on.get("split") or "train"):
        raise ConfigError(
            f"{asked.path}: {trained.name} was trained on its rows",
            f"leave it out, which asks those that were held out: redline eval {trained.name}",
        )
