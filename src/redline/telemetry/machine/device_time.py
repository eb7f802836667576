"""Device time: what a host only asks for, timed by events in the device's own queue.

    with span("trainer.forward", device=True):
        ...

The host marks where the work begins and where it ends, and goes on. Times are read when the device has been there, at the next
`drain` or `ledger`; no thread waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from redline.telemetry.spans import Lane, Span, with_pause

ANCHOR_NS = 1_000_000_000
"""How far behind the event may be from which times are measured."""
IDLE = "wait.for_work"
"""What lies between two spans of a stream: it had nothing to do, or something that no span asks about."""


class DeviceEvent(Protocol):
    """A mark in a device's queue of work, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put it at the end of the current stream."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another that the device has come to."""
        ...


@dataclass(slots=True)
class _DeviceInterval:
    """A device span whose times may not be known yet."""

    thread: str
    name: str
    args: dict[str, object]
    start: DeviceEvent
    end: DeviceEvent
    is_outermost: bool
    start_ns: int = 0
    end_ns: int = 0


class DeviceSpan(Span):
    """A span that also marks, in the device's queue, where its work begins and ends."""

    __slots__ = ("_is_outermost", "_start", "_timer")

    def __init__(self, timer: DeviceTimer, lane: Lane, name: str, args: dict[str, object]) -> None:
        super().__init__(lane, name, args)
        self._timer = timer

    def __enter__(self) -> None:
        self._is_outermost = not any(isinstance(span, DeviceSpan) for span in self._lane.open)
        super().__enter__()
        self._start = self._timer.mark()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        end = self._timer.mark()
        super().__exit__(kind, error, traceback)
        self._timer.ended(_DeviceInterval(self.lane, self.name, self.args, self._start, end, self._is_outermost))


class DeviceTimer:
    """When a device did what a host only asked for, known once the device has been there; no thread waits for it.

    Each thread has its own stream, and so its own lane here: `cuda/main`. It is never `unaccounted`: between two spans it
    waits for work.
    """

    def __init__(
        self,
        make_event: Callable[[], DeviceEvent],
        name: str = "cuda",
        *,
        keep_spans: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Waits for the device once, to know where its clock is on ours."""
        self._keep_spans = keep_spans
        self._make_event = make_event
        self._name = name
        self._events: deque[DeviceEvent] = deque()
        """Read, and free to be recorded again."""
        self._pending: deque[_DeviceInterval] = deque()
        self._trees: defaultdict[str, list[_DeviceInterval]] = defaultdict(list)
        """Lane → intervals whose outermost one has not ended yet."""
        self._lanes: dict[str, _Replayed] = {}
        self._lock = threading.Lock()
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._origin_ns = self._anchor_ns = clock()

    def span(self, lane: Lane, name: str, args: dict[str, object]) -> DeviceSpan:
        return with_pause(DeviceSpan)(self, lane, name, args)

    def mark(self) -> DeviceEvent:
        try:
            event = self._events.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        return event

    def ended(self, interval: _DeviceInterval) -> None:
        self._pending.append(interval)

    def lanes(self) -> list[Lane]:
        """With everything the device is known to have done."""
        with self._lock:
            self._read_events()
            return [replayed.lane for replayed in self._lanes.values()]

    def _read_events(self) -> None:
        while self._pending and self._pending[0].end.query():
            interval = self._pending.popleft()
            interval.start_ns, interval.end_ns = self._time_ns(interval.start), self._time_ns(interval.end)
            tree = self._trees[interval.thread]
            tree.append(interval)
            self._events.append(interval.start)
            self._move_anchor(interval)
            if interval.is_outermost:
                self._lane(interval.thread).replay(self._trees.pop(interval.thread))

    def _time_ns(self, event: DeviceEvent) -> int:
        return self._anchor_ns + round(self._anchor.elapsed_time(event) * 1e6)

    def _move_anchor(self, interval: _DeviceInterval) -> None:
        """Milliseconds in float32 are coarse once many have passed: from an hour ago, a quarter of one. The anchor follows."""
        if interval.end_ns - self._anchor_ns > ANCHOR_NS:
            self._events.append(self._anchor)
            self._anchor, self._anchor_ns = interval.end, interval.end_ns
        else:
            self._events.append(interval.end)

    def _lane(self, thread: str) -> _Replayed:
        if thread not in self._lanes:
            self._lanes[thread] = _Replayed(f"{self._name}/{thread}", self._origin_ns, self._keep_spans)
        return self._lanes[thread]


class _Replayed:
    """A lane that is told afterwards what happened, on a clock that stands where the telling is."""

    def __init__(self, name: str, start_ns: int, keep_spans: bool) -> None:
        self._now = start_ns
        self.lane = Lane(name, lambda: self._now, keep_spans)
        self.lane.open[0].name = IDLE

    def replay(self, intervals: list[_DeviceInterval]) -> None:
        """Properly nested, but for the rounding of the device's clock."""
        around: list[tuple[int, Span]] = []
        for interval in sorted(intervals, key=lambda interval: (interval.start_ns, -interval.end_ns)):
            while around and around[-1][0] <= interval.start_ns:
                self._leave(*around.pop())
            end_ns = min(interval.end_ns, around[-1][0]) if around else interval.end_ns
            span = Span(self.lane, interval.name, interval.args)
            self._now = max(self._now, interval.start_ns)
            span.__enter__()
            around.append((end_ns, span))
        while around:
            self._leave(*around.pop())

    def _leave(self, end_ns: int, span: Span) -> None:
        self._now = max(self._now, end_ns)
        span.__exit__(None, None, None)
