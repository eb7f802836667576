"""How sure a mean over tasks is: 95% intervals. A task counts once, however many attempts at it there are: those are more alike
than attempts at several tasks, and counting each for itself would make the interval too narrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pvariance, stdev

FEWEST_TASKS = 5
"""With fewer tasks no interval is given."""
Interval = tuple[float, float]


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Mean ± t · s / √n of the tasks' own values. None with too few tasks, and where all values are equal."""
    if len(values) < FEWEST_TASKS:
        return None
    half = _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (fmean(values) - half, fmean(values) + half) if half else None


def share_interval(shares: Sequence[float], attempts: int) -> Interval | None:
    """Wilson's interval of a share, from the tasks' own shares and the number of all attempts: inside 0 and 1 also where every
    answer is right. Its number of independent answers is the one that has the variance which the tasks show, n · p (1 - p) /
    variance: n with one attempt each, and never more than there are attempts. None with too few tasks."""
    if len(shares) < FEWEST_TASKS:
        return None
    p, t = fmean(shares), _t_quantile(len(shares) - 1)
    spread, variance = p * (1 - p), pvariance(shares)
    independent = float(len(shares))
    if spread:
        independent = min(independent * spread / variance, attempts) if variance else attempts
    middle = (p + t**2 / (2 * independent)) / (1 + t**2 / independent)
    half = t / (1 + t**2 / independent) * math.sqrt(spread / independent + (t / (2 * independent)) ** 2)
    return (middle - half if p else 0.0), (middle + half if p < 1 else 1.0)  # exactly, whatever was rounded


def _t_quantile(freedom: int) -> float:
    """97.5% quantile of Student's t, by the Cornish-Fisher expansion: within 0.3% from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
