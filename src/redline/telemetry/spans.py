"""Spans: who has the clock, in each thread, at every moment.

    with span("engine.decode", version=3):
        ...

A name is `section.part`. Each thread is a lane. A lane charges the time since its last event to the innermost open span
whenever one opens or closes, so that its sums are kept as it goes and always add up to its wall time.

Coroutines take turns in one thread, and what one has opened is still open while another runs. Each asyncio task that opens a
span therefore has a lane too, whose time runs on while it awaits; when the task is done, the next one takes its lane over. The
lane of their thread sees one stretch, whatever was open when the event loop was started, and in it the spans that do not await
and say so.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from asyncio import Task, _get_running_loop, current_task
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from redline.telemetry.ledger import UNACCOUNTED, LaneLedger, Ledger

if TYPE_CHECKING:
    from redline.telemetry.machine.device_time import DeviceTimer

BETWEEN_TASKS = "wait.for_task"
"""Owns the time of a task's lane from one task to the next."""
_IMPORTED_NS = time.perf_counter_ns()


class Span:
    """One stretch of one lane: a context manager while it runs, a record once it is over."""

    __slots__ = ("_lane", "args", "end_ns", "name", "start_ns")
    start_ns: int
    end_ns: int

    def __init__(self, lane: Lane, name: str, args: dict[str, object]) -> None:
        self._lane = lane
        self.name = name
        self.args = args

    @property
    def lane(self) -> str:
        return self._lane.name

    def __enter__(self) -> None:
        lane = self._lane
        stack = lane.open
        now = self.start_ns = lane.clock()
        passed = now - lane.last_ns  # as `charge` does it: a call would be a tenth of the whole span
        lane.last_ns = now
        lane.rows[stack[-1].name] += passed
        stack.append(self)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        lane = self._lane
        stack = lane.open
        now = lane.clock()
        passed = now - lane.last_ns
        lane.last_ns = now
        lane.rows[stack[-1].name] += passed
        if stack[-1] is self:
            stack.pop()
            self.end_ns = now
            lane.finished.append(self)
        else:
            lane.unwind(self, now)


SpanClass = TypeVar("SpanClass", bound=Span)


@dataclass(slots=True, frozen=True)
class OpenSpan:
    """A span that has not ended, as another thread sees it."""

    name: str
    start_ns: int
    args: Mapping[str, object]


@dataclass(slots=True, frozen=True)
class LaneState:
    """A lane at one moment, as another thread sees it; its own thread may have gone on meanwhile."""

    name: str
    thread_id: int | None
    native_id: int | None
    """The kernel's number of the thread."""
    is_alive: bool
    booked_ns: Mapping[str, int]
    """Span → exclusive ns up to the last event."""
    booked_until_ns: int
    idle: str
    """What the time that no span owns is called."""
    open: Sequence[OpenSpan]
    """Outermost first."""

    @property
    def innermost(self) -> str:
        return self.open[-1].name if self.open else self.idle


class Lane:
    """The sums and open spans of one thread, of one asyncio task after another, or of one stream of a device.

    Only its own thread changes it, without a lock (a lock would cost as much as all the rest). Another thread that asks for
    the sums knows that they belong together when they add up.
    """

    __slots__ = ("_free", "_marked", "_start_ns", "_thread", "clock", "finished", "last_ns", "name", "open", "rows")

    def __init__(self, name: str, clock: Callable[[], int], keep_spans: bool) -> None:
        self.name = name
        self.clock = clock
        # The bottom of the stack never closes: it owns what no span owns.
        self.open: list[Span] = [Span(self, UNACCOUNTED, {})]
        self.finished: deque[Span] = deque(maxlen=None if keep_spans else 0)
        self._thread = threading.current_thread()
        self._free = False
        """True for the lane of tasks while it has none."""
        self._start_ns = self.last_ns = clock()
        self.rows: defaultdict[str, int] = defaultdict(int)
        self._marked: dict[str, int] = {}

    def charge(self, now: int) -> None:
        """Give the time since the last event to the innermost open span.

        There is no call between the lines, hence no point where a signal handler, which may open spans too, could cut in.
        """
        passed = now - self.last_ns
        self.last_ns = now
        self.rows[self.open[-1].name] += passed

    def unwind(self, span: Span, now: int) -> None:
        """Close a span and those inside whose own exit never came (a Ctrl-C in it, a generator left half-way)."""
        while span in self.open:
            inner = self.open.pop()
            inner.end_ns = now
            self.finished.append(inner)

    def add(self, span: Span, start_ns: int, end_ns: int) -> None:
        """Take an interval that is over. It may reach back before a lane where nothing has happened yet."""
        if self.last_ns == self._start_ns:
            self._start_ns = self.last_ns = min(self._start_ns, start_ns)
        assert self.last_ns <= start_ns <= end_ns <= self.clock(), f"{span.name} overlaps what its lane has recorded"
        span.start_ns, span.end_ns = start_ns, end_ns
        self.charge(start_ns)
        self.open.append(span)
        self.charge(end_ns)
        self.open.pop()
        self.finished.append(span)

    @property
    def is_alive(self) -> bool:
        """The lane of a thread that is gone, or of a task that is done, ended with its last span."""
        return not self._free and self._thread.is_alive()

    def begin_task(self) -> None:
        self.charge(self.clock())
        self.open[0].name = UNACCOUNTED
        self._free = False

    def end_task(self) -> None:
        now = self.clock()
        self.charge(now)
        if len(self.open) > 1:
            self.unwind(self.open[1], now)
        self.open[0].name = BETWEEN_TASKS
        self._free = True

    def ledger(self) -> LaneLedger:
        rows, until_ns = self._consistent_rows()
        if self.is_alive:
            now = self.clock()
            rows[self.open[-1].name] += now - until_ns
            until_ns = now
        unaccounted_ns = rows.pop(UNACCOUNTED, 0)
        return LaneLedger(until_ns - self._start_ns, dict(rows), unaccounted_ns)

    def mark(self) -> dict[str, int]:
        self.charge(self.clock())
        since = {name: ns - self._marked.get(name, 0) for name, ns in self.rows.items()}
        self._marked = dict(self.rows)
        return {name: ns for name, ns in since.items() if ns}

    def drain(self) -> list[Span]:
        return [self.finished.popleft() for _ in range(len(self.finished))]

    def state(self) -> LaneState:
        rows, until_ns, spans = self.rows.copy(), self.last_ns, self.open.copy()
        opened = [OpenSpan(span.name, span.start_ns, span.args) for span in spans[1:]]
        thread = self._thread
        return LaneState(self.name, thread.ident, thread.native_id, self.is_alive, rows, until_ns, spans[0].name, opened)

    def _consistent_rows(self) -> tuple[defaultdict[str, int], int]:
        """The sums and the moment they reach to; read again while the lane's own thread is half-way through a change."""
        for _ in range(1000):
            rows, until_ns = self.rows.copy(), self.last_ns
            if sum(rows.values()) == until_ns - self._start_ns:
                return rows, until_ns
            time.sleep(0)
        raise AssertionError(f"the sums of lane {self.name} do not add up to its wall time")


class _Here(threading.local):
    """The lanes of this thread."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.of_tasks: dict[Task | None, Lane] = {}
        self.free: list[Lane] = []
        """Lanes of tasks that are done; the next task takes one."""


class Recorder:
    """The spans of this process. The lane of the thread that makes it starts at once, any other with its first span."""

    def __init__(self, *, keep_spans: bool = True, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        """`keep_spans` false keeps the sums only, for a run that writes no trace and so never calls `drain`."""
        self.keep_spans = keep_spans
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._lanes_lock = threading.Lock()
        self._here = _Here()
        self._device: DeviceTimer | None = None
        self._open_lane()

    def span(self, name: str, *, device: bool = False, **args: object) -> Span:
        """`device` also times the block on the device, where `time_device` was called."""
        lane = (self._here.lane or self._open_lane()) if _get_running_loop() is None else self._task_lane()
        if device and self._device is not None:
            return self._device.span(lane, name, args)
        return _span_class(lane, name, args)

    def time_device(self, timer: DeviceTimer) -> None:
        """Spans with `device=True` are timed by its events from now on, in lanes of its own."""
        self._device = timer

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
        return [span for lane in (*self._all_lanes(), *self._device_lanes()) for span in lane.drain()]

    def ledger(self) -> Ledger:
        """Every lane's sums up to now, open spans included; a device's up to what it is known to have done."""
        return Ledger({lane.name: lane.ledger() for lane in (*self._all_lanes(), *self._device_lanes())})

    def lane_states(self) -> list[LaneState]:
        """What every lane is at, for another thread that must not wait for any of them."""
        return [lane.state() for lane in self._all_lanes()]

    def now_ns(self) -> int:
        """On the clock of the spans."""
        return self._clock()

    def step_mark(self) -> dict[str, int]:
        """Exclusive ns per span name in this thread's lane since the last mark; `unaccounted` included, so that they sum to
        the time passed."""
        return (self._here.lane or self._open_lane()).mark()

    def _open_lane(self) -> Lane:
        thread = threading.current_thread()
        lane = self._here.lane = self._new_lane("main" if thread is threading.main_thread() else thread.name)
        return lane

    def _task_lane(self) -> Lane:
        """In a thread that runs an event loop."""
        here, task = self._here, current_task()
        lane = here.of_tasks.get(task)
        if lane is not None:
            return lane
        thread_lane = here.lane or self._open_lane()
        if task is None:  # a callback of the loop, which cannot await
            return thread_lane
        lane = here.free.pop() if here.free else self._new_lane(f"{thread_lane.name}/task")
        lane.begin_task()
        here.of_tasks[task] = lane
        task.add_done_callback(self._end_task)
        return lane

    def _end_task(self, task: Task) -> None:
        lane = self._here.of_tasks.pop(task)
        lane.end_task()
        self._here.free.append(lane)

    def _new_lane(self, base: str) -> Lane:
        with self._lanes_lock:
            name, number = base, 1
            while name in self._lanes:
                number += 1
                name = f"{base}-{number}"
            lane = self._lanes[name] = Lane(name, self._clock, self.keep_spans)
        return lane

    def _device_lanes(self) -> Sequence[Lane]:
        return self._device.lanes() if self._device else ()

    def _all_lanes(self) -> list[Lane]:
        with self._lanes_lock:
            return list(self._lanes.values())


_current: Recorder | None = None
_plain_class: type[Span] = Span
"""What spans are made of, but for delays."""
_pause: Callable[[str], None] | None = None
"""Called in every span that opens, with its name; None while nothing is delayed."""
_paused: dict[type[Span], type[Span]] = {}
"""Class → the one whose spans call `_pause`."""
_span_class: type[Span] = Span
"""`_plain_class`, with `_pause` where there is one: a span that is not delayed does not even ask."""
_NOT_RECORDING: AbstractContextManager[None] = nullcontext()


def span(name: str, *, device: bool = False, awaits: bool = True, **args: object) -> AbstractContextManager[None]:
    """Time the block under this name in the recorder of the process; without one, do nothing. `device` times it on the device
    as well, where there is one whose work only begins here. A block of a coroutine that does not await says `awaits=False`: it
    is booked in the lane of its thread, and its task needs none."""
    recorder = _current
    if recorder is None:
        return _NOT_RECORDING
    in_thread = not awaits or _get_running_loop() is None
    lane = (recorder._here.lane or recorder._open_lane()) if in_thread else recorder._task_lane()
    if device and recorder._device is not None:
        return recorder._device.span(lane, name, args)
    return _span_class(lane, name, args)


def use_span_class(span_class: type[Span]) -> None:
    """Make every span of this class from now on, in any thread."""
    global _plain_class, _span_class
    _plain_class = span_class
    _span_class = with_pause(span_class)


def pause_spans(pause: Callable[[str], None] | None) -> None:
    """Call `pause` with the name of every span that opens from now on, in any thread: its time is the span's own. None ends
    that."""
    global _pause, _paused, _span_class
    _pause, _paused = pause, {}
    _span_class = with_pause(_plain_class)


def with_pause(span_class: type[SpanClass]) -> type[SpanClass]:
    """Return the class whose spans call what `pause_spans` was given: the class itself where it was given nothing."""
    pause = _pause
    if pause is None:
        return span_class
    made = _paused.get(span_class)
    if made is None:

        def enter(self: Span) -> None:
            span_class.__enter__(self)
            pause(self.name)

        made = _paused[span_class] = type(f"Paused{span_class.__name__}", (span_class,), {"__slots__": (), "__enter__": enter})
    return cast(type[SpanClass], made)


def user_span(name: str, *, device: bool = False, awaits: bool = True, **args: object) -> AbstractContextManager[None]:
    """`redline.span`: a name without a section gets the section `user`."""
    return span(name if "." in name else f"user.{name}", device=device, awaits=awaits, **args)


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


def _forget_recorder() -> None:
    global _current
    _current = None


# A forked child would go on filling its copy of the recorder, which is never read. It may begin one of its own.
os.register_at_fork(after_in_child=_forget_recorder)


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
