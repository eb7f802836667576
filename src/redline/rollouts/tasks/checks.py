"""What a task source of the user's own gives, looked at before anything relies on it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from redline.errors import RedlineError, TaskError, boundary
from redline.ports import TaskSource
from redline.telemetry.stalls.calls import calling
from redline.types import Task

CALLS: Mapping[str, tuple[Any, ...]] = {"train": (0,), "held_out": (1,), "score": (None, "")}
"""Method → arguments of the kind that it is called with."""
AS_CALLED = "train(index), held_out(count) and score(task, text)"
A_TASK = 'return redline.types.Task(id="sum-1", messages=[{"role": "user", "content": "1 + 1?"}], answer="2")'


def check_methods(source: Any, name: str) -> None:
    """Raise `TaskError` where a method is missing or takes other arguments than it is called with."""
    missing = [method for method in CALLS if not callable(getattr(source, method, None))]
    if missing:
        raise TaskError(
            f"{name} gives a {type(source).__name__} without {', '.join(missing)}",
            f"a task source has the methods {AS_CALLED}; see redline.ports.TaskSource",
        )
    for method, arguments in CALLS.items():
        try:
            signature = inspect.signature(getattr(source, method))
        except (TypeError, ValueError):  # written in C: only the call will tell
            continue
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise TaskError(
                f"{name}: {type(source).__name__}.{method}{signature} cannot be called: {error}", f"it is called as {AS_CALLED}"
            ) from error


def training_task(source: TaskSource, index: int, *, bare: bool = False) -> Task:
    """Training task `index`; raises `TaskError` where the source gives none that can be used. `bare` as for `check_task`."""
    call = f"train({index})"
    with boundary() as caught:
        task = source.train(index)
    _raise(caught.error, call)
    return check_task(task, call, bare=bare)


def held_out_tasks(source: TaskSource, count: int, *, bare: bool = False) -> list[Task]:
    """At most `count` held-out tasks; raises `TaskError` where the source gives something else. `bare` as for `check_task`."""
    call = f"held_out({count})"
    with boundary() as caught, calling("held_out"):
        found = source.held_out(count)
        tasks = None if isinstance(found, str | Mapping) else list(found)
    _raise(caught.error, call)
    if tasks is None:
        raise TaskError(f"rollouts.task: {call} gave a {type(found).__name__}, not a list of tasks", "return a list of tasks")
    return [check_task(task, f"{call}[{index}]", bare=bare) for index, task in enumerate(tasks[:count])]


def check_task(task: Any, call: str, *, bare: bool = False) -> Task:
    """The task itself. `call` says where it came from, for the one who has to change that. A `bare` task may be without
    messages: an environment makes what is asked."""
    for wrong in _objections(task, bare):
        raise TaskError(f"rollouts.task: {call} {wrong}", A_TASK)
    return task


def _objections(task: Any, bare: bool) -> Sequence[str]:
    if not isinstance(task, Task):
        return [f"gave a {type(task).__name__}, not a Task"]
    kinds: dict[str, tuple[Any, type]] = {"id": (task.id, str), "answer": (task.answer, str), "data": (task.data, Mapping)}
    wrong = [
        f"gave a Task whose {name} is {value!r}, a {type(value).__name__}, not a {kind.__name__.lower()}"
        for name, (value, kind) in kinds.items()
        if not isinstance(value, kind)
    ]
    messages: Any = task.messages
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        wrong.append(f"gave a Task whose messages are a {type(messages).__name__}, not a list of messages")
    elif not messages and not bare:
        wrong.append("gave a Task without messages")
    elif not all(map(_is_message, messages)):
        odd = next(message for message in messages if not _is_message(message))
        wrong.append(f"gave a Task with the message {str(odd)[:60]!r}, which is no mapping of role and content to texts")
    return wrong


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _raise(error: Exception | None, call: str) -> None:
    if error is None:
        return
    if isinstance(error, RedlineError):
        raise error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raise TaskError(
        f"rollouts.task: {call} raised {type(error).__name__}: {error}",
        f"look at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}",
    ) from error
