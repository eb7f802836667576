"""Statistics that a few wild values cannot move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import NormalDist

import numpy as np

NORMAL_SCALE = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""
LOG_DEVIATIONS = 5.0
LEAST_SHARE = 100
"""Values below floor / this are alike: the logarithm of a wait of nothing would have no end."""


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def spread(values: Sequence[float]) -> float:
    """The median absolute deviation, in units of a normal distribution's standard deviation."""
    array = np.asarray(values, dtype=float)
    return NORMAL_SCALE * float(np.median(np.abs(array - np.median(array))))


def step_noise(values: Sequence[float]) -> float:
    """The standard deviation of independent noise, from the differences of neighbours (von Neumann): a trend hardly counts."""
    differences = np.diff(np.asarray(values, dtype=float))
    return float(np.sqrt(np.mean(differences**2) / 2)) if len(differences) else 0.0


def explained_by(history: Sequence[float], *, floor: float, deviations: float) -> float:
    """The largest value that a history of n explains, and `floor` at least:

    median + k · deviation                   waits that come and go like noise
    exp(median + 5 · deviation) of the logs  waits with a heavy tail, most of which has not been seen yet
    2 · the longest so far                   waits that are long now and then, such as those for a checkpoint

    A short history knows its own deviation badly: it counts (1 + 8 / n) times.
    """
    unsure = 1 + 8 / len(history)
    logs = np.log(np.maximum(np.asarray(history, dtype=float), floor / LEAST_SHARE))
    tail = float(np.exp(np.median(logs) + unsure * LOG_DEVIATIONS * spread(logs.tolist())))
    return max(floor, median(history) + unsure * deviations * spread(history), tail, 2 * max(history))


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen: the median of the slopes between all pairs."""
    x, y = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def trend_p_value(values: Sequence[float]) -> float:
    """Mann and Kendall: how likely independent values without a trend would rise as consistently as these."""
    y = np.asarray(values, dtype=float)
    n = len(y)
    first, second = np.triu_indices(n, k=1)
    rises = float(np.sign(y[second] - y[first]).sum())
    _, ties = np.unique(y, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if rises <= 0 or variance <= 0:
        return 1.0
    return 1 - NormalDist().cdf((rises - 1) / variance**0.5)
