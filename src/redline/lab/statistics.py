"""What a handful of noisy pairs can prove: exact, without assuming any distribution, in plain Python.

A pair is two measurements taken one right after the other, in an order drawn by lot. Its log ratio is symmetric around the
log of the true ratio if the order does not matter, and that is all the signed-rank test asks for. The interval is the set of
ratios that the test does not reject; the estimate is the middle of all pairwise means (Hodges and Lehmann).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
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
    """Of the two-sided signed-rank test that there is no difference."""
    pairs: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def compare(better_if_larger: Sequence[float], than: Sequence[float]) -> Comparison:
    """The ratio of the first to the second, from pairs: `better_if_larger[i]` and `than[i]` were measured side by side."""
    logs = [math.log(a / b) for a, b in zip(better_if_larger, than, strict=True)]
    estimate = hodges_lehmann(logs)
    interval = estimate.interval and (math.exp(estimate.interval[0]), math.exp(estimate.interval[1]))
    return Comparison(math.exp(estimate.value), interval, signed_rank(logs), len(logs))


def hodges_lehmann(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """The median of all pairwise means, each value with itself included, and the interval that inverts the signed-rank test."""
    walsh = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    middle = (walsh[(len(walsh) - 1) // 2] + walsh[len(walsh) // 2]) / 2
    below, tail = 0, 0.0
    for count in _rank_sums(range(1, len(values) + 1)):
        tail += count / 2 ** len(values)
        if tail > (1 - level) / 2:
            break
        below += 1
    return Estimate(middle, (walsh[below - 1], walsh[-below]) if below else None)


def signed_rank(values: Sequence[float]) -> float:
    """Wilcoxon's two-sided test that values are symmetric around 0; exact, ties and all. Zeros say nothing and are dropped."""
    sizes = sorted(abs(value) for value in values if value != 0)
    if not sizes:
        return 1.0
    # Tied values share the mean of their ranks; twice that is a whole number.
    doubled = {size: 2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes}
    ranks = [doubled[abs(value)] for value in values if value != 0]
    counts = _rank_sums(ranks)
    positive = sum(doubled[value] for value in values if value > 0)
    smaller = min(positive, sum(ranks) - positive)
    return min(1.0, 2 * sum(counts[: smaller + 1]) / 2 ** len(ranks))


def _rank_sums(ranks: Sequence[int]) -> list[int]:
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
