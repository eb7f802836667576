"""Tasks from the reasoning_gym package: procedural puzzles, endless and with checkable answers.

A data set draws item i of seed s from `Random(s + i)`, so neighbouring seeds share nearly all items, and a few data sets
prepare `size` items up front and have no more. We therefore number items by *position*, 0 to 2^31: position p is item
p mod 1024 of the data set that is seeded with p - p mod 1024.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from redline.config.sections.tasks import ReasoningGymTask
from redline.errors import TaskError, boundary
from redline.rollouts.rewards.parts import Extract, extract_answer
from redline.rollouts.tasks.held_out import is_held_out, stable_hash
from redline.types import Task

_CHUNK = 1024
_NUM_POSITIONS = 2**31
_LANE = (2**14 + 1) * _CHUNK
"""Positions between the candidates for one training index; an odd number of chunks, so that all are tried before any is
tried again."""
_MAX_DRAWS = 10_000
"""Draws without a new question after which there is none, for any data set worth training on."""
_LOOKED_AT = 8
"""Answers that say whether those of a data set are numbers."""
_NO_ANSWER = "?"
_CORRECT = 0.99
"""Data sets give partial credit; only an exact answer counts as correct."""


class ReasoningGymTasks:
    """One data set of reasoning_gym as a `TaskSource`."""

    def __init__(self, config: ReasoningGymTask, seed: int) -> None:
        self._config = config
        self._start = stable_hash(f"reasoning_gym/{seed}") % (_NUM_POSITIONS // _CHUNK) * _CHUNK
        _check_params(config)
        # Consecutive training indices read a few lanes, and `score` needs any chunk at all.
        self._chunk = lru_cache(maxsize=16)(lambda first: _create_dataset(config, first))
        self._scorer = self._chunk(0)
        self._extract: Extract = self._auto_extract() if config.extract == "auto" else config.extract
        self._refuse_what_cannot_teach()

    def train(self, index: int) -> Task:
        """The first candidate that is not held out. Candidates depend on the index alone, so any index is at hand at once."""
        for draw in range(_MAX_DRAWS):
            entry = self._entry(self._start + index + draw * _LANE)
            if not self._is_held_out(entry):
                return self._task(f"{self._config.dataset}/{index}", entry)
        raise TaskError(
            f"reasoning_gym data set {self._config.dataset}: all of {_MAX_DRAWS:,} draws are held out",
            "lower rollouts.task.held_out_fraction, or widen rollouts.task.params so that there are more questions",
        )

    def held_out(self, count: int) -> list[Task]:
        """The first distinct held-out questions from position 0 on, whatever the seed of the run."""
        found: dict[str, Task] = {}
        position = last_new = 0
        while len(found) < count and position - last_new < _MAX_DRAWS:
            entry = self._entry(position)
            position += 1
            if self._is_held_out(entry) and entry["question"] not in found:
                found[entry["question"]] = self._task(f"{self._config.dataset}/held_out/{len(found)}", entry)
                last_new = position
        if count > 0 and not found:
            raise TaskError(
                f"reasoning_gym data set {self._config.dataset}: no held-out question in {_MAX_DRAWS:,} draws",
                "raise rollouts.task.held_out_fraction, or set rollouts.evaluation.num_tasks=0",
            )
        return list(found.values())

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        answer = extract_answer(text, self._extract)
        if answer is None:
            return {"correct": 0.0}
        score = 0.0
        with boundary():  # some raise where an answer does not have the form that they expect: it is not right
            score = self._scorer.score_answer(answer, dict(task.data))
        return {"correct": float(score >= _CORRECT)}

    def _auto_extract(self) -> Extract:
        """The last number where every answer that is looked at is a number and nothing else, else the whole answer."""
        answers = (self._entry(position)["answer"] for position in range(_LOOKED_AT))  # seconds each, in some data sets
        are_numbers = all(answer and extract_answer(answer, "last_number") == answer for answer in answers)
        return "last_number" if are_numbers else "text"

    def _refuse_what_cannot_teach(self) -> None:
        task = self._task("", self._entry(0))
        if self.score(task, _NO_ANSWER)["correct"]:
            raise TaskError(
                f"reasoning_gym data set {self._config.dataset}: its own scorer takes any answer for right: {_NO_ANSWER!r}",
                "choose another data set, or score the answers in a task source of your own (rollouts.task.kind: import)",
            )
        if self._extract == "last_number" and task.answer and not self.score(task, task.answer)["correct"]:
            raise TaskError(
                f"rollouts.task.extract = 'last_number': an answer of {self._config.dataset} is {task.answer[:60]!r}",
                "leave it out, or set it to text or answer_tag",
            )

    def _entry(self, position: int) -> dict[str, Any]:
        chunk, item = divmod(position % _NUM_POSITIONS, _CHUNK)
        dataset = self._chunk(chunk * _CHUNK)
        with boundary() as caught:
            entry: dict[str, Any] = dataset[item]
        if caught.error is not None:
            raise _unusable(self._config, caught.error) from caught.error
        return entry

    def _is_held_out(self, entry: Mapping[str, Any]) -> bool:
        return is_held_out(entry["question"], self._config.held_out_fraction)

    def _task(self, task_id: str, entry: Mapping[str, Any]) -> Task:
        # Some data sets accept many answers and name none.
        return Task(task_id, [{"role": "user", "content": entry["question"]}], entry["answer"] or "", entry)


def _registry() -> Any:
    from reasoning_gym import factory  # here, since it takes 1.5 s

    return factory


def _create_dataset(config: ReasoningGymTask, seed: int) -> Any:
    with boundary() as caught:
        params = _specified(config.params) if config.dataset == "composite" else config.params
        dataset = _registry().create_dataset(config.dataset, seed=seed, size=_CHUNK, **params)
    if caught.error is not None:
        raise _unusable(config, caught.error) from caught.error
    return dataset


def _specified(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a mixture of data sets, each of them `a_name` or `{name: a_name, weight: 2, config: {...}}`."""
    from reasoning_gym.composite import DatasetSpec

    given = [{"name": spec} if isinstance(spec, str) else spec for spec in params.get("datasets", ())]
    return {**params, "datasets": [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in given]}


def _unusable(config: ReasoningGymTask, error: Exception) -> TaskError:
    """reasoning_gym checks its parameters with asserts, some of them wordless, and some only when it draws."""
    given = ", ".join(f"{name}={value!r}" for name, value in config.params.items())
    return TaskError(
        f"reasoning_gym data set {config.dataset}({given}): {type(error).__name__}: {error}",
        f"change rollouts.task.params; {_valid_params(config.dataset)}",
    )


def _check_params(config: ReasoningGymTask) -> None:
    datasets = _registry().DATASETS
    if config.dataset not in datasets:
        near = difflib.get_close_matches(config.dataset, datasets, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(sorted(datasets))}"
        raise TaskError(f"rollouts.task.dataset = {config.dataset!r}: reasoning_gym has no such data set", hint)
    known = _param_names(config.dataset)
    for name in config.params:
        if name in ("seed", "size"):
            raise TaskError(f"rollouts.task.params.{name}: redline sets it", "remove it; run.seed decides what is drawn")
        if name not in known:
            near = [f"did you mean {near}? " for near in difflib.get_close_matches(name, known, n=1)]
            raise TaskError(
                f"rollouts.task.params.{name}: {config.dataset} has no such parameter",
                "".join(near) + _valid_params(config.dataset),
            )


def _param_names(dataset: str) -> Sequence[str]:
    config_class = _registry().DATASETS[dataset][1]
    return sorted(field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size"))


def _valid_params(dataset: str) -> str:
    return f"parameters of {dataset}: {', '.join(_param_names(dataset))}"
