"""Tasks from files on this machine, one row each; an answer is correct when it equals the row's."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from redline.config.sections.tasks import FileTask
from redline.errors import TaskError
from redline.rollouts.rewards.math import MathVerifier
from redline.rollouts.rewards.parts import extract_answer, find_numbers
from redline.rollouts.tasks.held_out import held_out_count, stable_hash
from redline.rollouts.tasks.rows import Row, Rows, open_rows
from redline.rollouts.tasks.splits import LEFT_OUT, choose_split, find_splits
from redline.telemetry.files.fingerprint import fingerprint_files
from redline.types import Failure, Message, Task

CHECKED_ROWS = 10_000
"""Rows of a file whose prompts are rendered before a run begins."""
WHOLE_BYTES, PIECES = 2**26, 4096
"""Files of up to so many bytes are compared whole, and so many pieces of larger ones."""
CHECKED_EXPRESSIONS = 20
"""References that math-verify reads before a run begins: it takes some ms for each."""


_OR_NONE = {"answer_field": "; null where an environment or a reward model scores"}
_ENCODER = json.JSONEncoder(sort_keys=True)


class FileTasks:
    """The rows of a file or a folder of files. All are checked when it is made; later each is read when its turn comes."""

    def __init__(self, config: FileTask, seed: int) -> None:
        self.path = config.path
        self._config, self._seed = config, seed
        self._math = MathVerifier() if config.extract == "math" else None
        self.score_is_thread_safe = True if self._math else None
        """math-verify takes ms, in processes of its own; other comparisons are done before a second thread has begun."""
        splits = find_splits(config.path)
        self._folder = folder = config.path if config.path.is_dir() else config.path.parent
        self._files = list(choose_split(config.path, splits, config.split, "split"))
        self._rows = open_rows(self._files, folder)
        self.notes = _left_out_notes(splits.get(LEFT_OUT, ()), folder)
        """What a person should know of the data before a run begins."""
        self._held_out_rows = self._rows
        prompts = self._hash_prompts(self._rows)
        if config.held_out_split is None:
            held_out = _first_rows(prompts, self._held_out_count(len(np.unique(prompts))))
            kept_out = prompts[held_out]
        else:
            files = choose_split(config.path, splits, config.held_out_split, "held_out_split")
            self._held_out_rows = open_rows(files, folder)
            self._files += files
            kept_out = self._hash_prompts(self._held_out_rows)
            held_out = _first_rows(kept_out, len(kept_out))
        self._held_out, self._train = held_out, _grouped_by_prompt(prompts, kept_out)
        if not len(self._held_out) or (not len(self._train) and not self._holds_out_all):
            raise TaskError(
                f"{config.path}: {len(prompts)} row(s) with the same prompt; training and evaluation need one each",
                "add rows with other prompts",
            )
        if self._holds_out_all and (again := len(prompts) - len(held_out)):
            self.notes.append(f"{config.path}: {again} row(s) ask what another row asks, and are left out")
        self._epoch = lru_cache(maxsize=2)(self._shuffled_rows)

    @property
    def _holds_out_all(self) -> bool:
        """No row is left to train on, because that is wanted."""
        return self._config.held_out_split is None and self._config.held_out_fraction == 1

    def _held_out_count(self, num_distinct: int) -> int:
        return num_distinct if self._holds_out_all else held_out_count(num_distinct, self._config.held_out_fraction)

    def fingerprint(self) -> str:
        """A text that changes when the files do. Blocks while they are read, for a second at most on a local disk."""
        return fingerprint_files(set(self._files), self._folder, pieces=PIECES, whole_bytes=WHOLE_BYTES)

    def leave_out(self, refusal: Callable[[Task], Failure | None]) -> list[tuple[Task, Failure]]:
        """Go on without the rows that `refusal` has something against. Returns them. Looks at `CHECKED_ROWS` rows at most,
        which takes seconds; rows after them come up as they are."""
        left_out: list[tuple[Task, Failure]] = []
        self._held_out = self._without(self._held_out, self._held_out_rows, CHECKED_ROWS, refusal, left_out)
        num_left = CHECKED_ROWS - len(self._held_out)
        self._train = self._without(self._train, self._rows, num_left, refusal, left_out)
        if not len(self._train) and not self._holds_out_all:
            task, failure = left_out[-1]
            raise TaskError(f"{self.path}: no row is left to train on: {task.id}: {failure.reason}", failure.hint)
        self._epoch.cache_clear()
        return left_out

    def train(self, index: int) -> Task:
        if self._holds_out_all:
            raise TaskError(
                "rollouts.task.held_out_fraction = 1: every row is held out, and none is left to train on",
                "set it to less than 1, such as 0.1",
            )
        epoch, position = divmod(index, len(self._train))
        return self._task(self._rows, int(self._train[self._epoch(epoch)[position]]))

    def held_out(self, count: int) -> list[Task]:
        return [self._task(self._held_out_rows, int(index)) for index in self._held_out[:count]]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        """Whether the answer equals the reference; nothing where rows have none. With `extract: math` it blocks for up to
        `rewards.math.LIMIT_S`."""
        if self._config.answer_field is None:
            return {}
        if self._math is not None:
            return {"correct": float(self._math.equal(task.answer, text))}
        right = self._read_answer(task.answer) if self._config.extract != "answer_tag" else task.answer.strip()
        return {"correct": float(self._read_answer(text) == right)}

    def _read_answer(self, text: str) -> str | Decimal | None:
        """Numbers compare as numbers: 7 is 7.0."""
        extract = self._config.extract
        assert extract != "math"
        answer = extract_answer(text, extract)
        return Decimal(answer) if answer is not None and extract == "last_number" else answer

    def _without(
        self,
        indices: np.ndarray,
        rows: Rows,
        most: int,
        refusal: Callable[[Task], Failure | None],
        left_out: list[tuple[Task, Failure]],
    ) -> np.ndarray:
        kept = np.ones(len(indices), dtype=bool)
        for place, index in enumerate(indices[: max(most, 0)]):
            task = self._task(rows, int(index))
            if (failure := refusal(task)) is not None:
                left_out.append((task, failure))
                kept[place] = False
        return indices[kept]

    def _shuffled_rows(self, epoch: int) -> np.ndarray:
        """Every row once, in an order of this epoch's own that no library version can change."""
        hashes = (stable_hash(f"{self._seed}/{epoch}/{row}") for row in range(len(self._train)))
        return np.argsort(np.fromiter(hashes, dtype=np.uint64, count=len(self._train)), kind="stable")

    # ── a row ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hash_prompts(self, rows: Rows) -> np.ndarray:
        """uint64[rows]. Raises `TaskError` for the first row that no task can be made of."""
        if not len(rows):
            raise TaskError(f"{self.path}: the file is empty", "write one JSON object per line")
        hashes = array("Q")
        is_math = self._math is not None
        fields = [field for field in (self._config.prompt_field, self._config.answer_field) if field is not None]
        for index, row in enumerate(rows.scan(fields)):
            messages, answer = self._read(row, rows, index)
            if is_math and index < CHECKED_EXPRESSIONS:
                self._check_expression(answer, f"{rows.where(index)}: {self._config.answer_field}")
            hashes.append(stable_hash(_ENCODER.encode(messages)))
        return np.frombuffer(hashes, dtype=np.uint64)

    def _task(self, rows: Rows, index: int) -> Task:
        row = rows[index]
        messages, answer = self._read(row, rows, index)
        return Task(rows.name(index), messages, answer, row)

    def _read(self, row: Row, rows: Rows, index: int) -> tuple[Sequence[Message], str]:
        messages = _as_messages(self._field(row, "prompt_field", rows, index))
        answer = "" if self._config.answer_field is None else self._field(row, "answer_field", rows, index)
        if messages is None:
            raise TaskError(
                f"{rows.where(index)}: {self._config.prompt_field}: neither a text nor a list of messages, or empty",
                'write "a question" or [{"role": "user", "content": "a question"}]',
            )
        return messages, self._reference(answer, rows, index) if self._config.answer_field is not None else ""

    def _field(self, row: Row, key: str, rows: Rows, index: int) -> Any:
        """A field by its name, or by a path with dots into fields that hold fields."""
        name: str = getattr(self._config, key)
        if name in row:
            return row[name]
        found: Any = row
        for part in name.split("."):
            if not isinstance(found, dict) or part not in found:
                raise TaskError(
                    f"{rows.where(index)}: no field {name!r}",
                    f"add it, or set rollouts.task.{key} to one of: {', '.join(row) or 'none'}{_OR_NONE.get(key, '')}",
                )
            found = found[part]
        return found

    def _reference(self, answer: Any, rows: Rows, index: int) -> str:
        where = f"{rows.where(index)}: {self._config.answer_field}"
        if isinstance(answer, str) and not answer.strip():
            raise TaskError(f"{where}: empty, which an empty reply would equal", "write the right answer, or leave the row out")
        if type(answer) is str and self._config.extract in ("text", "math"):
            return answer
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            what = f"{where}: a {type(answer).__name__}, not a text or a number"
            raise TaskError(what, 'write "answer": "42" or "answer": 42')
        if isinstance(answer, float) and not math.isfinite(answer):
            raise TaskError(
                f"{where} = {answer}: no number that an answer could equal", "write the right answer, or leave the row out"
            )
        if self._config.extract == "last_number":
            _check_number(answer, where)
        return str(answer)

    def _check_expression(self, answer: str, where: str) -> None:
        assert self._math is not None
        if not self._math.can_read(answer):
            raise TaskError(
                f"{where} = {answer!r}: math-verify finds no expression in it",
                r"write it as LaTeX, such as \frac{1}{2} or \boxed{42}, or set rollouts.task.extract=text",
            )


def _left_out_notes(files: Sequence[Path], folder: Path) -> list[str]:
    if not files:
        return []
    names = ", ".join(str(file.relative_to(folder)) for file in files[:5]) + (", …" if len(files) > 5 else "")
    return [f"{folder}: {len(files)} file(s) left out, since others name their split and these do not: {names}"]


def _check_number(answer: str | float, where: str) -> None:
    """A solution as GSM8K has it is one number after its `####`."""
    numbers = find_numbers(str(answer).rpartition("####")[2])
    if not numbers:
        raise TaskError(f"{where} = {answer!r}: has no number to compare with", "set rollouts.task.extract=text")
    if len(numbers) > 1:
        raise TaskError(
            f"{where} = {str(answer)[-60:]!r}: {len(numbers)} numbers, and one is compared",
            "set rollouts.task.extract=text or math; or write the number by itself, or after ####",
        )


def _as_messages(prompt: Any) -> Sequence[Message] | None:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if prompt.strip() else None
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        return None
    # In an Arrow column every message has the fields of all others, as nulls.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return messages if all(map(_is_message, messages)) else None


def _is_message(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and all(isinstance(text, str) for text in message.values())


# ── the split ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _first_rows(prompts: np.ndarray, count: int) -> np.ndarray:
    """The first row of each of the `count` distinct prompts with the lowest hashes, from the lowest on."""
    _, first = np.unique(prompts, return_index=True)
    return first[:count]


def _grouped_by_prompt(prompts: np.ndarray, kept_out: np.ndarray) -> np.ndarray:
    """The rows whose prompts are not kept out, in order; those with one prompt stand where its first is."""
    _, first, which = np.unique(prompts, return_index=True, return_inverse=True)
    order = np.argsort(first[which], kind="stable")
    return order[~np.isin(prompts[order], kept_out)]
