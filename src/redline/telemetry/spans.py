"""Spans: who has the clock, in each thread, at every moment.

    with span("engine.decode", version=3):
        ...

A name is `section.part`. Each thread is a lane. A lane charges the time since its last event to the innermost open span
whenever one opens or closes, so that its sums are kept as it goes and always add up to its wall time.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from redline.telemetry.ledger import UNACCOUNTED, LaneLedger, Ledger

_IMPORTED_NS = time.perf_counter_ns()


class Span:
    """One stretch of one lane: a context manager while it runs, a record once it is over."""

    __slots__ = ("_lane", "args", "end_ns", "name", "start_ns")
    start_ns: int
    end_ns: int

    def __init__(self, lane: _Lane, name: str, args: dict[str, object]) -> None:
        self._lane = lane
        self.name = name
        self.args = args

    @property
    def lane(self) -> str:
        return self._lane.name

    def __enter__(self) -> None:
        lane = self._lane
        now = self.start_ns = lane.clock()
        lane.charge(now)
        lane.open.append(self)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        lane = self._lane
        now = lane.clock()
        lane.charge(now)
        if lane.open[-1] is self:
            lane.open.pop()
            self.end_ns = now
            lane.finished.append(self)
        else:
            lane.unwind(self, now)


class _Lane:
    """One thread's sums and open spans.

    Only its own thread changes it, without a lock (a lock would cost as much as all the rest). Another thread that asks for
    the sums knows that they belong together when they add up.
    """

    __slots__ = ("_last_ns", "_marked", "_rows", "_start_ns", "_thread", "clock", "finished", "name", "open")

    def __init__(self, name: str, clock: Callable[[], int], keep_spans: bool) -> None:
        self.name = name
        self.clock = clock
        # The bottom of the stack never closes: it owns what no span owns.
        self.open: list[Span] = [Span(self, UNACCOUNTED, {})]
        self.finished: deque[Span] = deque(maxlen=None if keep_spans else 0)
        self._thread = threading.current_thread()
        self._start_ns = self._last_ns = clock()
        self._rows: defaultdict[str, int] = defaultdict(int)
        self._marked: dict[str, int] = {}

    def charge(self, now: int) -> None:
        """Give the time since the last event to the innermost open span.

        There is no call between the lines, hence no point where a signal handler, which may open spans too, could cut in.
        """
        passed = now - self._last_ns
        self._last_ns = now
        self._rows[self.open[-1].name] += passed

    def unwind(self, span: Span, now: int) -> None:
        """Close a span and those inside whose own exit never came (a Ctrl-C in it, a generator left half-way)."""
        while span in self.open:
            inner = self.open.pop()
            inner.end_ns = now
            self.finished.append(inner)

    def add(self, span: Span, start_ns: int, end_ns: int) -> None:
        """Take an interval that is over. It may reach back before a lane where nothing has happened yet."""
        if self._last_ns == self._start_ns:
            self._start_ns = self._last_ns = min(self._start_ns, start_ns)
        assert self._last_ns <= start_ns <= end_ns <= self.clock(), f"{span.name} overlaps what its lane has recorded"
        span.start_ns, span.end_ns = start_ns, end_ns
        self.charge(start_ns)
        self.open.append(span)
        self.charge(end_ns)
        self.open.pop()
        self.finished.append(span)

    def ledger(self) -> LaneLedger:
        rows, until_ns = self._consistent_rows()
        if self._thread.is_alive():  # the lane of a thread that is gone ended with its last span
            now = self.clock()
            rows[self.open[-1].name] += now - until_ns
            until_ns = now
        unaccounted_ns = rows.pop(UNACCOUNTED, 0)
        return LaneLedger(until_ns - self._start_ns, dict(rows), unaccounted_ns)

    def mark(self) -> dict[str, int]:
        self.charge(self.clock())
        since = {name: ns - self._marked.get(name, 0) for name, ns in self._rows.items()}
        self._marked = dict(self._rows)
        return {name: ns for name, ns in since.items() if ns}

    def drain(self) -> list[Span]:
        return [self.finished.popleft() for _ in range(len(self.finished))]

    def _consistent_rows(self) -> tuple[defaultdict[str, int], int]:
        """The sums and the moment they reach to; read again while the lane's own thread is half-way through a change."""
        for _ in range(1000):
            rows, until_ns = self._rows.copy(), self._last_ns
            if sum(rows.values()) == until_ns - self._start_ns:
                return rows, until_ns
            time.sleep(0)
        raise AssertionError(f"the sums of lane {self.name} do not add up to its wall time")


class _ThreadLane(threading.local):
    lane: _Lane | None = None


class Recorder:
    """The spans of this process. The lane of the thread that makes it starts at once, any other with its first span."""

    def __init__(self, *, keep_spans: bool = True, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`keep_spans` false keeps the sums only, for a run that writes no trace and so never calls `drain`."""
        self._keep_spans = keep_spans
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._lanes_lock = threading.Lock()
        self._here = _ThreadLane()
        self._open_lane()

    def span(self, name: str, **args: object) -> Span:
        return Span(self._here.lane or self._open_lane(), name, args)

    def add(self, name: str, start_ns: int, end_ns: int, **args: object) -> None:
        """Record an interval that is over, such as the interpreter's start, in this thread's lane."""
        lane = self._here.lane or self._open_lane()
        lane.add(Span(lane, name, args), start_ns, end_ns)

    def idle_as(self, name: str) -> None:
        """What no span owns in this thread from now on is waiting for work, under this name."""
        lane = self._here.lane or self._open_lane()
        lane.charge(lane.clock())
        lane.open[0].name = name

    def drain(self) -> list[Span]:
        """The spans finished since the last call, each lane in the order they finished; the recorder forgets them."""
        return [span for lane in self._all_lanes() for span in lane.drain()]

    def ledger(self) -> Ledger:
        """Every lane's sums up to now, open spans included."""
        return Ledger({lane.name: lane.ledger() for lane in self._all_lanes()})

    def step_mark(self) -> dict[str, int]:
        """Exclusive ns per span name in this thread's lane since the last mark; `unaccounted` included, so that they sum to
        the time passed."""
        return (self._here.lane or self._open_lane()).mark()

    def _open_lane(self) -> _Lane:
        thread = threading.current_thread()
        base = "main" if thread is threading.main_thread() else thread.name
        with self._lanes_lock:
            name, number = base, 1
            while name in self._lanes:
                number += 1
                name = f"{base}-{number}"
            lane = self._lanes[name] = self._here.lane = _Lane(name, self._clock, self._keep_spans)
        return lane

    def _all_lanes(self) -> list[_Lane]:
        with self._lanes_lock:
            return list(self._lanes.values())


_current: Recorder | None = None
_NOT_RECORDING: AbstractContextManager[None] = nullcontext()


def span(name: str, **args: object) -> AbstractContextManager[None]:
    """Time the block under this name in the recorder of the process; without one, do nothing."""
    recorder = _current
    if recorder is None:
        return _NOT_RECORDING
    return Span(recorder._here.lane or recorder._open_lane(), name, args)


def idle_as(name: str) -> None:
    """In a thread that works when it is asked to: what no span owns from now on is waiting, under this name."""
    if _current is not None:
        _current.idle_as(name)


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make `recorder` the one that `span` of every thread records into."""
    global _current
    outer, _current = _current, recorder
    try:
        yield recorder
    finally:
        _current = outer


@functools.cache
def process_start_ns() -> int:
    """When this process began, on the clock of `perf_counter_ns`; if the system does not say, when this file was imported."""
    try:
        # Field 22 of stat, counted after the command in parentheses (which may itself hold spaces): ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        started_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns
    except (OSError, AttributeError, IndexError, ValueError):
        return _IMPORTED_NS
    return min(time.perf_counter_ns() - age_ns, _IMPORTED_NS)
