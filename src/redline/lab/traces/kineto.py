"""Reads what torch.profiler's `export_chrome_trace` wrote: one file for each process, its device work included.

Kineto gives every event a category. Calls of threads have the process id as `pid`; device work has the index of the device
there and the stream as `tid`, and carries the `correlation` of the call that launched it. Times are microseconds since
`baseTimeNanoseconds`. Files that a tool has merged put `[TP00] ` in front of each `pid`: each such label is a
process, as is each `pid` of calls where there are no labels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redline.lab.traces.builder import Builder
from redline.lab.traces.json_stream import EventStream, not_a_trace
from redline.lab.traces.timeline import LATEST, Kind, Process, Work

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
MOST_ASKED = 20_000
"""Launches by which a device is given to its process, where a file has several."""
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
        self._hosts: dict[int, int] = {}
        """Process id → process, of events without a label."""
        self._open: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._thread_names: dict[tuple[str, int], str] = {}
        self._odd = 0
        self._calls: Counter[int] = Counter()
        self._launched: dict[int, int] = {}
        """Correlation → process, −1 where several have it; of the first calls of each process."""
        self._seen: dict[int, set[int]] = {}
        """Device → correlations of its first work."""

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
        into, process = self._into, self._process(event.get("pid"), is_host=event.get("cat") in RANGES)
        arguments = event.get("args") or {}
        correlation = _correlation(arguments) if kind is Kind.RUNTIME else -1
        if correlation >= 0 and self._calls[process] < MOST_ASKED:
            self._calls[process] += 1
            self._launched[correlation] = process if self._launched.get(correlation, process) == process else -1
        size = _size(arguments) if arguments else math.nan
        thread = into.thread(process, _number(event.get("tid")))
        into.range(start, end, thread, into.name(str(event.get("name", ""))), kind, correlation, size)
        if "Group size" in arguments:
            into.groups[process] = max(into.groups[process], int(arguments["Group size"]))

    def _device(self, event: dict[str, Any], kind: Work, start: int, end: int) -> None:
        into, arguments = self._into, event.get("args") or {}
        process = self._process(event.get("pid"), is_host=False)
        device = int(arguments.get("device", _number(event.get("pid"))))
        if len(seen := self._seen.setdefault(device, set())) < MOST_ASKED:
            seen.add(_correlation(arguments))
        stream = into.stream(process, device, int(arguments.get("stream", _number(event.get("tid")))))
        into.work(start, end, stream, into.name(str(event.get("name", ""))), kind, _correlation(arguments))
        if "Group size" in arguments:
            into.groups[process] = max(into.groups[process], int(arguments["Group size"]))

    def _process(self, pid: Any, *, is_host: bool) -> int:
        """Return the process of an event: of the label in front of its `pid`, of the `pid`, or the first one of the file."""
        labelled = _LABEL.match(pid) if isinstance(pid, str) else None
        label = labelled[1] if labelled else ""
        if label not in self._processes:
            rank = _RANK.fullmatch(label)
            known = Process(label if label and not rank else "python", 0, str(self._path), _found(rank))
            self._processes[label] = self._into.process(known)
        index = self._processes[label]
        if not label and type(pid) is int and (is_host or pid in self._hosts):
            return self._host(pid, index)
        if is_host and not self._into.processes[index].pid:
            self._into.processes[index].pid = _number(labelled[2] if labelled else pid)
        return index

    def _host(self, pid: int, first: int) -> int:
        """Return the process with this id; the first one of a file is the one that is there for it."""
        if pid not in self._hosts:
            taken = first in self._hosts.values()
            self._hosts[pid] = self._into.process(Process("python", pid, str(self._path))) if taken else first
            self._into.processes[self._hosts[pid]].pid = pid
        return self._hosts[pid]

    def _share_devices(self) -> None:
        """Give each device of a file of several processes to the one that launched its work."""
        first, alone = self._processes.get(""), list[int]()
        if first is None or len(self._hosts) < 2:
            return
        for device, seen in self._seen.items():
            votes = Counter(self._launched[c] for c in seen if self._launched.get(c, -1) >= 0)
            if votes:
                self._into.move_device(first, device, votes.most_common(1)[0][0])
            else:
                alone.append(device)
        if alone:
            devices = ", ".join(map(str, alone))
            self._into.lacks.append(f"{self._path.name}: which process launched the work of device {devices} cannot be told.")

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
        self._share_devices()
        more = [("", index) for index in self._hosts.values() if index != self._processes.get("")]
        for label, index in [*self._processes.items(), *more]:
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
        if not label and len(self._hosts) < 2:  # of several processes the file says nothing of the rank of each
            process.rank = said if isinstance(said, int) else _found(_RANK.search(self._path.name))


def _found(rank: re.Match[str] | None) -> int | None:
    return int(rank[1] or rank[2]) if rank else None


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
