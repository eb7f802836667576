"""How many pairs it takes: from the noise of pairs seen so far, and the effect that is asked for.

The half-width of the interval shrinks with the square root of the number of pairs. Its size at the pairs at hand therefore says
what one pair is worth, in the very units of the test that is used later, heavy tails and all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from redline.lab.evidence.statistics import LEVEL, hodges_lehmann

FIXED_LEVEL = 0.96
"""The level if the number of pairs were fixed beforehand. Choosing it by the noise seen so far costs up to a percent
(a sample that looks calm by chance ends early): what is left is the 95% that is reported, by simulation in the tests."""
POWER = 0.95
"""The chance to find an effect that is there, and of ruling it out where there is none. The noise is itself an estimate, so
that in truth it is less; the tests hold it above 0.8 by simulation."""
MIN_PAIRS = 8
"""The fewest pairs of A with itself, and of A with B: with fewer the exact interval is as wide as the values lie apart."""


def noise(log_ratios: Sequence[float]) -> float:
    """What a pair varies by: the standard deviation that normal values with an interval as wide would have."""
    interval = hodges_lehmann(log_ratios).interval if log_ratios else None
    if interval is None:
        return math.inf
    low, high = interval
    return (high - low) / 2 * math.sqrt(len(log_ratios)) / NormalDist().inv_cdf((1 + LEVEL) / 2)


def pairs_needed(log_ratios: Sequence[float], effect: float) -> float:
    """Pairs with which a true ratio of 1 + `effect` is found with `POWER`; infinite while the noise is not known."""
    normal = NormalDist()
    quantiles = normal.inv_cdf((1 + FIXED_LEVEL) / 2) + normal.inv_cdf(POWER)
    needed = (quantiles * noise(log_ratios) / math.log1p(effect)) ** 2
    return max(MIN_PAIRS, math.ceil(needed)) if math.isfinite(needed) else needed


def centred(log_ratios: Sequence[float]) -> list[float]:
    """Without their location: what is left is noise, whatever the ratio is."""
    if not log_ratios:
        return []
    middle = hodges_lehmann(log_ratios).value
    return [value - middle for value in log_ratios]
