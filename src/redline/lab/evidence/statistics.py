"""What a handful of noisy pairs can prove, without assuming any distribution: exact up to `EXACT` pairs.

A pair is two measurements taken one right after the other, in an order drawn by lot. Its log ratio is symmetric around the
log of the true ratio if the order does not matter, and that is all the signed-rank test asks for. The interval is the set of
ratios that the test does not reject; the estimate is the middle of all pairwise means (Hodges and Lehmann). A few wild pairs
move neither by much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
EXACT = 60
"""Values up to which all choices of signs are counted. Beyond, the normal approximation is off by less than 0.0005."""
PERCENTS = (50, 90, 99)


@dataclass(slots=True, frozen=True)
class Estimate:
    """A location and the interval that covers it with at least `LEVEL`; None where the pairs are too few for one."""

    value: float
    interval: tuple[float, float] | None


@dataclass(slots=True, frozen=True)
class Comparison:
    """How many times better one side is."""

    ratio: float
    interval: tuple[float, float] | None
    p_value: float
    """The p-value of the two-sided signed-rank test that there is no difference."""
    pairs: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def compare(better_if_larger: Sequence[float], than: Sequence[float]) -> Comparison:
    """The ratio of the first to the second, from pairs: `better_if_larger[i]` and `than[i]` were measured side by side."""
    return of_log_ratios([math.log(a / b) for a, b in zip(better_if_larger, than, strict=True)])


def of_log_ratios(logs: Sequence[float], level: float = LEVEL) -> Comparison:
    estimate = hodges_lehmann(logs, level)
    interval = estimate.interval and (math.exp(estimate.interval[0]), math.exp(estimate.interval[1]))
    return Comparison(math.exp(estimate.value), interval, signed_rank(logs), len(logs))


def hodges_lehmann(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """The median of all pairwise means, each value with itself included, and the interval that inverts the signed-rank test."""
    array = np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(array))
    walsh = np.sort((array[first] + array[second]) / 2)
    middle = float(walsh[(len(walsh) - 1) // 2] + walsh[len(walsh) // 2]) / 2
    below = _means_left_out(len(array), level)
    return Estimate(middle, (float(walsh[below - 1]), float(walsh[-below])) if below else None)


@functools.cache
def _means_left_out(n: int, level: float) -> int:
    """At either end: as many as there are rank sums which, together, the test rejects on one side."""
    alpha = (1 - level) / 2
    if n > EXACT:
        mean, spread = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return math.floor(mean - NormalDist().inv_cdf(1 - alpha) * spread + 0.5)
    below, tail = 0, 0.0
    for count in _rank_sums(tuple(range(1, n + 1))):
        tail += count / 2**n
        if tail > alpha:
            break
        below += 1
    return below


def signed_rank(values: Sequence[float]) -> float:
    """Wilcoxon's two-sided test that values are symmetric around 0, ties and all. Zeros say nothing and are dropped."""
    array = np.asarray(values, dtype=float)
    array = array[array != 0]
    if not len(array):
        return 1.0
    # Tied values share the mean of their ranks; twice that is a whole number.
    _, place, ties = np.unique(np.abs(array), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(ties) - ties + 1)[place]
    positive = int(doubled[array > 0].sum())
    smaller = min(positive, int(doubled.sum()) - positive)
    if len(array) > EXACT:
        # The sum of the positive ranks has mean Σ rank / 2 and variance Σ rank² / 4; it comes in steps of 2, doubled.
        spread = math.sqrt(int((doubled**2).sum())) / 2
        return min(1.0, 2 * NormalDist().cdf((smaller + 1 - doubled.sum() / 2) / spread))
    counts = _rank_sums(tuple(sorted(doubled.tolist())))
    return min(1.0, 2 * sum(counts[: smaller + 1]) / 2 ** len(array))


@functools.lru_cache(maxsize=256)
def _rank_sums(ranks: tuple[int, ...]) -> list[int]:
    """How many of the 2ⁿ choices of signs give each sum of the positive ranks."""
    counts = [1]
    for rank in ranks:
        grown = counts + [0] * rank
        for total, count in enumerate(counts):
            grown[total + rank] += count
        counts = grown
    return counts


def percentiles(values: Sequence[float]) -> Mapping[str, float]:
    """p50, p90 and p99, between neighbours by linear interpolation."""
    ordered = sorted(values)
    return {f"p{percent}": _quantile(ordered, percent / 100) for percent in PERCENTS}


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
