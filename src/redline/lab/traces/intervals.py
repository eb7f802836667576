"""Sets of moments as sorted intervals that do not touch. All times are integers, in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, frozen=True)
class Intervals:
    """A set of moments. `union` makes one from intervals in any order."""

    start: np.ndarray
    """int64, ascending."""
    end: np.ndarray
    """int64; every interval ends before the next one starts."""

    @staticmethod
    def union(start: np.ndarray, end: np.ndarray) -> Intervals:
        """Return the moments in at least one of the intervals; empty and reversed ones hold none."""
        real = end > start
        order = np.argsort(start[real], kind="stable")
        start, until = start[real][order], np.maximum.accumulate(end[real][order])
        if not len(start):
            return Intervals(np.empty(0, np.int64), np.empty(0, np.int64))
        begins = np.concatenate(([True], start[1:] > until[:-1]))
        return Intervals(start[begins], until[np.concatenate((begins[1:], [True]))])

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.start.tolist(), self.end.tolist(), strict=True)

    @property
    def total(self) -> int:
        """Nanoseconds in the set."""
        return int((self.end - self.start).sum())

    def clipped(self, start: int, end: int) -> Intervals:
        """Return the part between two moments."""
        return Intervals.union(np.clip(self.start, start, end), np.clip(self.end, start, end))

    def has_any(self, start: int, end: int) -> bool:
        """Whether some moment between two is in the set."""
        place = int(np.searchsorted(self.end, start, side="right"))
        return place < len(self.start) and bool(self.start[place] < end)

    def without(self, other: Intervals) -> Intervals:
        """Return the moments that are here and not in the other set."""
        if not len(self):
            return self
        low, high = int(self.start[0]), int(self.end[-1])
        return both(self, other.outside(low, high))

    def outside(self, start: int, end: int) -> Intervals:
        """Return the moments between two that are not in the set."""
        inside = self.clipped(start, end)
        return Intervals.union(np.concatenate(([start], inside.end)), np.concatenate((inside.start, [end])))


def both(a: Intervals, b: Intervals) -> Intervals:
    """Return the moments in both sets."""
    times = np.concatenate((a.start, a.end, b.start, b.end))
    change = np.concatenate((np.ones(len(a)), -np.ones(len(a)), np.ones(len(b)), -np.ones(len(b))))
    order = np.argsort(times, kind="stable")
    times, depth = times[order], np.cumsum(change[order])
    if len(times) < 2:
        return Intervals.union(times, times)
    inside = depth[:-1] == 2
    return Intervals.union(times[:-1][inside], times[1:][inside])


def any_of(sets: Sequence[Intervals]) -> Intervals:
    """Return the moments in at least one of the sets."""
    if not sets:
        return Intervals.union(np.empty(0, np.int64), np.empty(0, np.int64))
    return Intervals.union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))
