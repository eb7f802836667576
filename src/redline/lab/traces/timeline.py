"""One timeline of all processes of a capture, as columns: what threads did, and what devices did.

A row takes about 45 bytes, a fifth of its text. Where a capture has more rows than `MOST_RANGES`, the shortest ranges of
threads are left out, and the timeline says so: memory is bounded however long the capture is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np

from redline.lab.traces.intervals import Intervals

MOST_RANGES = 8_000_000
"""Ranges of threads that are held at most: 370 MB."""
MOST_WORK = 8_000_000
"""Pieces of device work that are held at most before neighbours of one launch become one piece."""
LATEST = 1 << 62
"""Nanoseconds that no time reaches."""
CLOSE_NS = 5_000
"""Pieces of one launch on one stream that are no further apart may become one."""


class Kind(IntEnum):
    """What a range of a thread is."""

    OP = 0
    ANNOTATION = 1
    PYTHON = 2
    RUNTIME = 3
    """A call into CUDA."""
    SYSTEM = 4
    """A call into the operating system's libraries."""


class Work(IntEnum):
    """What a device does."""

    KERNEL = 0
    COPY = 1
    SET = 2
    GRAPH = 3
    """A whole replay of a CUDA graph, recorded as one piece."""


@dataclass(slots=True)
class Process:
    """One process, as the capture knows it."""

    name: str
    pid: int
    source: str
    """The file it was read from."""
    rank: int | None = None
    world: int | None = None
    """Ranks of its job, where the capture says so."""
    base_ns: int = 0
    """What its times count from."""

    @property
    def label(self) -> str:
        """How a person tells it from the others."""
        return f"rank {self.rank}" if self.rank is not None else f"{self.name or 'process'} {self.pid}"


@dataclass(slots=True)
class Thread:
    process: int
    tid: int
    name: str


@dataclass(slots=True)
class Stream:
    process: int
    device: int
    stream: int


@dataclass(slots=True)
class Ranges:
    """What threads did, by start."""

    start: np.ndarray
    """int64, nanoseconds since the first event of the capture."""
    end: np.ndarray
    thread: np.ndarray
    """int32, into `Timeline.threads`."""
    name: np.ndarray
    """int32, into `Timeline.names`."""
    kind: np.ndarray
    """int8, a `Kind`."""
    correlation: np.ndarray
    """int64: the device work of the same process and number was launched by this call; −1 for none."""
    size: np.ndarray
    """float64: bytes, elements or tokens that the range is about, where the capture has them; else NaN."""

    def __len__(self) -> int:
        return len(self.start)

    def sort(self) -> None:
        """Bring the rows into the order of their starts; of ranges that start together the longer holds the other."""
        _sort(self)


@dataclass(slots=True)
class DeviceWork:
    """What devices did, by start."""

    start: np.ndarray
    end: np.ndarray
    stream: np.ndarray
    """int32, into `Timeline.streams`."""
    name: np.ndarray
    kind: np.ndarray
    """int8, a `Work`."""
    correlation: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def sort(self) -> None:
        """Bring the rows into the order of their starts."""
        _sort(self)


@dataclass(slots=True)
class Timeline:
    """Everything that a capture has, and what it lacks."""

    processes: list[Process]
    threads: list[Thread]
    streams: list[Stream]
    names: list[str]
    ranges: Ranges
    work: DeviceWork
    lacks: list[str]
    """What is missing or doubtful, each as a sentence."""
    has_groups: dict[int, int] = field(default_factory=dict)
    """Process → the most ranks that a collective of its own names."""
    launchers: dict[int, int] = field(default_factory=dict)
    """Process → the thread that launches its device work, where short calls were left out; empty where none was."""
    clocks_apart: dict[int, int] = field(default_factory=dict)
    """Process → by how much its devices' times do not fit those of its threads, in nanoseconds."""

    @property
    def range_process(self) -> np.ndarray:
        """Process of every range."""
        return _owners(self.threads)[self.ranges.thread]

    @property
    def work_process(self) -> np.ndarray:
        """Process of every piece of device work."""
        return _owners(self.streams)[self.work.stream]

    def named(self, is_it: Callable[[str], object]) -> np.ndarray:
        """Return for each name whether it is such a one; index it with a column of names."""
        return np.array([bool(is_it(name)) for name in self.names] or [False])

    def busy(self, process: int) -> Intervals:
        """Return when any stream of a process had work, graph replays included."""
        mine = self.work_process == process
        return Intervals.union(self.work.start[mine], self.work.end[mine])

    def shift(self, by: dict[int, int]) -> None:
        """Move everything of some processes in time: process → nanoseconds."""
        for table, owner in ((self.ranges, self.range_process), (self.work, self.work_process)):
            if len(table):
                moves = np.zeros(len(self.processes), np.int64)
                moves[list(by)] = list(by.values())
                table.start += moves[owner]
                table.end += moves[owner]
                table.sort()


def _sort(table: Ranges | DeviceWork) -> None:
    order = np.lexsort((-table.end, table.start))
    for column in fields(table):  # one at a time: a second copy of all would double the memory
        setattr(table, column.name, getattr(table, column.name)[order])


def _owners(lanes: list[Thread] | list[Stream]) -> np.ndarray:
    return np.array([lane.process for lane in lanes] or [0], np.int32)
