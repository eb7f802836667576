"""What was tried, in a file of lines that only grows: a tuning that was killed goes on where its last whole line is.

begun   the recipe's values and the machine       noise   a pair of the recipe with itself
look    what a recording of the recipe so far says and which changes are possible
trial   one change, predicted and measured        proof   a pair of the recipe as it was and as it is now
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import ConfigError
from redline.lab.evidence.experiment import Pair
from redline.lab.tune.space import Change
from redline.lab.tune.trials import Trial, pair_from_json
from redline.telemetry.files.durable import drop_torn_line

NAME = "log.jsonl"
BEGUN = b'{"kind": "begun"'
"""How the first line begins."""
MOST_BYTES = 1 << 24
"""Bytes of the first line."""


@dataclass(slots=True)
class State:
    """What the lines of a log come to."""

    kept: Change = field(default_factory=dict)
    """The changes that stayed, together."""
    trials: list[Trial] = field(default_factory=list)
    noise: list[Pair] = field(default_factory=list)
    looked: list[Change] = field(default_factory=list)
    """Settings of which a line says what a recording of them shows."""
    proofs: list[Pair] = field(default_factory=list)
    """Pairs that prove the settings which are kept now."""

    def take(self, row: Mapping[str, Any]) -> None:
        """Go on by one line. A kind that is not known says nothing."""
        if row["kind"] == "noise":
            self.noise.append(pair_from_json(row["pair"]))
        elif row["kind"] == "look":
            self.looked.append(row["settings"])
        elif row["kind"] == "trial":
            trial = Trial.from_json(row)
            self.trials.append(trial)
            if trial.outcome == "kept":
                self.kept, self.proofs = {**self.kept, **trial.change}, []
        elif row["kind"] == "proof":
            self.proofs.append(pair_from_json(row["pair"]))


class TrialLog:
    """The file, for one process at a time."""

    def __init__(self, path: Path, state: State) -> None:
        self._path, self.state = path, state

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, identity: Mapping[str, Any]) -> Iterator[TrialLog]:
        """Begin a log in a folder, or go on with the one that is there. Raises `ConfigError` where that is of another recipe or
        machine, or another process is at it."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{folder}: another process is tuning there", "wait for it, or give another --out") from None
            path = folder / NAME
            _refuse_others(path, identity)
            drop_torn_line(path)
            rows = _rows(path)
            log = cls(path, State())
            if not rows:
                log.append("begun", identity=identity)
            for number, row in enumerate(rows, 1):
                try:
                    log.state.take(row)
                except (KeyError, TypeError, ValueError, AttributeError):
                    raise _damaged(path, number) from None
            yield log

    def append(self, kind: str, **fields: Any) -> None:
        """Write a line. When this returns the disk has it, and `state` includes it."""
        row = {"kind": kind, **fields}
        with self._path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.state.take(row)


def _refuse_others(path: Path, identity: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a log is of something else. Nothing of it is changed then."""
    if not path.exists():
        return
    with path.open("rb") as file:
        line = file.readline(MOST_BYTES)
    if not line.endswith(b"\n") and line[: len(BEGUN)] == BEGUN[: len(line)]:
        return  # a kill cut the first line
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict) or first.get("kind") != "begun":
        raise ConfigError(f"{path}: not the log of a tuning", "give another --out, or move that file away")
    if first.get("identity") != json.loads(json.dumps(identity)):
        raise ConfigError(f"{path.parent}: {_differs(first, identity)}", "give another --out, or remove that folder")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log. Raises `ConfigError` where one is damaged: what was kept, and why, would not be known."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise _damaged(path, number) from None
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise _damaged(path, number)
        rows.append(row)
    return rows


def _damaged(path: Path, number: int) -> ConfigError:
    return ConfigError(
        f"{path}: line {number} is damaged, and what came after it rests on it",
        f"cut the file before line {number} to go on from there, or give another --out",
    )


def _differs(first: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    before = first.get("identity") or {}
    names = [name for name in identity if before.get(name) != json.loads(json.dumps(identity[name]))]
    return f"its trials are of another {' and '.join(names).replace('_', ' ') or 'tuning'}"
