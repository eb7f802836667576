"""When a side is warm, found out and not guessed.

Compilers, caches and allocators make the first runs slow, for a time that is not known beforehand. A side therefore runs until
its last `WINDOW` runs

- show no trend: not each faster than the one before by `TREND` over all of them, and
- are within noise of each other: the slowest takes at most `NOISE` times their median. What is compiled takes longer than that.

A machine that others work on may never be that calm, so there is a most number of runs, and of seconds. Which it was is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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
        started = time.perf_counter()
        result = run(len(found.seconds))
        found.seconds.append(time.perf_counter() - started)
        if found.is_settled or len(found.seconds) >= max_runs or sum(found.seconds) >= max_seconds:
            return result, found
