"""`metrics.jsonl`: one JSON object per step, the step first, then `section/name_unit` keys in order."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from redline.telemetry.files.durable import drop_torn_line, replace_file
from redline.telemetry.files.tail import parse_row

_BLOCK_BYTES = 1 << 20


class MetricsLog:
    """Appends rows, each on disk before the call returns. Opening it repairs what a kill left torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        drop_torn_line(path)
        self._file = path.open("ab")

    def append(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the row of a step, and give it as written. A number that is not finite becomes null: JSON has no other word."""
        assert all("/" in key for key in values), f"metric keys are section/name_unit, not {sorted(values)}"
        row = {"step": step, **{key: _plain(values[key]) for key in sorted(values)}}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        return row

    def flush_to_disk(self) -> None:
        """Every row up to here survives a power cut, not only a kill."""
        os.fsync(self._file.fileno())

    def rewind(self, step: int, aside: Path | None = None) -> None:
        """Cut every row after `step`: a resumed run will write them again. With a folder `aside`, a file of the same name there
        keeps them. Looks at those rows only, from the last one back, however long the log is."""
        end, size = _end_of(self.path, step), self.path.stat().st_size
        if end == size:
            return
        if aside is not None:
            with self.path.open("rb") as file:
                file.seek(end)
                replace_file(aside / self.path.name, file.read())
        self._file.truncate(end)
        os.fsync(self._file.fileno())

    @staticmethod
    def read(path: Path) -> Iterator[dict[str, Any]]:
        """The rows of a finished, killed or still running log. A last line without its newline is not a row yet, and one that a
        disk has damaged is none any more: it stays in the file, and is left out here."""
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (row := parse_row(line)) is not None:
                    yield row

    @staticmethod
    def last_step(path: Path) -> int:
        """The step of the last row, which is all that is read; 0 where there is none."""
        return next((step for _, step in _steps_from_the_last(path)), 0)

    @staticmethod
    def total(path: Path, key: str) -> int:
        """The sum of a whole number over all rows, without parsing them: a hundred thousand take a fraction of a second."""
        value = re.compile(b'"' + re.escape(key.encode()) + b'": (\\d+)')
        with path.open("rb") as file:
            return sum(int(found[1]) for line in file if line.endswith(b"\n") and (found := value.search(line)))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _end_of(path: Path, step: int) -> int:
    """Where the last row ends that is not after `step`. Rows are in the order of their steps."""
    return next((end for end, found in _steps_from_the_last(path) if found <= step), 0)


def _steps_from_the_last(path: Path) -> Iterator[tuple[int, int]]:
    """Where each row ends, and its step."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            for line in reversed(_lines_before(file, end)):
                if (step := _step(line)) is not None:
                    yield end, step
                end -= len(line)


def rows_from_the_last(path: Path) -> Iterator[dict[str, Any]]:
    """Give the rows of a log, the newest first, block by block: a caller that needs the newest reads no more than those. None
    where there is no such file; a last line that is not whole, or one that a disk has damaged, is left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            for line in reversed(_lines_before(file, end)):
                end -= len(line)
                if line.endswith(b"\n") and (row := parse_row(line)) is not None:
                    yield row


def first_row_where(path: Path, is_found: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Return the first row of a log that `is_found`, where all rows after such a one are found too; None where no row is. It
    halves the file, so that a long one costs no more than a few dozen lines."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while low < high:
            middle = (low + high) // 2
            row = _row_from(file, middle)
            low, high = (low, middle) if row is None or is_found(row) else (middle + 1, high)
        return _row_from(file, low)
    return None


def _row_from(file: BinaryIO, place: int) -> dict[str, Any] | None:
    """The first whole row that begins there or later."""
    file.seek(max(0, place - 1))
    if place:
        file.readline()
    for line in file:
        if line.endswith(b"\n") and (row := parse_row(line)) is not None:
            return row
    return None


def _step(line: bytes) -> int | None:
    """The step of a whole row; None for any other line."""
    row = parse_row(line) if line.endswith(b"\n") else None
    return row["step"] if row and isinstance(row.get("step"), int) else None


def _lines_before(file: BinaryIO, end: int) -> list[bytes]:
    """Whole lines, the last of which ends at `end`: those of one block, or a single longer one."""
    size = _BLOCK_BYTES
    while True:
        start = max(0, end - size)
        file.seek(start)
        block = file.read(end - start)
        begin = block.find(b"\n") + 1 if start else 0
        if begin < len(block):
            return block[begin:].splitlines(keepends=True)
        size *= 2


def _plain(value: Any) -> Any:
    """A JSON value: NumPy scalars become Python numbers, and numbers that are not finite become None."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
