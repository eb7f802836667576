"""`trace.json`: spans as Chrome trace events, for ui.perfetto.dev and chrome://tracing.

    [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "redline", "epoch_ns": 1767225600000000000, …}},
    {"ph": "X", "name": "engine.decode", "pid": 1, "tid": 1, "ts": 12.345, "dur": 6.789, …}
    ]

The array needs no closing bracket, so a killed run still opens. A resumed run continues the file as process 2, 3, …; so do the
workers of a run, whose spans come when it ends.

`ts` counts microseconds from `epoch_ns`, the moment the first process began on the wall clock, and not from 1970: readers
hold it in a double, which at today's date could tell nothing finer than a quarter of a microsecond apart.

The file keeps its beginning (start, loading, the first steps) and its newest stretch. What lies between is let go when the file
outgrows its bound, and one event says so, a bar called `left out` over the time that is missing:

    [first quarter of the bound │ left out: 81,204 spans │ newest stretch, a quarter to a half │ workers, a quarter at most]
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from redline.telemetry.files.bounded import Stretch, between, last_lines, lines_of, rewrite
from redline.telemetry.files.durable import replace_file
from redline.telemetry.processes import ProcessRecord, RecordedSpan
from redline.telemetry.spans import Span, process_start_ns

LEFT_OUT = "left out"
LEFT_OUT_TID = 1_000_000
"""The lane of that bar, which no thread has."""
_TAIL_BYTES = 1 << 16
_HEAD_LINES = 4
"""The opening bracket, the first process, the name of the bar's lane and the bar."""


class TraceWriter:
    """Appends spans to a trace file, with the kernel before each call returns. A file that cannot be written (a full disk, one
    that has become read-only) is said once and then left as it is; no call raises for it."""

    def __init__(self, path: Path, max_bytes: int | None = None, *, tell: Callable[[str], None] = lambda text: None) -> None:
        """`max_bytes` bounds the file whenever `bound` or `close` has been called; None keeps every span."""
        self._path = path
        self._max_bytes = max_bytes
        self._tell = tell
        self._file: int | None = None
        """None once it is given up, or closed."""
        self._size = self._pid = self._last_pid = self._epoch_ns = self._offset_ns = 0
        self._workers: set[str] = set()
        self._tids: dict[tuple[int, str], int] = {}
        with self._giving_up():
            self._open()

    def write(self, spans: Iterable[Span]) -> None:
        with self._giving_up():
            self._write(spans, self._pid)

    def bound(self) -> None:
        """Let go of the middle where the file has outgrown its bound. Bytes move: a position in the file is void afterwards."""
        if self._file is not None and self._max_bytes is not None and self._size > self._max_bytes * 3 // 4:
            with self._giving_up():
                self._let_go(self._max_bytes)

    @property
    def worker_bytes(self) -> int | None:
        """What all other processes of a run together may take; None is without a bound."""
        return None if self._max_bytes is None else self._max_bytes // 4

    def write_process(self, process: ProcessRecord, max_bytes: int | None = None) -> None:
        """The spans of another process of the run, beside ours; once, however often it is asked for. Where they would take more
        than `max_bytes`, the oldest are left out, and its name says how many."""
        with self._giving_up():
            if self._file is not None and process.file not in self._workers:
                self._write_process(process, max_bytes)

    def close(self) -> None:
        """Close the array too, so that strict JSON readers take the file."""
        self.bound()
        with self._giving_up():
            self._append(b"\n]\n")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        found = _read_back(self._path)
        self._epoch_ns = found.epoch_ns or clock_offset_ns + process_start_ns()
        self._offset_ns = clock_offset_ns - self._epoch_ns
        self._pid = self._last_pid = found.last_pid + 1
        self._workers = _workers_in(self._path)
        self._size = found.sound_bytes
        self._reopen()
        if self._file is not None and os.fstat(self._file).st_size > self._size:
            os.ftruncate(self._file, self._size)
        name = "redline" if self._pid == 1 else f"redline (resumed, {self._pid})"
        args = {"name": name, "epoch_ns": self._epoch_ns, "os_pid": os.getpid()}
        self._append_events([self._metadata("process_name", args)])

    def _reopen(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Do nothing once the file is given up, and give it up where the system refuses to write it."""
        try:
            yield
        except OSError as error:
            self._tell(f"{self._path.name} is written no longer: {error.strerror or error}; the run goes on")
            file, self._file = self._file, None
            if file is not None:
                _cut_and_close(file, self._size)

    def _append(self, content: bytes) -> None:
        if self._file is None:
            return
        written = 0
        while written < len(content):  # a disk that is nearly full takes a part without complaint
            written += os.write(self._file, content[written:])
        self._size += written

    def _append_events(self, events: Iterable[dict[str, Any]]) -> None:
        lines = b",\n".join(map(_line, events))
        if lines:
            self._append((b",\n" if self._size else b"[\n") + lines)

    def _let_go(self, max_bytes: int) -> None:
        """Keep the first quarter of the bound and the newest, the names of processes and lanes in between, and a bar."""
        middle = between(self._path, max_bytes // 4, max_bytes // 4)
        head, before = list(islice(lines_of(self._path, Stretch(0, self._size)), _HEAD_LINES)), left_out_of(self._path)
        first = head[:2]
        rest = sum(map(len, head if before else first))
        names, gap = _missing(lines_of(self._path, middle), before)
        if gap is None or not rest < middle.start < middle.end < self._size:
            return
        args = {"spans": gap.spans, "why": f"telemetry.trace_max_bytes = {max_bytes}"}
        bar = {"ph": "X", "name": LEFT_OUT, "cat": "telemetry", "pid": 1, "tid": LEFT_OUT_TID, "ts": gap.start_us}
        lane = self._metadata("thread_name", {"name": LEFT_OUT}, LEFT_OUT_TID, 1)
        told = b"".join(_line(event) + b",\n" for event in (lane, {**bar, "dur": gap.end_us - gap.start_us, "args": args}))
        tail = Stretch(middle.end, self._size)
        rewrite(self._path, [b"".join(first), told, Stretch(rest, middle.start), *names, tail])
        self._size = self._path.stat().st_size
        self._reopen()

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, spans: Iterable[Span | RecordedSpan], pid: int) -> None:
        if self._file is None:
            return
        events: list[dict[str, Any]] = []
        for span in spans:
            lane = pid, span.lane
            if lane not in self._tids:
                self._tids[lane] = len(self._tids) + 1
                events.append(self._metadata("thread_name", {"name": span.lane}, self._tids[lane], pid))
            events.append(self._complete(span, pid))
        self._append_events(events)

    def _write_process(self, process: ProcessRecord, max_bytes: int | None) -> None:
        self._last_pid += 1
        clock = {"offset_ns": process.clock.offset_ns, "uncertainty_ns": process.clock.uncertainty_ns, "how": process.clock.how}
        spans = _newest(process.spans, max_bytes)
        left_out = process.left_out + len(process.spans) - len(spans)
        args = {
            "name": process.name,
            "epoch_ns": self._epoch_ns,
            "os_pid": process.os_pid,
            "file": process.file,
            "clock": clock,
            **({"spans_left_out": left_out} if left_out else {}),
        }
        self._append_events([self._metadata("process_name", args, pid=self._last_pid)])
        self._write(spans, self._last_pid)
        self._workers.add(process.file)
        _remember_workers(self._path, self._workers)

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


# ── what is missing ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class LeftOut:
    """What a trace has let go."""

    spans: int
    start_us: float
    end_us: float
    """From where to where, on the clock of the trace."""


def left_out_of(path: Path) -> LeftOut | None:
    """What the trace of a run has let go; None where it has every span, or there is none. Reads its first lines alone."""
    try:
        for line in list(lines_of(path, Stretch(0, 4096)))[2:_HEAD_LINES]:
            event = json.loads(line.rstrip(b",\n"))
            if event["name"] == LEFT_OUT:
                return LeftOut(event["args"]["spans"], event["ts"], event["ts"] + event["dur"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _missing(lines: Iterable[bytes], before: LeftOut | None) -> tuple[list[bytes], LeftOut | None]:
    """Sort lines that go. Returns those that name processes and lanes, which stay, and what is missing with the rest."""
    names: list[bytes] = []
    spans, first, last = 0, b"", b""
    for line in lines:
        if line.startswith(b'{"ph":"M"'):
            names.append(line)
        else:
            spans, first, last = spans + 1, first or line, line
    if not spans:
        return names, before
    started, ended = (json.loads(line.rstrip(b",\n")) for line in (first, last))
    start_us = before.start_us if before else started["ts"]
    return names, LeftOut(spans + (before.spans if before else 0), start_us, max(start_us, ended["ts"] + ended["dur"]))


def _newest(spans: Sequence[RecordedSpan], max_bytes: int | None) -> Sequence[RecordedSpan]:
    """The last of them, as many as take so many bytes in a trace."""
    if max_bytes is None:
        return spans
    kept, size = 0, 0
    for span in reversed(spans):
        size += 120 + len(span.name) + (len(json.dumps(span.args, default=str)) if span.args else 0)
        if size > max_bytes:
            break
        kept += 1
    return spans[len(spans) - kept :]


# ── what an earlier process left ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Found:
    sound_bytes: int = 0
    """Up to the end of the last whole event."""
    last_pid: int = 0
    """Numbers rise through the file, so it is that of the last event."""
    epoch_ns: int = 0


def _read_back(path: Path) -> _Found:
    """From the first lines and the last ones, however long the file is."""
    size = path.stat().st_size if path.exists() else 0
    window = _TAIL_BYTES
    while size:
        end = last_lines(path, window)
        if found := _last_event(end):
            event, behind = found
            return _Found(size - len(end) + behind, event["pid"], _epoch_of(path))
        if len(end) == size:
            break
        window *= 2
    return _Found()


def _last_event(lines: bytes) -> tuple[dict[str, Any], int] | None:
    """The last whole event, and where it ends. The comma is written with the next event: only the last line can be torn."""
    position = len(lines)
    for line in reversed(lines.splitlines(keepends=True)):
        position -= len(line)
        text = line.rstrip(b",\n")
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict) and "pid" in event:
            return event, position + len(text)
    return None


def _epoch_of(path: Path) -> int:
    """The epoch of the first process, on the second line."""
    lines = list(lines_of(path, Stretch(0, len(b"[\n") + 1)))
    try:
        return int(json.loads(lines[-1].rstrip(b",\n"))["args"]["epoch_ns"])
    except (ValueError, KeyError, TypeError):
        return 0


def _workers_file(trace: Path) -> Path:
    return trace.with_name("spans") / "in-trace.json"


def _workers_in(trace: Path) -> set[str]:
    """Files of other processes that are in the trace already."""
    try:
        return set(json.loads(_workers_file(trace).read_text())) if trace.exists() else set()
    except (OSError, ValueError):
        return set()


def _remember_workers(trace: Path, files: set[str]) -> None:
    path = _workers_file(trace)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, json.dumps(sorted(files)).encode())


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), default=str).encode()


def _cut_and_close(file: int, size: int) -> None:
    """Leave whole events only; where not even that is allowed, readers leave a torn one out."""
    try:
        os.ftruncate(file, size)
    except OSError:
        pass
    finally:
        os.close(file)
