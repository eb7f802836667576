"""Pairs until they are enough: A against itself first, then A against B.

A pair is two fresh processes, one of each side, that take turns: in every round each runs once, in an order drawn by lot.
What neighbours, caches and clocks do hits both; what a process happens to get at its start (pages, threads, cores) is drawn
anew for each pair. The pair's log ratio is the median over its rounds, so that a burst in one of them says nothing; pairs are
independent, and the statistics see nothing else.

When to stop is decided by the noise alone, which says nothing about who is better, or by a difference that chance would show
less than once in a thousand times (`EARLY`); and only at a few looks, each half as many pairs again after the one before.
Looking after every pair, and stopping when it suits, finds differences that are not there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redline.errors import CompareError
from redline.lab.evidence.sample_size import MIN_PAIRS, centred, noise, pairs_needed
from redline.lab.evidence.statistics import hodges_lehmann, signed_rank

EARLY = 0.001
"""The p-value that ends an experiment before the planned number of pairs (Haybittle and Peto)."""

GROWTH = 1.5
"""From one look to the next."""

Phase = Literal["A/A", "A/B"]
Sample = Mapping[str, float]
"""Metric → value, of one round on one side."""


@dataclass(slots=True, frozen=True)
class Round:
    a: Sample
    b: Sample
    a_first: bool


@dataclass(slots=True, frozen=True)
class Pair:
    rounds: Sequence[Round]
    peak_bytes: tuple[float, float] | None = None
    """Peak memory of each process; None where it was not measured."""

    def log_ratio(self, metric: Metric) -> float:
        """Above 0: B is better. Where each side was first often enough, both orders count alike, so that what it costs to be
        first cancels."""
        if not self.is_balanced:
            return statistics.median(metric.log_ratio(each) for each in self.rounds)
        orders = ([metric.log_ratio(each) for each in self.rounds if each.a_first is which] for which in (True, False))
        return statistics.fmean(statistics.median(logs) for logs in orders)

    @property
    def is_balanced(self) -> bool:
        """Each side was first in enough rounds for a median that a single one does not move."""
        num_first = sum(each.a_first for each in self.rounds)
        return min(num_first, len(self.rounds) - num_first) >= ENOUGH_ROUNDS

    def as_json(self) -> dict[str, Any]:
        rounds = [{"A": dict(each.a), "B": dict(each.b), "first": "A" if each.a_first else "B"} for each in self.rounds]
        peaks = None if self.peak_bytes is None else {"A": self.peak_bytes[0], "B": self.peak_bytes[1]}
        return {"rounds": rounds, "peak_bytes": peaks}


ENOUGH_ROUNDS = 4
"""In which a side is first."""


@dataclass(slots=True, frozen=True)
class Metric:
    name: str
    larger_is_better: bool = False
    unit: str = "s"

    @property
    def is_speed(self) -> bool:
        return self.unit in ("s", "tok/s")

    def log_ratio(self, each: Round) -> float:
        a, b = each.a.get(self.name, 0.0), each.b.get(self.name, 0.0)
        if a <= 0 or b <= 0:
            raise CompareError(f"{self.name} is {a:g} for A and {b:g} for B in a round: no ratio", "--metric with one above 0")
        return math.log(b / a) if self.larger_is_better else math.log(a / b)


@dataclass(slots=True, frozen=True)
class Wish:
    """What is asked for, and what it may cost."""

    effect: float = 0.03
    """The smallest difference that has to be found."""
    tolerance: float = 0.0
    """How much slower B may be."""
    max_pairs: int = 60
    """Pairs of A against B at the most."""
    max_seconds: float = math.inf


@dataclass(slots=True)
class Experiment:
    """What was measured so far."""

    metric: Metric
    wish: Wish
    against_itself: list[Pair] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    next_look: int = MIN_PAIRS
    """Pairs of A against B at which to look whether they are enough."""
    out_of_time: bool = False

    @property
    def noise_log_ratios(self) -> list[float]:
        return [pair.log_ratio(self.metric) for pair in self.against_itself]

    @property
    def log_ratios(self) -> list[float]:
        return [pair.log_ratio(self.metric) for pair in self.pairs]

    @property
    def noise(self) -> float:
        """What a pair varies by: of A against itself, and of A against B around their own middle."""
        return noise(self._residuals)

    @property
    def pairs_wanted(self) -> float:
        """For the effect that is asked for, by that noise."""
        return pairs_needed(self._residuals, self.wish.effect)

    @property
    def _residuals(self) -> list[float]:
        return centred(self.noise_log_ratios) + centred(self.log_ratios)

    def is_enough(self) -> bool:
        """To be asked after every pair; looks when it is time to."""
        seen, most = len(self.pairs), self.wish.max_pairs
        if seen < min(self.next_look, most):
            return False
        wanted = self.pairs_wanted
        if seen >= min(wanted, most) or signed_rank(self.log_ratios) < EARLY:
            return True
        self.next_look = int(min(wanted, math.ceil(seen * GROWTH), most))
        return False

    @property
    def ratio(self) -> float:
        """So far."""
        return math.exp(hodges_lehmann(self.log_ratios).value)


def run(
    metric: Metric,
    wish: Wish,
    measure: Callable[[Phase, int], Pair],
    clock: Callable[[], float],
    tell: Callable[[Experiment, Phase], None] = lambda experiment, phase: None,
) -> Experiment:
    """`measure` makes the pair of that number; `clock` gives seconds; `tell` hears after every pair."""
    experiment = Experiment(metric, wish)
    began = clock()
    phases: dict[Phase, list[Pair]] = {"A/A": experiment.against_itself, "A/B": experiment.pairs}
    for phase, pairs in phases.items():
        while not _is_complete(experiment, phase):
            if clock() - began > wish.max_seconds:
                experiment.out_of_time = True
                return experiment
            pairs.append(measure(phase, len(pairs)))
            tell(experiment, phase)
    return experiment


def _is_complete(experiment: Experiment, phase: str) -> bool:
    return len(experiment.against_itself) >= MIN_PAIRS if phase == "A/A" else experiment.is_enough()
