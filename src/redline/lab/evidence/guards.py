"""What must not get worse while something else gets faster: memory, reward, the mismatch between engine and trainer.

A guard is checked one-sided: it is broken when B is worse by more than its tolerance at 95%, holds when it is not at 95%, and
is unclear in between. What is unclear is said, and fails nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redline.errors import ConfigError
from redline.lab.evidence.experiment import Pair
from redline.lab.evidence.statistics import hodges_lehmann

ONE_SIDED = 0.90
"""The level of the interval whose either end is a one-sided bound at 95%."""
KL_FLOOR = 1e-4
"""Nats. Below it a mismatch is rounding, and twice as much is rounding too."""

State = Literal["holds", "broken", "unclear"]


@dataclass(slots=True, frozen=True)
class Guard:
    name: str
    change: float
    """B against A: memory in log units, the others as a difference."""
    interval: tuple[float, float] | None
    tolerance: float
    """In the units of the change, towards worse."""
    larger_is_worse: bool

    @property
    def state(self) -> State:
        if self.interval is None:
            return "unclear"
        low, high = self.interval if self.larger_is_worse else (-self.interval[1], -self.interval[0])
        if low > self.tolerance:
            return "broken"
        return "holds" if high <= self.tolerance else "unclear"

    @property
    def words(self) -> str:
        """`memory +3%`, `no change in KL`, `reward −0.04, broken`."""
        if self.interval is None:
            return f"{self.name} unclear: too few pairs"
        if self.state == "holds" and self.interval[0] <= 0 <= self.interval[1]:
            return f"no change in {self.name}"
        tail = {"holds": "", "broken": f", beyond {self._show(self.tolerance)}", "unclear": ", unclear"}[self.state]
        return f"{self.name} {self._show(self.change)}{tail}"

    def _show(self, change: float) -> str:
        text = f"{math.expm1(change):+.1%}" if self.name == MEMORY else f"{change:+.2g}"
        return text.replace("-", "−").replace(".0%", "%")

    def as_json(self) -> dict[str, Any]:
        interval = None if self.interval is None else list(self.interval)
        return {
            "name": self.name,
            "change": self.change,
            "interval_90": interval,
            "tolerance": self.tolerance,
            "state": self.state,
        }


MEMORY, REWARD, KL = "memory", "reward", "KL"
TOLERANCES: Mapping[str, float] = {MEMORY: 0.05, REWARD: 0.05, KL: 0.5}
"""Memory and KL as a share of A's, reward as it is."""
METRICS = {REWARD: "rollouts/reward_mean", KL: "trainer/mismatch_kl"}


def read_tolerances(given: Sequence[str]) -> dict[str, float]:
    """`memory=0.1` on top of what is the custom."""
    tolerances = dict(TOLERANCES)
    for text in given:
        name, _, value = text.partition("=")
        try:
            tolerances[next(known for known in TOLERANCES if known.lower() == name.lower())] = _share(value)
        except (StopIteration, ValueError):
            raise ConfigError(
                f"--guard {text}: not of the form NAME=TOLERANCE",
                f"NAME is one of {', '.join(TOLERANCES)}; for example memory=0.1",
            ) from None
    return tolerances


def _share(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def check(pairs: Sequence[Pair], tolerances: Mapping[str, float]) -> list[Guard]:
    """Guard every metric that was measured on both sides."""
    makers: Mapping[str, Callable[[Sequence[Pair], float], Guard | None]] = {MEMORY: _memory, REWARD: _reward, KL: _kl}
    made = (makers[name](pairs, tolerance) for name, tolerance in tolerances.items())
    return [guard for guard in made if guard is not None]


def _memory(pairs: Sequence[Pair], tolerance: float) -> Guard | None:
    changes = [math.log(pair.peak_bytes[1] / pair.peak_bytes[0]) for pair in pairs if pair.peak_bytes and all(pair.peak_bytes)]
    return _guard(MEMORY, changes, math.log1p(tolerance), larger_is_worse=True)


def _reward(pairs: Sequence[Pair], tolerance: float) -> Guard | None:
    a, b = _means(pairs, METRICS[REWARD])
    return _guard(REWARD, [y - x for x, y in zip(a, b, strict=True)], tolerance, larger_is_worse=False)


def _kl(pairs: Sequence[Pair], tolerance: float) -> Guard | None:
    a, b = _means(pairs, METRICS[KL])
    if not a:
        return None
    allowed = max(KL_FLOOR, tolerance * max(KL_FLOOR, statistics.median(a)))  # where A has none, any share of it is none
    return _guard(KL, [y - x for x, y in zip(a, b, strict=True)], allowed, larger_is_worse=True)


def _guard(name: str, changes: Sequence[float], tolerance: float, *, larger_is_worse: bool) -> Guard | None:
    if not changes:
        return None
    estimate = hodges_lehmann(changes, ONE_SIDED)
    return Guard(name, estimate.value, estimate.interval, tolerance, larger_is_worse)


def _means(pairs: Sequence[Pair], metric: str) -> tuple[list[float], list[float]]:
    """Means of each pair that has the metric on both sides; a step that trained on nothing has no KL."""
    means: tuple[list[float], list[float]] = [], []
    for pair in pairs:
        both = [(each.a[metric], each.b[metric]) for each in pair.rounds if metric in each.a and metric in each.b]
        finite = [values for values in both if all(map(math.isfinite, values))]
        if finite:
            for side, values in zip(means, zip(*finite, strict=True), strict=True):
                side.append(statistics.fmean(values))
    return means
