"""When a side is warm, found out and not guessed.

Compilers, caches and allocators make the first runs slow, for a time that is not known beforehand. A side therefore runs until
its last `WINDOW` runs

- show no trend: not each faster than the one before by `TREND` over all of them, and
- are within noise of each other: the slowest takes at most `NOISE` times their median. What is compiled takes longer than that.

A machine that others work on may never be that calm, so there is a most number of runs, and of seconds. Which it was is kept.

Where every run takes a side further, as a training step does, sides that are compared warm up together: all take as many runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")

WINDOW = 3
TREND = 0.05
NOISE = 1.5
MAX_RUNS = 12
MAX_SECONDS = 60.0


@dataclass(slots=True)
class WarmUp:
    """The runs of a side that do not count."""

    seconds: list[float] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        return is_steady(self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "settled": self.is_settled}

    def time(self, run: Callable[[int], T]) -> T:
        """Run once more and keep how long it took; returns what the run gave."""
        started = time.perf_counter()
        result = run(len(self.seconds))
        self.seconds.append(time.perf_counter() - started)
        return result

    def is_over(self, max_runs: int, max_seconds: float) -> bool:
        """Whether the runs are steady, or were as many or as long as they may be."""
        return self.is_settled or len(self.seconds) >= max_runs or sum(self.seconds) >= max_seconds


def is_steady(seconds: Sequence[float]) -> bool:
    last = seconds[-WINDOW:]
    if len(last) < WINDOW:
        return False
    falling = all(later < earlier for earlier, later in pairwise(last))
    return not (falling and last[-1] < (1 - TREND) * last[0]) and max(last) <= NOISE * statistics.median(last)


def warm_up(run: Callable[[int], T], max_runs: int = MAX_RUNS, max_seconds: float = MAX_SECONDS) -> tuple[T, WarmUp]:
    """Run 0, 1, … until the runs are steady, or it takes too long: what the last one gave, and how long each took."""
    found = WarmUp()
    while True:
        result = found.time(run)
        if found.is_over(max_runs, max_seconds):
            return result, found


def warm_up_together(
    sides: Mapping[str, Callable[[int], T]], max_runs: int = MAX_RUNS, max_seconds: float = MAX_SECONDS
) -> tuple[dict[str, T], dict[str, WarmUp]]:
    """Run the sides in turn until the warm-up of each is over, all of them as often: what the last run of each gave, and how
    long each took. `max_seconds` are those of one side."""
    found = {name: WarmUp() for name in sides}
    while True:
        last = {name: found[name].time(run) for name, run in sides.items()}
        if all(each.is_over(max_runs, max_seconds) for each in found.values()):
            return last, found
