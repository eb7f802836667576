"""Walks from a stall to the CPU work that held up the launch: on its thread, or across a message on the sender's.

While the launching thread waits for a message, what counts is what the sender did until it had sent; so a slice of a stall may
belong to another process. Every moment of a stall becomes a slice: together they add up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from redline.lab.traces.names import class_of, is_cpu_collective, normal, sends, waits
from redline.lab.traces.timeline import Kind, Timeline

MOST_HOPS = 4
"""Messages that are followed at most."""
WOKEN_NS = 1_000_000
"""How long a thread may take to wake up when what it waits for was sent, or when it has sent."""
APART = 0.2
"""Share of a call by which the sender must begin later, or be done earlier, to be told from a peer that waits as well."""
FINEST = 0.002
"""Share of a stall below which a range is not looked at by itself."""
LOOKED_AT = 256
"""Calls of one name that are looked at for a sender, back from the end of the wait."""


@dataclass(slots=True, frozen=True)
class Slice:
    """A part of a stall, and what the thread that mattered did in it."""

    start: int
    end: int
    thread: int
    """−1 where the capture does not tell."""
    row: int
    """The innermost range of that thread, −1 where it recorded none."""
    hops: int
    """Messages between the late launch and here."""


class ThreadView:
    """The ranges of one thread with the range that holds each."""

    def __init__(self, timeline: Timeline, thread: int) -> None:
        self.rows = np.flatnonzero(timeline.ranges.thread == thread)
        self.start = timeline.ranges.start[self.rows]
        self.end = timeline.ranges.end[self.rows]
        self.parent = self._parents()

    def _parents(self) -> np.ndarray:
        parents = np.full(len(self.rows), -1, np.int64)
        stack: list[int] = []
        ends = self.end.tolist()
        for place, start in enumerate(self.start.tolist()):
            while stack and ends[stack[-1]] <= start:
                stack.pop()
            parents[place] = stack[-1] if stack else -1
            stack.append(place)
        return parents

    def innermost(self, moment: int) -> int:
        """Return the place of the innermost range at a moment, −1 for none."""
        place = int(np.searchsorted(self.start, moment, side="right")) - 1
        while place >= 0 and self.end[place] <= moment:
            place = int(self.parent[place])
        return place

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Give the stretches between two moments, each with its innermost range's place or −1.

        Ranges below a `FINEST` part of the whole count for what holds them: there may be thousands of them.
        """
        first, last = np.searchsorted(self.start, start, side="right"), np.searchsorted(self.start, end)
        large = self.end[first:last] - self.start[first:last] >= (end - start) * FINEST
        stack, moment = self.chain(self.innermost(start)), start
        for place in [*(first + np.flatnonzero(large)).tolist(), -1]:
            begins = int(self.start[place]) if place >= 0 else end
            while moment < begins:
                until = min(begins, int(self.end[stack[-1]])) if stack else begins
                if until > moment:
                    yield moment, until, stack[-1] if stack else -1
                moment = max(moment, until)
                while stack and self.end[stack[-1]] <= moment:
                    stack.pop()
            stack.append(place)

    def chain(self, place: int) -> list[int]:
        """Return the places from the outermost range to this one."""
        found = []
        while place >= 0:
            found.append(place)
            place = int(self.parent[place])
        return found[::-1]


class Walker:
    """Follows stalls of one engine through its own processes and those of no engine."""

    def __init__(self, timeline: Timeline, processes: set[int]) -> None:
        self.timeline = timeline
        self._mine = np.isin(timeline.range_process, list(processes))
        self._views: dict[int, ThreadView] = {}
        self._same: dict[str, _Calls] = {}
        self._sending: _Calls | None = None
        self._owner = np.array([lane.process for lane in timeline.threads] or [0])
        self._normal = np.array([normal(name) for name in timeline.names] or [""], dtype=object)

    def view(self, thread: int) -> ThreadView:
        if thread not in self._views:
            self._views[thread] = ThreadView(self.timeline, thread)
        return self._views[thread]

    def name(self, row: int) -> str:
        return self.timeline.names[self.timeline.ranges.name[row]]

    def slices(self, thread: int, start: int, end: int, hops: int = 0) -> Iterator[Slice]:
        """Give everything between two moments as slices: what this thread did, or what it waited for."""
        if thread < 0:
            yield Slice(start, end, -1, -1, hops)
            return
        view = self.view(thread)
        for begins, ends, place in view.pieces(start, end):
            row = int(view.rows[place]) if place >= 0 else -1
            message = self._message(view, place, begins) if place >= 0 and hops < MOST_HOPS else None
            sent = min(ends, message[1]) if message else begins
            if message and sent > begins:
                yield from self.slices(message[0], begins, sent, hops + 1)
            if ends > max(begins, sent):
                yield Slice(max(begins, sent), ends, thread, row, hops)

    def _message(self, view: ThreadView, place: int, moment: int) -> tuple[int, int] | None:
        """Return the thread that sent what is waited for here and when it had sent it; None where nobody is waited for."""
        for waiting in reversed(view.chain(place)):
            row = int(view.rows[waiting])
            name = self.name(row)
            is_ipc = class_of(name) == "ipc"
            if is_cpu_collective(name) or (is_ipc and not waits(name)):
                return self._peer(row, moment)  # the same call elsewhere; of calls that only wait there are many
            if waits(name) and (is_ipc or self.timeline.ranges.kind[row] == Kind.SYSTEM):
                return self._sender(row, moment)
        return None

    def _peer(self, row: int, moment: int) -> tuple[int, int] | None:
        """Look in other processes for the same call that began later, or was done earlier: it is the one that sends."""
        ranges, owner = self.timeline.ranges, self._owner
        start, end = int(ranges.start[row]), int(ranges.end[row])
        rows = self._named(str(self._normal[ranges.name[row]])).before(end)
        rows = rows[(owner[ranges.thread[rows]] != owner[ranges.thread[row]]) & (ranges.end[rows] > moment)]
        apart = (end - start) * APART
        rows = rows[(ranges.start[rows] > start + apart) | (ranges.end[rows] < end - apart)]
        if not len(rows):
            return None
        first = rows[np.argmin(ranges.end[rows])]
        return int(ranges.thread[first]), int(min(ranges.end[first], end))

    def _sender(self, row: int, moment: int) -> tuple[int, int] | None:
        """Look in other threads for the call that sends and was done when this wait was over, as nearly as threads wake up."""
        ranges = self.timeline.ranges
        end = int(ranges.end[row])
        near = max(WOKEN_NS, int(APART * (end - ranges.start[row])))
        if self._sending is None:
            self._sending = self._calls(self.timeline.named(sends))
        rows = self._sending.before(end)
        apart = np.abs(ranges.end[rows] - end)
        is_it = (ranges.thread[rows] != ranges.thread[row]) & (ranges.end[rows] > moment) & (apart <= near)
        if not is_it.any():
            return None
        nearest = rows[is_it][np.argmin(apart[is_it])]
        return int(ranges.thread[nearest]), int(min(ranges.end[nearest], end))

    def _named(self, name: str) -> _Calls:
        if name not in self._same:
            self._same[name] = self._calls(self._normal == name)
        return self._same[name]

    def _calls(self, wanted: np.ndarray) -> _Calls:
        rows = np.flatnonzero(self._mine & wanted[self.timeline.ranges.name])
        return _Calls(rows, self.timeline.ranges.start[rows])


@dataclass(slots=True, frozen=True)
class _Calls:
    """Rows of calls of some names, by start."""

    rows: np.ndarray
    start: np.ndarray

    def before(self, moment: int) -> np.ndarray:
        """Return the last ones that begin before a moment."""
        until = int(np.searchsorted(self.start, moment))
        return self.rows[max(0, until - LOOKED_AT) : until]
