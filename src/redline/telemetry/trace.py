"""`trace.json`: every span as a Chrome trace event, for ui.perfetto.dev and chrome://tracing.

    [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "redline", "epoch_ns": 1767225600000000000, …}},
    {"ph": "X", "name": "engine.decode", "pid": 1, "tid": 1, "ts": 12.345, "dur": 6.789, …}
    ]

The array needs no closing bracket, so a killed run still opens. A resumed run continues the file as process 2, 3, …

`ts` counts microseconds from `epoch_ns`, the moment the first process began on the wall clock, and not from 1970: readers
hold it in a double, which at today's date could tell nothing finer than a quarter of a microsecond apart.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from redline.telemetry.spans import Span, process_start_ns


class TraceWriter:
    """Appends spans to a trace file, on disk before each call returns."""

    def __init__(self, path: Path) -> None:
        clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        found = _read_back(path)
        epoch_ns = found.epoch_ns or clock_offset_ns + process_start_ns()
        self._offset_ns = clock_offset_ns - epoch_ns
        self._pid = found.processes + 1
        self._tids: dict[str, int] = {}
        self._file = path.open("ab")
        self._file.truncate(found.sound_bytes)
        self._separator = b",\n" if found.sound_bytes else b"[\n"
        name = "redline" if self._pid == 1 else f"redline (resumed, {self._pid})"
        self._append([self._metadata("process_name", {"name": name, "epoch_ns": epoch_ns, "os_pid": os.getpid()})])

    def write(self, spans: Iterable[Span]) -> None:
        events: list[dict[str, Any]] = []
        for span in spans:
            if span.lane not in self._tids:
                self._tids[span.lane] = len(self._tids) + 1
                events.append(self._metadata("thread_name", {"name": span.lane}, self._tids[span.lane]))
            events.append(self._complete(span))
        self._append(events)

    def close(self) -> None:
        """Close the array too, so that strict JSON readers take the file."""
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _complete(self, span: Span) -> dict[str, Any]:
        event = {
            "ph": "X",
            "name": span.name,
            "cat": span.name.partition(".")[0],
            "pid": self._pid,
            "tid": self._tids[span.lane],
            "ts": (span.start_ns + self._offset_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
        }
        return {**event, "args": span.args} if span.args else event

    def _metadata(self, name: str, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}

    def _append(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._file.write(self._separator + json.dumps(event, separators=(",", ":"), default=str).encode())
            self._separator = b",\n"
        self._file.flush()


@dataclass(slots=True)
class _Found:
    """What an earlier process left in the file."""

    sound_bytes: int = 0
    """Up to the end of the last whole event."""
    processes: int = 0
    epoch_ns: int = 0


def _read_back(path: Path) -> _Found:
    found = _Found()
    if not path.exists():
        return found
    position = 0
    with path.open("rb") as file:
        for line in file:
            event = line.rstrip(b",\n")
            # The comma is written with the next event: a line that has one is whole, and only the last can be torn.
            if event.startswith(b"{") and (line.endswith(b",\n") or _is_json(event)):
                found.sound_bytes = position + len(event)
                if b'"process_name"' in event:
                    found.processes += 1
                    found.epoch_ns = json.loads(event)["args"]["epoch_ns"]
            position += len(line)
    return found


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
