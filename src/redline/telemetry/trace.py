"""`trace.json`: every span as a Chrome trace event, for ui.perfetto.dev and chrome://tracing.

    [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "redline", "epoch_ns": 1767225600000000000, …}},
    {"ph": "X", "name": "engine.decode", "pid": 1, "tid": 1, "ts": 12.345, "dur": 6.789, …}
    ]

The array needs no closing bracket, so a killed run still opens. A resumed run continues the file as process 2, 3, …; so do the
workers of a run, whose spans come when it ends.

`ts` counts microseconds from `epoch_ns`, the moment the first process began on the wall clock, and not from 1970: readers
hold it in a double, which at today's date could tell nothing finer than a quarter of a microsecond apart.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from redline.telemetry.processes import ProcessRecord, RecordedSpan
from redline.telemetry.spans import Span, process_start_ns


class TraceWriter:
    """Appends spans to a trace file, on disk before each call returns."""

    def __init__(self, path: Path) -> None:
        clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        found = _read_back(path)
        epoch_ns = found.epoch_ns or clock_offset_ns + process_start_ns()
        self._offset_ns = clock_offset_ns - epoch_ns
        self._epoch_ns = epoch_ns
        self._pid = self._last_pid = found.processes + 1
        self._tids: dict[tuple[int, str], int] = {}
        self._workers = found.workers
        self._file = path.open("ab")
        self._file.truncate(found.sound_bytes)
        self._separator = b",\n" if found.sound_bytes else b"[\n"
        name = "redline" if self._pid == 1 else f"redline (resumed, {self._pid})"
        self._append([self._metadata("process_name", {"name": name, "epoch_ns": epoch_ns, "os_pid": os.getpid()})])

    def write(self, spans: Iterable[Span]) -> None:
        self._write(spans, self._pid)

    def write_process(self, process: ProcessRecord) -> None:
        """The spans of another process of the run, beside ours; once, however often it is asked for."""
        if process.file in self._workers:
            return
        self._workers.add(process.file)
        self._last_pid += 1
        clock = {"offset_ns": process.clock.offset_ns, "uncertainty_ns": process.clock.uncertainty_ns, "how": process.clock.how}
        args = {
            "name": process.name,
            "epoch_ns": self._epoch_ns,
            "os_pid": process.os_pid,
            "file": process.file,
            "clock": clock,
        }
        self._append([self._metadata("process_name", args, pid=self._last_pid)])
        self._write(process.spans, self._last_pid)

    def close(self) -> None:
        """Close the array too, so that strict JSON readers take the file."""
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _write(self, spans: Iterable[Span | RecordedSpan], pid: int) -> None:
        events: list[dict[str, Any]] = []
        for span in spans:
            lane = pid, span.lane
            if lane not in self._tids:
                self._tids[lane] = len(self._tids) + 1
                events.append(self._metadata("thread_name", {"name": span.lane}, self._tids[lane], pid))
            events.append(self._complete(span, pid))
        self._append(events)

    def _complete(self, span: Span | RecordedSpan, pid: int) -> dict[str, Any]:
        event = {
            "ph": "X",
            "name": span.name,
            "cat": span.name.partition(".")[0],
            "pid": pid,
            "tid": self._tids[pid, span.lane],
            "ts": (span.start_ns + self._offset_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
        }
        return {**event, "args": span.args} if span.args else event

    def _metadata(self, name: str, args: dict[str, Any], tid: int = 0, pid: int | None = None) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": pid or self._pid, "tid": tid, "args": args}

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
    workers: set[str] = field(default_factory=set)
    """Files of other processes that are in the trace already."""


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
                    args = json.loads(event)["args"]
                    found.epoch_ns = args["epoch_ns"]
                    found.workers |= {args["file"]} if "file" in args else set()
            position += len(line)
    return found


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
