"""Reads what torch.profiler's `export_chrome_trace` wrote: one file for each process, its device work included.

Kineto gives every event a category. Calls of threads have the process id as `pid`; device work has the index of the device
there and the stream as `tid`, and carries the `correlation` of the call that launched it. Times are microseconds since
`baseTimeNanoseconds`. Files that a tool has merged put `[TP00] ` in front of each `pid`: each such label is a process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redline.lab.traces.builder import Builder
from redline.lab.traces.json_stream import EventStream, not_a_trace
from redline.lab.traces.timeline import Kind, Process, Work

RANGES = {
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
}
"""Category → what such a range of a thread is."""
WORK = {"kernel": Work.KERNEL, "gpu_memcpy": Work.COPY, "gpu_memset": Work.SET}
"""Category → what such a piece of device work is."""
ELSEWHERE = {"gpu_user_annotation", "Trace", "overhead", "ac2g", "fwdbwd", "async_gpu", "async_cpu_to_gpu"}
"""Categories that repeat what others say, or are about the profiler."""
_LABEL = re.compile(r"^\[([^\]]+)\]\s*(.*)$")
_RANK = re.compile(r"rank[-_ ]?(\d+)|\btp[-_ ]?(\d+)", re.IGNORECASE)
LATEST = 1 << 62
"""Nanoseconds that no time reaches."""
BYTES = {"Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Short": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8}
"""Name of a type as Kineto writes it → bytes of an element."""


def read(path: Path, into: Builder) -> None:
    """Read one file. Raises `TraceError` where it is no trace; what it lacks is added to `into.lacks`."""
    reader = _Reader(path, into)
    stream = EventStream(path)
    for event in stream.events():
        reader.take(event)
    if not stream.has_events:
        raise not_a_trace(path, "it has no traceEvents")
    reader.finish(stream)


class _Reader:
    """The processes of one file while it is read."""

    def __init__(self, path: Path, into: Builder) -> None:
        self._path, self._into = path, into
        self._processes: dict[str, int] = {}
        self._open: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._thread_names: dict[tuple[str, int], str] = {}
        self._odd = 0

    def take(self, event: dict[str, Any]) -> None:
        """Add one event; one whose fields are of other kinds than Kineto writes is counted."""
        phase = event.get("ph")
        try:
            if phase == "X":
                self._complete(event)
            elif phase == "M":
                self._describe(event)
            elif phase in ("B", "E"):
                self._half(event, phase)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            self._odd += 1

    def _complete(self, event: dict[str, Any]) -> None:
        category = event.get("cat", "")
        if category in ELSEWHERE:
            return
        start = round(event["ts"] * 1000)
        end = start + round(event.get("dur", 0) * 1000)
        if not 0 <= start <= end < LATEST:
            raise ValueError("no moment")
        if category in WORK:
            self._device(event, WORK[category], start, end)
        else:  # a category of another program's is a range with a name
            self._thread(event, RANGES.get(category, Kind.ANNOTATION), start, end)

    def _thread(self, event: dict[str, Any], kind: Kind, start: int, end: int) -> None:
        into, process = self._into, self._process(event.get("pid"), is_host=True)
        arguments = event.get("args") or {}
        correlation = _correlation(arguments) if kind is Kind.RUNTIME else -1
        size = _size(arguments) if arguments else math.nan
        thread = into.thread(process, _number(event.get("tid")))
        into.range(start, end, thread, into.name(str(event.get("name", ""))), kind, correlation, size)
        if "Group size" in arguments:
            into.groups[process] = max(into.groups[process], int(arguments["Group size"]))

    def _device(self, event: dict[str, Any], kind: Work, start: int, end: int) -> None:
        into, arguments = self._into, event.get("args") or {}
        process = self._process(event.get("pid"), is_host=False)
        device = arguments.get("device", _number(event.get("pid")))
        stream = into.stream(process, int(device), int(arguments.get("stream", _number(event.get("tid")))))
        into.work(start, end, stream, into.name(str(event.get("name", ""))), kind, _correlation(arguments))
        if "Group size" in arguments:
            into.groups[process] = max(into.groups[process], int(arguments["Group size"]))

    def _process(self, pid: Any, *, is_host: bool) -> int:
        """Return the process of an event: of the file, or of the label in front of its `pid`."""
        labelled = _LABEL.match(pid) if isinstance(pid, str) else None
        label = labelled[1] if labelled else ""
        if label not in self._processes:
            rank = _RANK.search(label)
            known = Process("python", 0, str(self._path), int(rank[1] or rank[2]) if rank else None)
            self._processes[label] = self._into.process(known)
        index = self._processes[label]
        if is_host and not self._into.processes[index].pid:
            self._into.processes[index].pid = _number(labelled[2] if labelled else pid)
        return index

    def _describe(self, event: dict[str, Any]) -> None:
        """Take a thread's name; what else is said of processes is about devices."""
        name = (event.get("args") or {}).get("name", "")
        if event.get("name") == "thread_name" and name:
            self._thread_names[str(event.get("pid")), _number(event.get("tid"))] = str(name)

    def _half(self, event: dict[str, Any], phase: str) -> None:
        """Pair the beginning of a range with its end."""
        key = (_number(event.get("pid")), _number(event.get("tid")))
        if phase == "B":
            self._open.setdefault(key, []).append(event)
        elif self._open.get(key):
            begun = self._open[key].pop()
            self._complete({**begun, "ph": "X", "dur": event["ts"] - begun["ts"]})

    def finish(self, stream: EventStream) -> None:
        """Take what the document says about the job, and name what it lacks."""
        into, head, name = self._into, stream.head, self._path.name
        for label, index in self._processes.items():
            self._identify(label, into.processes[index], head)
            shown = f"[{label}] {into.processes[index].pid}" if label else str(into.processes[index].pid)
            for (pid, tid), words in self._thread_names.items():
                if pid == shown:
                    into.name_thread(index, tid, words)
        if stream.is_truncated:
            into.lacks.append(f"{name}: the file ends in the middle; what came after is missing.")
        opened = sum(map(len, self._open.values()))
        for count, what in (
            (stream.num_damaged, "events are no JSON"),
            (self._odd, "events are not as Kineto writes them"),
            (opened, "ranges never end"),
        ):
            if count:
                into.lacks.append(f"{name}: {count:,} {what}, and were left out.")
        for level in ("ERROR", "WARNING"):
            said = head.get(level)
            dropped = [str(line) for line in said if "drop" in str(line).lower()] if isinstance(said, list) else []
            into.lacks.extend(f"{name}: the profiler says: {line}" for line in dropped[:2])

    def _identify(self, label: str, process: Process, head: dict[str, Any]) -> None:
        """Take clock, rank and number of ranks of a process from the document, or its rank from the file's name."""
        info = head.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        base, said = head.get("baseTimeNanoseconds"), info.get("rank")
        process.base_ns = base if isinstance(base, int) and 0 <= base < LATEST else 0
        process.world = info["world_size"] if isinstance(info.get("world_size"), int) else None
        if not label:
            named = _RANK.search(self._path.name)
            process.rank = said if isinstance(said, int) else int(named[1] or named[2]) if named else None


def _correlation(arguments: dict[str, Any]) -> int:
    found = arguments.get("correlation", -1)
    return found if isinstance(found, int) and 0 <= found < 1 << 40 else -1


def _number(value: Any) -> int:
    if isinstance(value, int | float):
        return int(value)
    found = re.search(r"\d+", str(value))
    return int(found[0]) if found else 0


def _size(arguments: dict[str, Any]) -> float:
    """Return the bytes of a collective's message, or the elements of an operation's largest input."""
    if "In msg nelems" in arguments:
        return float(arguments["In msg nelems"]) * BYTES.get(str(arguments.get("dtype")), 1)
    shapes = arguments.get("Input Dims")
    if not isinstance(shapes, list):
        return math.nan
    return float(max((math.prod(shape) for shape in _shapes(shapes)), default=math.nan))


def _shapes(nested: list[Any]) -> Iterator[list[int]]:
    """Give every shape of a list of shapes; an input that is a list of tensors is a list of them itself."""
    for shape in nested:
        if isinstance(shape, list) and shape:
            if all(isinstance(size, int) for size in shape):
                yield shape
            else:
                yield from _shapes(shape)
