"""Logs that are text: the state of transformers' trainer, rows of JSON, and lines that verl prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from redline.errors import RunFolderError
from redline.runs.others.log import Log, Row, from_json, is_number

_PRINTED = re.compile(r"\bstep:(\d+) - (.*)")
"""A line of verl's console logger, behind whatever Ray puts before it: `step:1 - actor/lr:1e-06 - perf/…`."""
_NUMPY = re.compile(r"np\.\w+\((.*)\)")
"""How numpy prints its scalars: `np.float64(0.5)`."""


def read_state(path: Path) -> Log:
    """Read `trainer_state.json`, which transformers' trainer writes into its checkpoints."""
    state = from_json(path.read_text(encoding="utf-8", errors="replace"))
    if state is None:
        raise RunFolderError(f"{path}: damaged: it is no JSON", "give the trainer_state.json of another checkpoint")
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise RunFolderError(f"{path}: it has no log_history", "give a trainer_state.json that transformers' trainer wrote")
    rows = [Row(numbers(entry, "step"), _whole(entry.get("step"))) for entry in history if isinstance(entry, dict)]
    config = {key: state[key] for key in ("max_steps", "num_train_epochs", "logging_steps") if key in state}
    texts = sum(_texts(entry) for entry in history if isinstance(entry, dict))
    return Log(path, "JSON", tuple(rows), config, damage=_as_text(texts))


def read_rows(path: Path) -> Log:
    """Read a file of JSON rows: `{"step": 1, "data": {…}}` of verl, `{"step": 1, "time": …, …}` of prime-rl."""
    rows, bad, texts, is_cut = list[Row](), 0, 0, False
    with path.open("rb") as file:
        for line in file:
            found = _object(line)
            if found is None:
                is_cut = not line.endswith(b"\n")
                bad += bool(line.strip()) and not is_cut
                continue
            data, time = found.get("data"), numbers(found).get("time")
            values = numbers(data, "step") if isinstance(data, dict) else numbers(found, "step", "time")
            texts += _texts(data if isinstance(data, dict) else found) + isinstance(found.get("step"), str)
            rows.append(Row(values, _whole(found.get("step")), time))
    damage = [f"{bad} of its lines are no JSON and left out"] if bad else []
    damage += [_as_text(texts)] if texts else []
    return Log(path, "JSON", tuple(rows), damage="; ".join(damage + ["its last line is cut short"] * is_cut))


def read_console(path: Path) -> Log:
    """Read what verl's console logger printed, among whatever else the file holds. A last line without its end is left out: a
    number that is cut is another number."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        lines = list(filter(_PRINTED.search, file))
    is_cut = bool(lines) and not lines[-1].endswith("\n")
    rows = tuple(_printed(lines[:-1] if is_cut else lines))
    return Log(path, "console", rows, damage="its last line is cut short and left out" if is_cut else "")


def _printed(lines: Iterable[str]) -> Iterator[Row]:
    for line in lines:
        if found := _PRINTED.search(line):
            pairs = (part.rpartition(":") for part in found[2].split(" - "))
            values = {name: value for name, _, text in pairs if name and (value := _number(text)) is not None}
            yield Row(values, int(found[1]))


def numbers(entry: Mapping[str, Any], *apart: str) -> dict[str, float]:
    """Return the finite numbers of a row, without the names that are not figures."""
    return {name: float(value) for name, value in entry.items() if name not in apart and is_number(value)}


def _as_text(count: int) -> str:
    return f"{count:,} of its figures are written as text and left out" if count else ""


def _texts(entry: Mapping[str, Any]) -> int:
    """Return how many values of a row are numbers in quotes, other than its step and time."""
    found = (value for name, value in entry.items() if isinstance(value, str) and name not in ("step", "time"))
    return sum(_number(value) is not None for value in found)


def _number(text: str) -> float | None:
    text = text.strip()
    numpy = _NUMPY.fullmatch(text)
    try:
        value = float(numpy[1] if numpy else text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _object(line: bytes) -> dict[str, Any] | None:
    found = from_json(line)
    return found if isinstance(found, dict) else None


def _whole(value: Any) -> int | None:
    return int(value) if is_number(value) else None
