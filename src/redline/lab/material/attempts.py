"""Attempts that a run has recorded, and long texts that repeat as they do.

A run's attempts at a task come in visits: the siblings of one group are a visit, and the task comes again in a later epoch. Few
recorded attempts are as long as a benchmark's completions, so those are made of many: the siblings of a group go through the
same tasks in the same order, each with its own attempts. What they have in common is what the siblings of a run have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from redline.errors import RunFolderError
from redline.runs.stored import StoredRun

FILE_ENDING = ".npz"


@dataclass(slots=True, frozen=True)
class Attempts:
    """What the policy said, by task."""

    visits: Sequence[Sequence[Sequence[np.ndarray]]]
    """int32: the tokens of each attempt of each visit at each task, the first visit first."""

    @property
    def group_size(self) -> int:
        """Attempts of a visit, where all have as many."""
        return min(len(visit) for visits in self.visits for visit in visits)

    @property
    def num_visits(self) -> int:
        """Visits that every task has."""
        return min(map(len, self.visits))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return 1 + max(int(tokens.max()) for visits in self.visits for visit in visits for tokens in visit)

    def text(self, group: int, visit: int, sibling: int, length: int) -> np.ndarray:
        """int32[length]: what one sibling of a group says. Where there are too few tasks, its siblings' attempts follow."""
        order, size = np.random.default_rng(group).permutation(len(self.visits)).tolist(), self.group_size
        parts, missing, turn = list[np.ndarray](), length, 0
        while missing > 0:
            task = self.visits[order[turn % len(order)]]
            part = task[visit][(sibling + turn // len(order)) % size][:missing]
            parts.append(part)
            missing, turn = missing - len(part), turn + 1
        return np.concatenate(parts)


def read_attempts(source: Path) -> Attempts:
    """Read the attempts of a run folder, or of a file that `save_attempts` wrote. Raises `RunFolderError` where no task was
    visited twice."""
    attempts = _of_file(source) if source.suffix == FILE_ENDING else _of_run(source)
    if not attempts.visits:
        raise RunFolderError(
            f"{source}: no task was attempted twice, and the earlier attempts are what later ones repeat",
            "take a run whose tasks come again: more steps, or fewer tasks (rollouts.task)",
        )
    return attempts


def save_attempts(attempts: Attempts, path: Path) -> None:
    flat = [
        (task, visit, tokens)
        for task, visits in enumerate(attempts.visits)
        for visit, siblings in enumerate(visits)
        for tokens in siblings
    ]
    whole = np.concatenate([tokens for _, _, tokens in flat])
    np.savez_compressed(
        path,
        tokens=whole.astype(np.uint16) if whole.max() < 2**16 else whole,
        lengths=np.array([len(tokens) for _, _, tokens in flat], np.int32),
        tasks=np.array([task for task, _, _ in flat], np.int32),
        visits=np.array([visit for _, visit, _ in flat], np.int32),
    )


def _of_file(path: Path) -> Attempts:
    with np.load(path) as saved:
        tokens, lengths, tasks, visits = (saved[name] for name in ("tokens", "lengths", "tasks", "visits"))
    found: dict[int, dict[int, list[np.ndarray]]] = {}
    ends = np.cumsum(lengths)
    for end, length, task, visit in zip(ends.tolist(), lengths.tolist(), tasks.tolist(), visits.tolist(), strict=True):
        found.setdefault(task, {}).setdefault(visit, []).append(tokens[end - length : end].astype(np.int32))
    return Attempts([list(of_task.values()) for of_task in found.values()])


def _of_run(folder: Path) -> Attempts:
    """Tasks that have come more than once; attempts without a token are left out."""
    found: dict[str, dict[int, list[np.ndarray]]] = {}
    table = StoredRun(folder).table()
    columns = (table.column(name).to_pylist() for name in ("task_id", "group", "token_ids", "loss_mask"))
    for task, group, tokens, mask in zip(*columns, strict=True):
        said = np.array(tokens, np.int32)[np.array(mask, bool)]
        if len(said):
            found.setdefault(task, {}).setdefault(group, []).append(said)
    return Attempts([[groups[index] for index in sorted(groups)] for groups in found.values() if len(groups) > 1])
