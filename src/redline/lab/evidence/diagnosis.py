"""What would make a ratio untrue although its interval is narrow: a harness that prefers a side, drift, order, no steady state.

Each is tested at `ALPHA`, and carries by how much it may have moved the ratio. Whether that matters is the verdict's business.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline.lab.evidence.experiment import Experiment, Metric, Pair, Round
from redline.lab.evidence.rank_tests import mann_whitney, shift, trend
from redline.lab.evidence.statistics import hodges_lehmann, signed_rank

ALPHA = 0.01
"""The level of each test: there are four, and each may be wrong."""


@dataclass(slots=True, frozen=True)
class Suspicion:
    what: str
    off_by: float
    """How far the log ratio may be from the truth because of it."""
    p_value: float


def diagnose(experiment: Experiment) -> list[Suspicion]:
    """Those that chance alone does not explain, the largest first."""
    tests = (_against_itself, _drift, _order, _settling)
    found = [suspicion for test in tests if (suspicion := test(experiment)) is not None and suspicion.p_value < ALPHA]
    return sorted(found, key=lambda suspicion: -suspicion.off_by)


def _against_itself(experiment: Experiment) -> Suspicion | None:
    logs = experiment.noise_log_ratios
    if not logs:
        return None
    size = hodges_lehmann(logs).value
    return Suspicion(f"A differs from itself by {abs(size):.1%}", abs(size), signed_rank(logs))


def _drift(experiment: Experiment) -> Suspicion | None:
    p_value, change = trend(experiment.log_ratios)
    what = f"drift: from the first pair to the last the ratio moved by {abs(change):.1%}"
    return Suspicion(what, abs(change) / 2, p_value)


def _order(experiment: Experiment) -> Suspicion | None:
    """Where both orders occur in every pair, within pairs, whose ratios it does not change if there are enough of both
    (`Pair.log_ratio`); else between those of one order and those of the other."""
    within = _differences(experiment.pairs, experiment.metric, lambda rounds: [each.a_first for each in rounds])
    if within:
        size, p_value = hodges_lehmann(within).value, signed_rank(within)
        off_by = 0.0 if all(pair.is_balanced for pair in experiment.pairs) else abs(size) / 2
    else:
        logs = [(pair.rounds[0].a_first, pair.log_ratio(experiment.metric)) for pair in experiment.pairs]
        first, second = ([value for a_first, value in logs if a_first is which] for which in (True, False))
        if not first or not second:
            return None
        size, p_value = shift(first, second).value, mann_whitney(first, second)
        off_by = abs(size) / 2
    return Suspicion(f"an order effect: who runs first changes the ratio by {abs(size):.1%}", off_by, p_value)


def _settling(experiment: Experiment) -> Suspicion | None:
    """The later half of the rounds against the earlier one. If they differ, a later one still may differ as much again."""
    halves = _differences(
        experiment.pairs, experiment.metric, lambda rounds: [2 * i >= len(rounds) for i in range(len(rounds))]
    )
    if not halves:
        return None
    size = hodges_lehmann(halves).value
    what = f"no steady state: within a pair the ratio moves by {abs(size):.1%} from the earlier rounds to the later"
    return Suspicion(what, abs(size), signed_rank(halves))


def _differences(pairs: Sequence[Pair], metric: Metric, divide: Callable[[Sequence[Round]], list[bool]]) -> list[float]:
    """Per pair, the median of the rounds marked True minus that of the others; none where a pair lacks either kind."""
    found = []
    for pair in pairs:
        marked = [(mark, metric.log_ratio(each)) for mark, each in zip(divide(pair.rounds), pair.rounds, strict=True)]
        first, second = ([value for mark, value in marked if mark is which] for which in (True, False))
        if not first or not second:
            return []
        found.append(statistics.median(first) - statistics.median(second))
    return found
