"""Tasks that the model cannot be asked: their prompts are too long, or its chat template refuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redline.errors import TaskError
from redline.launch.preflight import LoadedTasks
from redline.rollouts import RolloutSetup
from redline.rollouts.prompts import Prompts
from redline.rollouts.tasks.files import FileTasks
from redline.telemetry import span
from redline.types import Failure, SamplingParams, Task

Tell = Callable[[str], None]
AT_ONCE = 1024
"""Tasks whose prompts are encoded together, and are in memory at once."""


def without_bad_prompts(tasks: LoadedTasks, setup: RolloutSetup, tell: Tell) -> list[Task]:
    """Leave rows of a file whose prompts the model cannot take out of it, and return the held-out tasks that can be asked. Any
    other source is asked for its training tasks as they come: looking at all of them beforehand would take as long as the
    run."""
    if not isinstance(tasks.source, FileTasks):
        return askable(tasks, tasks.held_out, setup, tell)
    prompts = _prompts(setup)
    with span("rollouts.setup"):
        left_out = tasks.source.leave_out(prompts.refusal)
    if left_out:
        tell(f"left out of {tasks.source.path}: {_named(left_out)}")
    refused = {task.id for task, _ in left_out}
    return askable(tasks, [task for task in tasks.held_out if task.id not in refused], setup, tell)


def askable(tasks: LoadedTasks, held_out: Sequence[Task], setup: RolloutSetup, tell: Tell) -> list[Task]:
    """Those of the held-out tasks that can be asked, whatever their source. A task without messages stays: what is asked is
    known when its environment plays. Raises `TaskError` where none is left."""
    with span("rollouts.setup"):
        failures = _failures(held_out, setup, samples=1 if tasks.environment else setup.config.evaluation.samples_per_task)
    asked = list(zip(held_out, failures, strict=True))
    left_out = [(task, failure) for task, failure in asked if failure is not None]
    if not left_out:
        return list(held_out)
    if len(left_out) == len(held_out):
        if tasks.environment is not None:  # it may ask something else than the messages of its tasks
            return list(held_out)
        _, first = left_out[0]
        raise TaskError(f"none of {len(held_out)} held-out tasks can be asked: {_named(left_out)}", first.hint)
    tell(f"left out of {len(held_out)} held-out tasks: {_named(left_out)}")
    return [task for task, failure in asked if failure is None]


def _failures(tasks: Sequence[Task], setup: RolloutSetup, samples: int) -> list[Failure | None]:
    """Why no attempt at a task can be made; None where one can, or where nobody knows yet."""
    prompts = _prompts(setup)
    sampling = SamplingParams(max_tokens=setup.config.max_new_tokens, n=samples)
    found: list[Failure | None] = [None] * len(tasks)
    places = [place for place, task in enumerate(tasks) if task.messages]
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        for place, request in zip(some, prompts.requests([(tasks[place], sampling) for place in some]), strict=True):
            found[place] = request if isinstance(request, Failure) else None
    return found


def _prompts(setup: RolloutSetup) -> Prompts:
    return Prompts(setup.chat, setup.config, setup.max_prompt_tokens, setup.check_request)


def _named(left_out: Sequence[tuple[Task, Failure]]) -> str:
    """The first of them with its reason, and how many more there are."""
    task, failure = left_out[0]
    more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return f"{task.id} ({failure.reason}){more}"
