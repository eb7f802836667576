"""Everything that can be found wrong with a run before its weights are loaded. `--dry-run` is this; `train` does it before
there is a run folder.

    torch ──► placement ──► folders ──► tasks ──► the model's files ──► prompts ──► the reward model's files

What is cheap comes first. What the recipe alone tells (`config/`) is checked before, without torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from redline.config import Config
from redline.environments.stepped import Stepped
from redline.environments.workers.plain import to_plain
from redline.errors import ConfigError, RedlineError, TaskError, boundary
from redline.launch.environments import make_environment, scored_elsewhere, task_source, worker_scale
from redline.launch.placement import Placement, check_device, place
from redline.launch.ranks import check_gpus_for_ranks, check_model_for_ranks
from redline.launch.workers.ray_cluster import check_address, check_ray
from redline.ports import Environment, TaskSource
from redline.rollouts import Chat
from redline.rollouts.history import history_notes
from redline.rollouts.prompts import Prompts, prompt_limit
from redline.rollouts.rewards.parts import max_reward_workers
from redline.rollouts.tasks.alike import digest, question
from redline.rollouts.tasks.checks import held_out_tasks, training_task
from redline.rollouts.tasks.files import FileTasks
from redline.rollouts.user_code.jobs import UserFunction
from redline.rollouts.user_code.limited_calls import UserCalls
from redline.telemetry import span
from redline.telemetry.stalls.slow_calls import saying_what_hangs
from redline.types import Failure, Task

NUM_LOOKED_AT = 16
"""Training tasks, and as many held-out ones, that are compared and whose prompts are made."""

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(slots=True, frozen=True)
class LoadedTasks:
    """The recipe's task source, and what is asked of it once."""

    source: TaskSource
    num_workers: int
    """Threads that may score at once."""
    held_out: list[Task]
    environment: Environment | None = None
    """What attempts are played in; None where each is one reply, which the source scores."""
    scored: TaskSource | None = None
    """The source, with a `score` in worker processes; None where the source scores in this process."""


@dataclass(slots=True, frozen=True)
class Checked:
    """A recipe in which nothing is wrong, as far as can be known without weights."""

    placement: Placement
    tasks: LoadedTasks
    notes: tuple[str, ...]
    """What was found that a person may want to know."""


def check(config: Config, run: Path | None = None) -> Checked:
    """Check a resolved recipe. `run` is the folder of a run that goes on. Raises `RedlineError` for whatever would end the run
    later. Imports torch and transformers, and fetches the small files of a model from the hub."""
    _check_torch()
    if config.placement.cluster == "ray":
        check_ray()
        check_address(config.placement)
    check_writable(config.run.folder, "run.folder") if run is None else check_writable(run, "the run folder")
    return _check_inputs(config, place(config))  # which imports torch


def check_inputs(config: Config, *, trains: bool = True) -> Checked:
    """Check a resolved recipe that leaves no run folder; where nothing `trains`, its held-out tasks alone. Otherwise as
    `check`."""
    return _check_inputs(config, place(config), trains=trains)


def _check_inputs(config: Config, placement: Placement, *, trains: bool = True) -> Checked:
    from redline.launch.kinds import check_kind  # imports torch: what is wrong with the recipe and its folder is said before

    check_kind(config)
    notes: list[str] = []
    with saying_what_hangs():
        tasks = load_tasks(config)
    if isinstance(tasks.source, FileTasks):
        notes += tasks.source.notes
    if config.rollouts.evaluation.num_tasks and not tasks.held_out:
        notes.append("the task source has no held-out tasks; nothing will be evaluated")
    with span("rollouts.setup"), saying_what_hangs():
        first = _first_tasks(config, tasks.source, notes) if trains else []
    held_out = tasks.held_out[:NUM_LOOKED_AT]
    _check_that_they_travel(config, tasks, [*first, *held_out])
    _compare_with_held_out(first, held_out, notes, plays=tasks.environment is not None)
    with span("models.load"):
        check_device(config.run.device)
        check_gpus_for_ranks(config)
        # An environment's tasks may be without messages: what it asks is then known when it plays.
        asked = [task for task in [*first, *held_out] if task.messages]
        _check_model(config, asked, notes)
        _check_reward_model(config)
    return Checked(placement, tasks, tuple(notes))


def _first_tasks(config: Config, source: TaskSource, notes: list[str]) -> list[Task]:
    """Training tasks, each within the time that the run would give it."""
    calls = UserCalls(UserFunction("task", "train", config.rollouts.task_timeout_s, "rollouts.task_timeout_s"))
    bare = config.rollouts.environment.name is not None
    outcomes = calls.results([partial(training_task, source, index, bare=bare) for index in range(NUM_LOOKED_AT)])
    calls.close()
    calls.join(1.0)
    return _those_that_can(outcomes, _unless_failed, "training tasks cannot be made", notes)


def _check_that_they_travel(config: Config, loaded: LoadedTasks, tasks: Sequence[Task]) -> None:
    """Raise TaskError for a task that worker processes, where there are some, would not get as it is."""
    if loaded.scored is not None:
        key = "rollouts.reward_run_in"
    elif isinstance(loaded.environment, Stepped) and config.rollouts.environment.run_in == "processes":
        key = "rollouts.environment.run_in"
    else:
        return
    for task in tasks:
        try:
            to_plain(task)
        except TaskError as error:
            raise TaskError(f"{key} = processes: task {task.id!r}: {error.message}", error.hint) from None


def _compare_with_held_out(training: Sequence[Task], held_out: Sequence[Task], notes: list[str], *, plays: bool) -> None:
    """Note how many held-out tasks ask what a training task asks. No error: some evaluate what they train on."""
    # An environment may ask something else than the messages of its tasks, which its data then tell.
    ask = question if plays else (lambda task: digest(task.messages))
    known = {ask(task) for task in training}
    if both := sum(ask(task) in known for task in held_out):
        notes.append(
            f"{both} of {len(held_out)} held-out tasks that were looked at are training tasks as well: their score says nothing"
            " about new questions; let held_out(count) give tasks that train(index) never gives"
        )


def _unless_failed(outcome: Task | Failure) -> Task:
    if isinstance(outcome, Failure):
        raise TaskError(outcome.reason, outcome.hint)
    return outcome


def load_tasks(config: Config) -> LoadedTasks:
    """Load the environment, where there is one, and the task source, and ask it for the held-out tasks. Needs neither a model
    nor a run folder."""
    wanted = config.rollouts.evaluation.num_tasks
    with span("rollouts.setup"):
        wants_environment = config.rollouts.environment.name is not None
        environment = _environment(config) if wants_environment else None
        source = task_source(config, environment)
        held_out = held_out_tasks(source, wanted, bare=wants_environment) if wanted else []
        scored = scored_elsewhere(config, source) if config.rollouts.reward_run_in == "processes" else None
        num_workers = max_reward_workers(config.rollouts.max_reward_workers, scored or source)
        return LoadedTasks(source, num_workers, held_out, environment, scored)


def _environment(config: Config) -> Environment:
    return make_environment(config.rollouts.environment, config.run.seed, worker_scale(config.rollouts))


# ── the process it runs in ─────────────────────────────────────────────────────────────────────────────────────────────


def _check_torch() -> None:
    """Refuse what a caller from Python may have set, and a run cannot undo for itself: what is made in inference mode has no
    gradients afterwards, and the default dtype is that of every thread."""
    if "torch" not in sys.modules:  # then nobody has set anything, and what follows may be refused without its seconds
        return
    import torch

    if torch.is_inference_mode_enabled():
        raise ConfigError("training needs gradients, and torch is in inference mode", "train outside torch.inference_mode()")
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"torch's default dtype is {torch.get_default_dtype()}; a run computes with float32 as the default",
            "call torch.set_default_dtype(torch.float32) first; model.dtype is the dtype of the model",
        )


# ── where it writes ────────────────────────────────────────────────────────────────────────────────────────────────────


def check_writable(folder: Path, key: str) -> None:
    """Raise `ConfigError`, in the name of a key or an option, unless files can be made in a folder that is there or can be
    made. Leaves nothing behind."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"{key} = {str(folder)!r}: {there} is a file, not a folder", "give another folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(folder)!r}: nothing can be written to {there}: {error.strerror}",
            "give a folder on a disk that you may write to, such as /tmp/runs",
        ) from error


# ── what it is asked, and whom ─────────────────────────────────────────────────────────────────────────────────────────


def _check_model(config: Config, tasks: Sequence[Task], notes: list[str]) -> None:
    import torch

    from redline.launch.engines import check_quantization
    from redline.models.files.hf import check_folder, load_config, load_tokenizer, stop_token_ids
    from redline.models.files.sources import is_on_hub, small_files
    from redline.models.layers.routes import routing_shape
    from redline.models.spec import is_ours, spec_from_config

    path = config.model.path
    folder = small_files(path, config.run.seed)
    device, dtype = torch.device(config.run.device), getattr(torch, config.model.dtype)
    if folder is None:
        check_quantization(config.engine, None, device, dtype)
        notes.append(f"{path} is converted when it is first used; its prompts were not looked at")
        return
    positions = check_folder(folder, with_weights=not is_on_hub(path))
    if config.engine.record_routing:
        described = load_config(folder)
        routing_shape(spec_from_config(described) if is_ours(described) else None)
    check_quantization(config.engine, folder, device, dtype)
    check_model_for_ranks(config, folder)
    rollouts, tokenizer = config.rollouts, load_tokenizer(folder)
    stop_token_ids(folder, tokenizer)
    chat = Chat(tokenizer, rollouts.system_prompt, rollouts.prompt_suffix, rollouts.answer_prefix)
    if rollouts.environment.name is not None and rollouts.environment.keep_replies:
        notes += history_notes(chat)
    longest = min(config.engine.max_model_len or positions, positions)
    prompts = Prompts(chat, config.rollouts, prompt_limit(config.rollouts, longest))
    if not tasks:
        return
    try:
        rendered = _those_that_can(tasks, lambda task: _prompt(prompts, task), "prompts cannot be used", notes)
        _check_that_they_differ(tasks, rendered)
    except TaskError as error:
        if rollouts.environment.name is None:
            raise
        # It may ask something else than the messages of its tasks, so that this is no reason to refuse the run.
        notes.append(f"none of {len(tasks)} tasks can be asked as its messages are: {error.message}; {error.hint}")
        return
    lengths = [len(prompt) for prompt in rendered]
    if rollouts.environment.name is None:  # one may ask for fewer tokens
        _check_cache(config, folder, max(lengths))
    notes.append(f"{len(lengths)} prompts looked at: {min(lengths)} to {max(lengths)} tokens, of {longest} with the answer")


def _check_cache(config: Config, folder: Path, prompt: int) -> None:
    """Raise `EngineError` where a KV cache of the size that the recipe gives does not hold an answer to such a prompt."""
    engine = config.engine
    if engine.kind != "native" or not engine.kv_cache_memory_bytes:
        return
    import torch

    from redline.engine.native.admission import check_room
    from redline.engine.native.cache.sizing import block_size_for, num_blocks_for
    from redline.models.files.hf import load_config
    from redline.models.layers.routes import routing_shape
    from redline.models.parallel import shard_spec
    from redline.models.spec import is_ours, spec_from_config

    if not is_ours(described := load_config(folder)):
        return
    spec, device = spec_from_config(described), torch.device(config.run.device)
    size, longest = block_size_for(engine, device), min(engine.max_model_len or spec.max_positions, spec.max_positions)
    routing, dtype = routing_shape(spec) if engine.record_routing else None, getattr(torch, config.model.dtype)
    own = shard_spec(spec, engine.tensor_parallel_size)
    blocks = num_blocks_for(engine, own, size, longest, device, dtype, routing)
    check_room(prompt, config.rollouts.max_new_tokens, (blocks - 1) * size)


def _check_that_they_differ(tasks: Sequence[Task], rendered: Sequence[np.ndarray]) -> None:
    """Raise TaskError where a template makes one prompt of all questions: the policy would not be told what is asked."""
    questions = {repr([message.get("content") for message in task.messages]) for task in tasks}
    can_all_be_asked, prompts = len(rendered) == len(tasks), {prompt.tobytes() for prompt in rendered}
    if len(questions) > 1 and can_all_be_asked and len(prompts) == 1:
        raise TaskError(
            f"{len(questions)} different questions become the same prompt: the model's chat template shows nothing of them",
            "look at chat_template in the model's folder, and at the roles of the messages",
        )


def _prompt(prompts: Prompts, task: Task) -> np.ndarray:
    made: list[np.ndarray] = []
    with boundary() as caught:
        made.append(prompts.tokens(task))
    if made:
        return made[0]
    if isinstance(caught.error, RedlineError):
        raise TaskError(f"task {task.id}: {caught.error.message}", caught.error.hint)
    raise TaskError(
        f"task {task.id}: the model's chat template refuses it: {caught.error}", "change the messages of the task"
    ) from caught.error


def _check_reward_model(config: Config) -> None:
    wanted = config.rollouts.reward_model.path
    if wanted is None:
        return
    from redline.models.files.sources import small_files
    from redline.rollouts.rewards.reward_model import check_classifier

    folder = small_files(wanted, config.run.seed)
    assert folder is not None, "a .gguf file is no reward model, and was refused with the recipe"
    check_classifier(folder)


def _those_that_can(given: Iterable[Given], make: Callable[[Given], Made], what: str, notes: list[str]) -> list[Made]:
    """What `make` makes of each. Some that fail will be failures of the run's record, and a note here; where all do, there is
    nothing to train on, and the first says why."""
    made: list[Made] = []
    errors: list[RedlineError] = []
    for one in given:
        try:
            made.append(make(one))
        except RedlineError as error:
            errors.append(error)
    if errors and not made:
        raise errors[0]
    if errors:
        notes.append(f"{len(errors)} of {len(made) + len(errors)} {what}: {errors[0].message}")
    return made
