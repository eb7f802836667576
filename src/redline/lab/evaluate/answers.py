"""Attempts of a model at the questions of a task, made as the evaluations of a run make them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from redline.config import Config
from redline.engine import EngineSession
from redline.errors import ConfigError, TaskError
from redline.lab.evaluate.asked import Asked
from redline.lab.evaluate.policy import Policy
from redline.launch.build import make_rollout_setup
from redline.launch.checkpointed import load_checkpointed
from redline.launch.engines import engine_of, tell_what_is_missing
from redline.launch.left_out import askable
from redline.launch.models import LoadedModel, load_policy
from redline.launch.preflight import LoadedTasks, check_inputs
from redline.launch.process import prepare_process
from redline.models.lora.trainable import has_adapter
from redline.rollouts import Dispatcher
from redline.telemetry.summary.failed_attempts import WORTH_SAYING
from redline.types import Task, Trajectory
from redline.watch.evaluation import evaluation_row, failures_of

Tell = Callable[[str], None]
SAYS_EVERY_S = 15.0


@dataclass(slots=True, frozen=True)
class Answers:
    """What a model made of the questions of a task."""

    task: str
    """As it was named."""
    model: str
    config: Config
    tasks: Sequence[Task]
    attempts: Sequence[Sequence[Trajectory]]
    """At each task."""
    row: dict[str, Any]
    """As `evaluations.jsonl` has it."""
    left_out: int
    """Questions that the model cannot be asked, since their prompts are too long or its template refuses them."""


class Answering:
    """A model that is asked several tasks, and loaded once for all that want it in one way."""

    def __init__(self, policy: Policy, tell: Tell) -> None:
        self._policy, self._tell = policy, tell
        self._model: LoadedModel | None = None
        self._loaded_as: tuple[str, str, int] | None = None

    def answer(self, asked: Asked) -> Answers:
        """Ask every question. Blocks until all attempts are scored; raises `RedlineError` where nothing can be asked, or every
        attempt fails."""
        config = asked.config
        checked = check_inputs(config, trains=False)
        if not checked.tasks.held_out:
            raise TaskError(f"{asked.name}: it has no held-out tasks", "name a task that has some; see docs/evaluate.md")
        for note in (*asked.notes, *checked.notes):
            self._tell(f"{asked.name}: {note}")
        prepare_process(config)
        model, started = self._load(config), time.perf_counter()
        with (
            _asking(asked, model, checked.tasks, self._tell) as (rollouts, tasks),
            _telling(asked.name, len(tasks), rollouts, self._tell),
        ):
            attempts = rollouts.evaluate(tasks)
        row = evaluation_row(tasks, attempts, time.perf_counter() - started, config.rollouts.answer_prefix)
        self._say_failures(asked.name, attempts)
        left_out = len(checked.tasks.held_out) - len(tasks)
        return Answers(asked.name, self._policy.name, config, tasks, attempts, row, left_out)

    def _say_failures(self, task: str, attempts: Sequence[Sequence[Trajectory]]) -> None:
        failed = failures_of(attempts)
        if failed.all_failed:
            raise failed.stop("the evaluation")
        if failed.share > WORTH_SAYING:
            self._tell(f"{task}: {failed.sentence()}")

    def _load(self, config: Config) -> LoadedModel:
        wanted = config.run.device, config.model.dtype, config.run.seed
        if self._model is None or wanted != self._loaded_as:
            self._model = None  # its memory first
            self._tell(f"loading {self._policy.name}")
            self._model, self._loaded_as = self._loaded(config), wanted
        return self._model

    def _loaded(self, config: Config) -> LoadedModel:
        policy = self._policy
        if policy.checkpoint is None:
            return load_policy(config)
        assert policy.run is not None, "a checkpoint lies in a run"
        model = load_checkpointed(policy.run, policy.checkpoint, config.run.device, config.model.dtype).model
        if config.engine.kind != "native" and has_adapter(model.decoder):
            why = f"engine.kind = {config.engine.kind}: it would leave out the adapter of {policy.name}"
            raise ConfigError(why, "leave engine.kind out, or evaluate the folder that `redline export` makes of it")
        return model


@contextmanager
def _asking(asked: Asked, model: LoadedModel, tasks: LoadedTasks, tell: Tell) -> Iterator[tuple[Dispatcher, list[Task]]]:
    """Rollouts in lockstep without a trainer, and the tasks that can be asked. Gives the engine's memory back at the end."""
    engine = engine_of(model, asked.config.engine)
    tell_what_is_missing(model.decoder, tell)
    try:
        setup = make_rollout_setup(asked.config, model, engine, tasks)
        rollouts = Dispatcher(EngineSession(engine, wait_for_device=_wait), setup)
        try:
            yield rollouts, askable(tasks, tasks.held_out, setup, lambda text: tell(f"{asked.name}: {text}"))
        finally:
            rollouts.close()
    finally:
        del engine
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@contextmanager
def _telling(name: str, total: int, rollouts: Dispatcher, tell: Tell) -> Iterator[None]:
    """Inside, say now and then how far it is."""
    over, began = threading.Event(), time.perf_counter()

    def say() -> None:
        while not over.wait(SAYS_EVERY_S):
            left = rollouts.num_sampling_here
            how_far = f"{total} questions under way" if left is None else f"{total - left} of {total} questions answered"
            tell(f"{name}: {how_far} after {time.perf_counter() - began:.0f} s")

    thread = threading.Thread(target=say, name="evaluation progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
