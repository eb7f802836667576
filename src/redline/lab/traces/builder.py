"""Collects a timeline row by row, in bounded memory. Readers of every format write into one."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np

from redline.lab.traces.names import is_collective, is_graph_launch
from redline.lab.traces.timeline import (
    CLOSE_NS,
    MOST_RANGES,
    MOST_WORK,
    DeviceWork,
    Kind,
    Process,
    Ranges,
    Stream,
    Thread,
    Timeline,
)

NEARLY_ALL = 0.9
"""Share of the launches of a process that one thread must have made for any of them to be taken for its own."""


class Builder:
    """A timeline that is being read."""

    def __init__(self, most_ranges: int = MOST_RANGES, most_work: int = MOST_WORK) -> None:
        self.processes: list[Process] = []
        self.lacks: list[str] = []
        self.groups: Counter[int] = Counter()
        self.no_duration = 0
        """Events that end before they start, and were left out."""
        self._most_ranges, self._most_work = most_ranges, most_work
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[int, int], Thread] = {}
        self._thread_at: dict[tuple[int, int], int] = {}
        self._stream_at: dict[tuple[int, int, int], int] = {}
        self._ranges: list[array[Any]] = [array(code) for code in "qqiibqd"]
        self._work: list[array[Any]] = [array(code) for code in "qqiibq"]
        self._floor_ns, self._left_out = 0, 0
        self._launchers: Counter[int] = Counter()
        """Thread → calls that launched device work."""
        self._launches: set[int] = set()
        self._collectives: set[int] = set()

    def process(self, process: Process) -> int:
        self.processes.append(process)
        return len(self.processes) - 1

    def thread(self, process: int, tid: int) -> int:
        """Return the index of a thread, which begins to exist when it is first asked for."""
        key = (process, tid)
        if key not in self._thread_at:
            self._thread_at[key] = len(self._thread_at)
            self._threads[key] = Thread(process, tid, "")
        return self._thread_at[key]

    def name_thread(self, process: int, tid: int, name: str) -> None:
        """Name a thread that has ranges, or will have some."""
        self.thread(process, tid)
        self._threads[process, tid].name = name

    def stream(self, process: int, device: int, stream: int) -> int:
        return self._stream_at.setdefault((process, device, stream), len(self._stream_at))

    def move_device(self, process: int, device: int, to: int) -> None:
        """Give the work of a device to another process, which has none on it yet."""
        self._stream_at = {
            (to if key[:2] == (process, device) else key[0], *key[1:]): at for key, at in self._stream_at.items()
        }

    def name(self, text: str) -> int:
        found = self._names.get(text)
        if found is None:
            found = self._names[text] = len(self._names)
            if is_graph_launch(text):
                self._launches.add(found)
            if is_collective(text):
                self._collectives.add(found)
        return found

    def range(  # the columns of a row, in the order of `Ranges`
        self, start: int, end: int, thread: int, name: int, kind: int, correlation: int = -1, size: float = math.nan
    ) -> None:
        if end < start:
            self.no_duration += 1
            return
        if correlation >= 0 and kind == Kind.RUNTIME:
            self._launchers[thread] += 1
        if end - start < self._floor_ns and name not in self._launches:
            self._left_out += 1
            return
        starts, ends, threads, names, kinds, correlations, sizes = self._ranges  # a loop over them costs half of the reading
        starts.append(start)
        ends.append(end)
        threads.append(thread)
        names.append(name)
        kinds.append(kind)
        correlations.append(correlation)
        sizes.append(size)
        if len(starts) >= self._most_ranges:
            self._drop_shortest()

    def work(self, start: int, end: int, stream: int, name: int, kind: int, correlation: int = -1) -> None:
        if end <= start:  # says nothing of idle time
            self.no_duration += 1
            return
        for column, value in zip(self._work, (start, end, stream, name, kind, correlation), strict=True):
            column.append(value)
        if len(self._work[0]) >= self._most_work:
            self._join_replays()

    def _drop_shortest(self) -> None:
        columns = [np.array(column) for column in self._ranges]
        length = columns[1] - columns[0]
        self._floor_ns = max(int(np.median(length)) + 1, 2 * self._floor_ns)
        keep = (length >= self._floor_ns) | np.isin(columns[3], list(self._launches))
        self._left_out += int((~keep).sum())
        self._ranges = [array(old.typecode, column[keep].tobytes()) for old, column in zip(self._ranges, columns, strict=True)]

    def _join_replays(self) -> None:
        """Neighbours of one launch on one stream become one piece; collectives stay, since ranks are matched by them."""
        order = np.lexsort((np.array(self._work[0]), np.array(self._work[2])))
        start, end, stream, name, kind, correlation = (np.array(column)[order] for column in self._work)
        single = np.isin(name, list(self._collectives))
        new = np.ones(len(start), bool)
        new[1:] = (stream[1:] != stream[:-1]) | (correlation[1:] != correlation[:-1]) | (correlation[1:] < 0)
        new[1:] |= single[1:] | single[:-1] | (start[1:] - end[:-1] > CLOSE_NS)
        first = np.flatnonzero(new)
        joined = (start[first], np.maximum.reduceat(end, first), stream[first], name[first], kind[first], correlation[first])
        self._work = [
            array(old.typecode, column.astype(np.array(old).dtype).tobytes())
            for old, column in zip(self._work, joined, strict=True)
        ]
        if len(first) > self._most_work // 2:
            self._most_work *= 2  # nothing to join: device work is never left out, since idle time would be invented
            self.lacks.append("There is more device work than usual; reading it takes more memory.")

    def build(self) -> Timeline:
        """Return the timeline, its times counted from the first event, its rows by start."""
        if self._left_out:
            self.lacks.append(
                f"{self._left_out:,} ranges of threads below {self._floor_ns / 1e3:.0f} µs were left out, to bound memory."
            )
        if self.no_duration:
            self.lacks.append(
                f"{self.no_duration:,} events have no length or no thread, or end before they start, and were left out."
            )
        ranges, work = (_columns(columns) for columns in (self._ranges, self._work))
        self._ranges, self._work = [], []
        streams = [Stream(*key) for key in self._stream_at]
        threads = list(self._threads.values())
        for columns, lanes in ((ranges, threads), (work, streams)):
            base = np.array([self.processes[lane.process].base_ns for lane in lanes] or [0], np.int64)
            columns[0] += base[columns[2]]
            columns[1] += base[columns[2]]
        zero = min((int(columns[0].min()) for columns in (ranges, work) if len(columns[0])), default=0)
        for columns in (ranges, work):
            columns[0] -= zero
            columns[1] -= zero
        found = Timeline(self.processes, threads, streams, list(self._names), Ranges(*ranges), DeviceWork(*work), self.lacks)
        found.has_groups = dict(self.groups)
        found.launchers = self._usual_launchers(threads) if self._left_out else {}
        found.ranges.sort()
        found.work.sort()
        return found

    def _usual_launchers(self, threads: list[Thread]) -> dict[int, int]:
        """Process → the thread that launches nearly all of its device work, where there is one."""
        calls: Counter[int] = Counter()
        for thread, count in self._launchers.items():
            calls[threads[thread].process] += count
        return {
            threads[thread].process: thread
            for thread, count in self._launchers.items()
            if count >= NEARLY_ALL * calls[threads[thread].process]
        }


def _columns(columns: list[array]) -> list[np.ndarray]:
    """Return the columns as numpy arrays over the same memory."""
    return [np.frombuffer(column, dtype=column.typecode) if len(column) else np.empty(0, column.typecode) for column in columns]
