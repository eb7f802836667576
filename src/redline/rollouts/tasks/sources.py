"""Where tasks come from: a reasoning_gym data set, a JSONL file, or a class of the user's."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from redline.config.sections.tasks import ImportTask, JsonlTask, ReasoningGymTask, TaskConfig
from redline.errors import RedlineError, TaskError, boundary
from redline.ports import TaskSource
from redline.rollouts.rewards.parts import Extract, extract_answer
from redline.rollouts.tasks.checks import check_methods
from redline.rollouts.tasks.held_out import lowest_hashes, stable_hash
from redline.rollouts.tasks.modules import FOLDER_IMPORTS
from redline.rollouts.tasks.reasoning_gym import ReasoningGymTasks
from redline.types import Failure, Message, Task

CHECKED_ROWS = 10_000
"""Rows of a JSONL file whose prompts are rendered before a run begins."""


def make_task_source(config: TaskConfig, seed: int) -> TaskSource:
    """The source a recipe's `rollouts.task` asks for; every mistake in it is found here, before anything is loaded."""
    if isinstance(config, ReasoningGymTask):
        return ReasoningGymTasks(config, seed)
    if isinstance(config, JsonlTask):
        return JsonlTasks(config, seed)
    if isinstance(config, ImportTask):
        return import_task_source(config, seed)
    raise TypeError(f"no task source for {config!r}")


# ── a file ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class JsonlTasks:
    """The rows of a JSONL file; an answer is correct when it equals the row's."""

    def __init__(self, config: JsonlTask, seed: int) -> None:
        self.path = config.path
        self._extract: Extract = config.extract
        self._seed = seed
        tasks = list(_read_rows(config))
        if not tasks:
            raise TaskError(f"{config.path}: the file is empty", "write one JSON object per line")
        by_prompt: dict[str, list[Task]] = {}
        for task in tasks:
            by_prompt.setdefault(json.dumps(task.messages, sort_keys=True), []).append(task)
        held_out = lowest_hashes(by_prompt, config.held_out_fraction)
        if not held_out:
            raise TaskError(
                f"{config.path}: {len(tasks)} row(s) with the same prompt; training and evaluation need one each",
                "add rows with other prompts",
            )
        self._held_out = [by_prompt.pop(prompt)[0] for prompt in held_out]
        self._train = [task for rows in by_prompt.values() for task in rows]
        self._epoch = lru_cache(maxsize=2)(self._shuffled_rows)

    def leave_out(self, refusal: Callable[[Task], Failure | None]) -> list[tuple[Task, Failure]]:
        """Go on without the rows that `refusal` has something against. Returns them. Looks at `CHECKED_ROWS` rows at most,
        which takes seconds; rows after them come up as they are."""
        left_out: list[tuple[Task, Failure]] = []
        for task in [*self._held_out, *self._train][:CHECKED_ROWS]:
            if (failure := refusal(task)) is not None:
                left_out.append((task, failure))
        refused = {task.id for task, _ in left_out}
        self._held_out = [task for task in self._held_out if task.id not in refused]
        self._train = [task for task in self._train if task.id not in refused]
        if not self._train:
            task, failure = left_out[-1]
            raise TaskError(f"{self.path}: no row is left to train on: {task.id}: {failure.reason}", failure.hint)
        self._epoch.cache_clear()
        return left_out

    def train(self, index: int) -> Task:
        epoch, position = divmod(index, len(self._train))
        return self._train[self._epoch(epoch)[position]]

    def held_out(self, count: int) -> list[Task]:
        return self._held_out[:count]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        return {"correct": float(self._read_answer(text) == self._read_answer(task.answer))}

    def _read_answer(self, text: str) -> str | Decimal | None:
        """Numbers compare as numbers: 7 is 7.0."""
        answer = extract_answer(text, self._extract)
        return Decimal(answer) if answer is not None and self._extract == "last_number" else answer

    def _shuffled_rows(self, epoch: int) -> list[int]:
        """Every row once, in an order of this epoch's own that no library version can change."""
        return sorted(range(len(self._train)), key=lambda row: stable_hash(f"{self._seed}/{epoch}/{row}"))


def _read_rows(config: JsonlTask) -> Iterator[Task]:
    if not config.path.is_file():
        raise TaskError(f"{config.path}: no such file", "give rollouts.task.path a file with one JSON object per line")
    number = 0
    try:
        with config.path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _read_row(config, f"{config.path}:{number}", f"{config.path.stem}/{number}", line)
    except UnicodeDecodeError as error:
        raise TaskError(f"{config.path}:{number + 1}: not UTF-8 text: {error.reason}", "save the file as UTF-8") from error


def _read_row(config: JsonlTask, where: str, task_id: str, line: str) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not valid JSON: {error.msg} at column {error.colno}", "one JSON object per line") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a {type(row).__name__}, not an object", 'write {"prompt": ..., "answer": ...}')
    for key, name in ((config.prompt_field, "prompt_field"), (config.answer_field, "answer_field")):
        if key not in row:
            raise TaskError(
                f"{where}: no field {key!r}", f"add it, or set rollouts.task.{name} to one of: {', '.join(row) or 'none'}"
            )
    messages = _read_prompt(row[config.prompt_field], f"{where}: {config.prompt_field}")
    answer = _read_reference(row[config.answer_field], f"{where}: {config.answer_field}", config.extract)
    return Task(task_id, messages, answer, row)


def _read_prompt(prompt: Any, where: str) -> Sequence[Message]:
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        return prompt
    raise TaskError(
        f"{where}: neither a text nor a list of messages, or empty",
        'write "a question" or [{"role": "user", "content": "a question"}]',
    )


def _is_message(message: Any) -> bool:
    has_both = isinstance(message, dict) and message.keys() == {"role", "content"}
    return has_both and all(isinstance(text, str) for text in message.values())


def _read_reference(answer: Any, where: str, extract: Extract) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TaskError(f"{where}: a {type(answer).__name__}, not a text or a number", 'write "answer": "42" or "answer": 42')
    if extract_answer(str(answer), extract) is None:
        raise TaskError(f"{where} = {answer!r}: has no number to compare with", "set rollouts.task.extract=text")
    return str(answer)


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
