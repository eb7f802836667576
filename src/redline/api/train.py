"""`redline.train`: `redline train` as a function."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redline.config import load_recipe, make_config
from redline.errors import ConfigError
from redline.launch import start
from redline.launch.checked_run import CheckedRun
from redline.launch.ranks import num_ranks
from redline.runs import Run

Recipe = str | os.PathLike[str] | Mapping[str, Any]


def train(recipe: Recipe, overrides: Mapping[str, Any] | None = None, *, resume: bool = False) -> Run:
    """Train a model as a recipe says, and return the recorded run. Blocks until the last step; progress goes to stderr.

        run = redline.train("recipes/demo.yaml", {"run.steps": 20, "trainer.learning_rate": 1e-5})

    `recipe` is the path of a YAML file, or a mapping of its sections. `overrides` replaces values of it under the dotted names
    that the command line, `config.json` and the documentation use. With `resume`, `recipe` is a run folder, or the recipe whose
    newest run goes on.

    Raises `RedlineError` for a mistake of the caller, before there is a run folder where that is possible. Ctrl-C ends the
    step in flight, writes a checkpoint and then raises `KeyboardInterrupt`; a second one raises it at once. Either way the run
    can go on with `resume`.
    """
    began_ns, began_in = time.perf_counter_ns(), Path.cwd()  # the code of a task may change the working folder
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "redline.train was called in a thread; Ctrl-C and the ledger need the main one",
            "call it in the main thread, or start `redline train` as a process",
        )
    if num_ranks() > 1:
        raise ConfigError(
            f"redline.train runs in one process, and {num_ranks()} were started",
            "start them with the command: torchrun --nproc-per-node N -m redline train RECIPE",
        )
    with _outside_event_loop():
        summary = start.train(_checked(recipe, {} if overrides is None else overrides, resume), began_ns=began_ns)
    if not summary["finished"]:
        raise KeyboardInterrupt(f"stopped after step {summary['steps']}; continue with resume=True: {summary['run']}")
    return Run.open(began_in / summary["run"])


@contextmanager
def _outside_event_loop() -> Iterator[None]:
    """Hide the event loop that calls us, as a notebook's does. It stands still until we return, and is none of the run's: spans
    would go to lanes of its task, and a reward could not run a loop of its own."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


def _checked(recipe: Recipe, overrides: Mapping[str, Any], resume: bool) -> CheckedRun:
    if not isinstance(recipe, str | os.PathLike | Mapping):
        raise ConfigError(f"{recipe!r} is no recipe", "give the path of a YAML file, or a mapping of its sections")
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"overrides are {type(overrides).__name__}, not a mapping", 'give a mapping such as {"run.steps": 20}'
        )
    given = [_override(key, value) for key, value in overrides.items()]
    if isinstance(recipe, Mapping):
        if resume:
            raise ConfigError("a mapping is no run to continue", "give the run folder, such as runs/demo-001")
        return start.new_run(make_config(recipe, given))
    path = Path(recipe).expanduser()
    if resume:
        return start.continued_run(path, given, lambda text: print(text, file=sys.stderr))
    if (path / "config.json").is_file():
        new = f'redline.train("{path / "config.json"}") starts a new run like it'
        raise ConfigError(f"{path}: a run folder, not a recipe", f"to continue the run, pass resume=True; {new}")
    return start.new_run(load_recipe(path, given))


def _override(key: str, value: Any) -> str:
    """Write a value as the command line would, so that it is read and checked the same way: JSON is YAML."""
    if "." not in str(key) and isinstance(value, Mapping) and value:
        name, inner = next(iter(value.items()))
        raise ConfigError(f"overrides: {key!r} is a section", f"overrides are dotted: {{'{key}.{name}': {inner!r}}}")
    try:
        return f"{key}={json.dumps(value, ensure_ascii=False, default=os.fspath)}"
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"override {key}: {type(value).__name__} is no value of a recipe", "give text, a number, a list or a mapping"
        ) from error
