"""Finds which events of two processes are the same: collectives and graph replays end together on all of their ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.lab.traces.names import is_collective, is_cpu_collective, is_transfer
from redline.lab.traces.timeline import Timeline, Work

TOLERANCE_NS = {"kernel": 30_000, "graph": 300_000, "cpu": 5_000_000}
"""How far apart the ends of one collective may be on two ranks, by what was recorded of it."""
FEWEST = 4
"""Events from which on a pattern can be told from chance."""


@dataclass(slots=True, frozen=True)
class Joint:
    """What one process does together with others, by its end."""

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    row: np.ndarray
    """Rows of `Timeline.ranges` where `kind` is cpu, else of `Timeline.work`."""
    kind: str
    """kernel, graph (whole replays, in which collectives are not seen) or cpu."""

    def __len__(self) -> int:
        return len(self.end)


@dataclass(slots=True, frozen=True)
class Match:
    """How two processes go together."""

    score: float
    """0: no better than chance; 1: every event of one is an event of the other."""
    offset_ns: int
    """How far the second clock is ahead, where that is more than the tolerance; else 0."""
    first: np.ndarray
    second: np.ndarray
    """Places of the same events in the two `Joint`s."""


def joints(timeline: Timeline) -> list[Joint]:
    """Return for each process what it does with others: its collectives on the device, replays, or collectives on the CPU."""
    work, ranges = timeline.work, timeline.ranges
    kernel = timeline.named(is_collective)[work.name] if len(work) else np.empty(0, bool)
    graph = work.kind == Work.GRAPH
    found = []
    for process in range(len(timeline.processes)):
        mine = timeline.work_process == process if len(work) else kernel
        rows, kind = np.flatnonzero(mine & kernel), "kernel"
        if (mine & graph).any():
            rows, kind = np.flatnonzero(mine & (graph | kernel)), "graph"
        if not mine.any() and len(ranges):
            found.append(_on_cpu(timeline, process))
            continue
        rows = rows[np.argsort(work.end[rows], kind="stable")]
        found.append(Joint(work.start[rows], work.end[rows], work.name[rows], rows, kind))
    return found


def _on_cpu(timeline: Timeline, process: int) -> Joint:
    """Return the calls of collectives in their order. A call may return before its transfer is over, which ends on all ranks
    at once: that is the end, where the backend recorded one transfer for each call."""
    ranges, mine = timeline.ranges, timeline.range_process == process
    rows = np.flatnonzero(mine & timeline.named(is_cpu_collective)[ranges.name])
    transfers = np.flatnonzero(mine & timeline.named(is_transfer)[ranges.name])
    end = ranges.end[transfers] if len(transfers) == len(rows) else ranges.end[rows]
    return Joint(ranges.start[rows], np.maximum.accumulate(end) if len(end) else end, ranges.name[rows], rows, "cpu")


def match(a: Joint, b: Joint, *, one_clock: bool = False) -> Match:
    """Compare two processes: by the order of their events where it is the same, else by ends that are near each other.

    With `one_clock` events that are further apart than the tolerance are not the same, however regular they are.
    """
    none = Match(0.0, 0, np.empty(0, int), np.empty(0, int))
    if min(len(a), len(b)) < FEWEST or a.kind != b.kind:
        return none
    tolerance = TOLERANCE_NS[a.kind]
    by_order = _by_order(a, b, tolerance, one_clock=one_clock)
    if by_order.score >= 1.0:
        return by_order
    return max(by_order, _by_ends(a, b, tolerance), key=lambda found: found.score)


def _by_order(a: Joint, b: Joint, tolerance: int, *, one_clock: bool) -> Match:
    """Take the events in their order: the same names, and ends that differ by one offset."""
    if len(a) != len(b) or not np.array_equal(a.name, b.name):
        return Match(0.0, 0, np.empty(0, int), np.empty(0, int))
    apart = b.end - a.end
    offset = int(np.median(apart))
    pause = float(np.median(np.diff(a.end))) if len(a) > 1 else 0.0
    is_one = float(np.median(np.abs(apart - offset))) <= min(tolerance, max(pause / 4, 1_000))
    is_one = is_one and not (one_clock and abs(offset) > tolerance)
    places = np.arange(len(a))
    return Match(1.0 if is_one else 0.0, offset if abs(offset) > tolerance else 0, places, places)


def _by_ends(a: Joint, b: Joint, tolerance: int) -> Match:
    """Pair events that are each other's nearest in time, and say by how much more that is than chance."""
    nearest_b, nearest_a = _nearest(a.end, b.end), _nearest(b.end, a.end)
    places = np.arange(len(a))
    paired = (nearest_a[nearest_b] == places) & (np.abs(b.end[nearest_b] - a.end) <= tolerance)
    low, high = max(a.end[0], b.end[0]) - tolerance, min(a.end[-1], b.end[-1]) + tolerance
    shared = ((a.end >= low) & (a.end <= high)).sum(), ((b.end >= low) & (b.end <= high)).sum()
    if min(shared) < FEWEST:
        return Match(0.0, 0, np.empty(0, int), np.empty(0, int))
    hits = float(paired.sum()) / float(max(shared))
    chance = min(0.9, 2 * tolerance * float(shared[1]) / max(float(high - low), 1.0))
    return Match(max(0.0, (hits - chance) / (1 - chance)), 0, places[paired], nearest_b[paired])


def _nearest(times: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return for each time the place of the nearest among sorted others."""
    right = np.clip(np.searchsorted(among, times), 1, max(1, len(among) - 1))
    left = right - 1
    right = np.minimum(right, len(among) - 1)
    return np.where(np.abs(among[left] - times) <= np.abs(among[right] - times), left, right)
