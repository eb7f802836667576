"""Two samples that were not taken in pairs, and one sample that may depend on when it was taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from redline.lab.evidence.statistics import LEVEL, Estimate

EXACT_PAIRINGS = 900
"""Products of two sample sizes up to which every arrangement is counted."""
EXACT_TREND = 60


def shift(values: Sequence[float], than: Sequence[float], level: float = LEVEL) -> Estimate:
    """How far the first sample lies above the second: the median of all differences, and the interval that inverts the test
    of Mann and Whitney."""
    differences = np.sort(np.subtract.outer(np.asarray(values, float), np.asarray(than, float)), axis=None)
    count = len(differences)
    middle = float(differences[(count - 1) // 2] + differences[count // 2]) / 2
    below = _differences_left_out(len(values), len(than), level)
    return Estimate(middle, (float(differences[below - 1]), float(differences[-below])) if below else None)


def mann_whitney(values: Sequence[float], than: Sequence[float]) -> float:
    """The two-sided test that both samples come from one distribution; exact where no value is tied."""
    sizes = len(values), len(than)
    signs = np.sign(np.subtract.outer(np.asarray(values, float), np.asarray(than, float)))
    above = float((signs > 0).sum() + 0.5 * (signs == 0).sum())
    smaller, total = min(above, sizes[0] * sizes[1] - above), sum(sizes)
    _, ties = np.unique(np.concatenate([values, than]), return_counts=True)
    if ties.max() == 1 and sizes[0] * sizes[1] <= EXACT_PAIRINGS:
        return min(1.0, 2 * sum(_arrangements(*sizes)[: int(smaller) + 1]) / math.comb(total, sizes[0]))
    variance = sizes[0] * sizes[1] / 12 * (total + 1 - float((ties**3 - ties).sum()) / (total * (total - 1)))
    if variance == 0:
        return 1.0
    return min(1.0, 2 * NormalDist().cdf((smaller + 0.5 - sizes[0] * sizes[1] / 2) / math.sqrt(variance)))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Kendall's two-sided test that values do not depend on their place, and how much they change from the first to the last:
    the median slope of all pairs (Theil and Sen), times the way."""
    array = np.asarray(values, float)
    n = len(array)
    if n < 2:
        return 1.0, 0.0
    first, second = np.triu_indices(n, k=1)
    rises = array[second] - array[first]
    change = float(np.median(rises / (second - first))) * (n - 1)
    falling = float((rises < 0).sum() + 0.5 * (rises == 0).sum())
    smaller, pairs = min(falling, len(rises) - falling), len(rises)
    if n <= EXACT_TREND and not (rises == 0).any():
        return min(1.0, 2 * sum(_inversions(n)[: int(smaller) + 1]) / math.factorial(n)), change
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 72)
    return min(1.0, 2 * NormalDist().cdf((smaller + 0.5 - pairs / 2) / spread)), change


# ── counting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _differences_left_out(m: int, n: int, level: float) -> int:
    alpha = (1 - level) / 2
    if m * n > EXACT_PAIRINGS:
        spread = math.sqrt(m * n * (m + n + 1) / 12)
        return max(0, math.floor(m * n / 2 - NormalDist().inv_cdf(1 - alpha) * spread + 0.5))
    below, tail = 0, 0.0
    for count in _arrangements(m, n):
        tail += count / math.comb(m + n, m)
        if tail > alpha:
            break
        below += 1
    return below


@functools.cache
def _arrangements(m: int, n: int) -> list[int]:
    """How many arrangements of m values among n others have each number of pairs in which theirs is smaller: the coefficients
    of the Gaussian binomial, Π (1 - qⁿ⁺ⁱ) / (1 - qⁱ)."""
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for total in range(m * n, n + i - 1, -1):
            counts[total] -= counts[total - n - i]
        for total in range(i, m * n + 1):
            counts[total] += counts[total - i]
    return counts


@functools.cache
def _inversions(n: int) -> list[int]:
    """How many of the n! orders have each number of pairs out of order."""
    counts = [1]
    for size in range(2, n + 1):
        grown = [0] * (len(counts) + size - 1)
        running = 0
        for total in range(len(grown)):
            running += counts[total] if total < len(counts) else 0
            running -= counts[total - size] if 0 <= total - size < len(counts) else 0
            grown[total] = running
        counts = grown
    return counts
