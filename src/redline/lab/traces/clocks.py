"""Whether the times of devices can be compared with those of the threads that gave them work: nothing begins before it is asked
for. Units that a tool mixed up, and clocks that were never lined up, show there."""

from __future__ import annotations

import numpy as np

from redline.lab.traces.timeline import Kind, Timeline

EARLY_NS = 1_000_000
"""What a device may begin before the call that launched it: profilers line their clocks up to some microseconds."""
OFTEN = 0.1
"""Share of the work of a process from which on its beginning early is no accident."""
LATE_NS = 1_000_000_000
"""Work that waits in a device's queue for less than this may be launched far ahead."""


def clocks_apart(timeline: Timeline) -> dict[int, int]:
    """Return the processes whose devices and threads cannot be compared: process → nanoseconds by which work usually begins
    after the call that launched it; below 0, before it."""
    ranges, work = timeline.ranges, timeline.work
    if not len(ranges) or not len(work):
        return {}
    owner, whose, found = timeline.range_process, timeline.work_process, dict[int, int]()
    calls = np.flatnonzero((ranges.kind == Kind.RUNTIME) & (ranges.correlation >= 0))
    for process in np.unique(whose).tolist():
        own, rows = calls[owner[calls] == process], np.flatnonzero(whose == process)
        after = _after(timeline, own, rows[work.correlation[rows] >= 0])
        mine = owner == process
        if len(after) and _are_apart(after, int(ranges.end[mine].max() - ranges.start[mine].min())):
            early = after[after < -EARLY_NS]
            found[process] = int(np.median(early if len(early) else after))
    return found


def _after(timeline: Timeline, calls: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return how long after the beginning of its call each piece of work begins, of those whose call was recorded."""
    ranges, work = timeline.ranges, timeline.work
    numbers, first = np.unique(ranges.correlation[calls], return_index=True)  # the first call of a number that is there twice
    place = np.minimum(np.searchsorted(numbers, work.correlation[rows]), max(0, len(numbers) - 1))
    known = numbers[place] == work.correlation[rows] if len(numbers) else np.zeros(len(rows), bool)
    return work.start[rows[known]] - ranges.start[calls[first[place[known]]]]


def _are_apart(after: np.ndarray, recorded_ns: int) -> bool:
    """Whether work begins before it is asked for, or usually so late that the threads had long ended."""
    return float(np.mean(after < -EARLY_NS)) > OFTEN or float(np.median(after)) > max(LATE_NS, recorded_ns)
