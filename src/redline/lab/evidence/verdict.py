"""Pairs → one sentence and an exit code, or why there is none.

0    B is not worse: faster, no different, or not shown to be slower than the tolerance
1    B is slower beyond the tolerance, or a guard is broken
2    no verdict: too few pairs for the effect asked for, or something in the measurement that could turn the verdict round
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redline.lab.evidence.diagnosis import diagnose
from redline.lab.evidence.experiment import Experiment, Metric, Wish
from redline.lab.evidence.guards import ONE_SIDED, Guard, check
from redline.lab.evidence.rank_tests import mann_whitney, shift
from redline.lab.evidence.sample_size import FIXED_LEVEL, MIN_PAIRS
from redline.lab.evidence.statistics import Comparison, hodges_lehmann, of_log_ratios

Kind = Literal["faster", "slower", "slower within tolerance", "no different", "abstained"]
EXIT_CODES: Mapping[Kind, int] = {"faster": 0, "no different": 0, "slower within tolerance": 0, "slower": 1, "abstained": 2}


@dataclass(slots=True, frozen=True)
class Verdict:
    kind: Kind
    comparison: Comparison | None
    """How many times better B is; None where not a single pair was measured."""
    guards: Sequence[Guard] = ()
    reasons: Sequence[str] = ()
    """For abstaining."""
    notes: Sequence[str] = ()
    """What else may explain the difference, and is no reason to abstain."""
    metric: Metric = field(default=Metric("step_s"))
    effect: float = 0.0
    tolerance: float = 0.0
    counted: str = "pairs"
    """What `Comparison.pairs` is a number of."""

    @property
    def exit_code(self) -> int:
        """A broken guard is worse than no verdict on speed."""
        return 1 if any(guard.state == "broken" for guard in self.guards) else EXIT_CODES[self.kind]

    @property
    def sentence(self) -> str:
        return "; ".join([self._claim, *self.notes, *(guard.words for guard in self.guards)])

    @property
    def _claim(self) -> str:
        c = self.comparison
        if self.kind == "abstained":
            so_far = f" ({_words(c, self.metric, self.counted)})" if c else ""
            return f"no verdict: {'; '.join(self.reasons)}{so_far}"
        assert c is not None
        if self.kind == "no different":
            low, high = _interval(c)
            found = f"ratio {c.ratio:.3f}, 95% interval {low:.3f}–{high:.3f}, {c.pairs} {self.counted}"
            return f"no difference of {_percent(self.effect)}: {found}"
        words = _words(c, self.metric, self.counted)
        allowed = f", which may be within the tolerance of {_percent(self.tolerance)}"
        return words + (allowed if self.kind == "slower within tolerance" else "")

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.kind,
            "sentence": self.sentence,
            "exit_code": self.exit_code,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "effect": self.effect,
            "tolerance": self.tolerance,
            "guards": [guard.as_json() for guard in self.guards],
        }


def judge(experiment: Experiment, tolerances: Mapping[str, float]) -> Verdict:
    wish, logs = experiment.wish, experiment.log_ratios
    if not logs:
        return Verdict("abstained", None, (), ["the time was up before a pair of A and B was measured"], (), experiment.metric)
    comparison = of_log_ratios(logs, FIXED_LEVEL)
    claims = Claims(_logs(comparison.interval), hodges_lehmann(logs, ONE_SIDED).interval, wish.effect, wish.tolerance)
    guards = check(experiment.pairs, tolerances)
    kind, reasons = claims.kind(), list[str]()
    if len(logs) < MIN_PAIRS:
        reasons.append(f"{len(logs)} pairs are too few, {MIN_PAIRS} are the fewest that count")
    elif kind == "abstained":
        reasons.append(_too_few(experiment))
    # What is suspected counts if the verdict would be another one, were the ratio off by as much.
    suspicions = diagnose(experiment)
    reasons += [s.what for s in suspicions if kind == "abstained" or claims.kind(s.off_by) != kind]
    if reasons:
        kind = "abstained"
    return Verdict(kind, comparison, guards, reasons, (), experiment.metric, wish.effect, wish.tolerance)


def judge_unpaired(
    b: Sequence[float], a: Sequence[float], wish: Wish, metric: Metric, caveats: Sequence[str], notes: Sequence[str] = ()
) -> Verdict:
    """Judge two saved results by the logs of their samples, larger for better. `caveats` are reasons to abstain, `notes` are
    said beside the verdict. The test takes samples for independent, and the rounds of a session share its machine, its process
    and its warm-up, so that a few of them are no evidence however small the p-value."""
    estimate, pairs = shift(b, a), min(len(a), len(b))
    interval = estimate.interval and (math.exp(estimate.interval[0]), math.exp(estimate.interval[1]))
    comparison = Comparison(math.exp(estimate.value), interval, mann_whitney(b, a), pairs)
    claims = Claims(estimate.interval, shift(b, a, ONE_SIDED).interval, wish.effect, wish.tolerance)
    kind, reasons = claims.kind(), list(caveats)
    if pairs < MIN_PAIRS:
        reasons.append(f"{len(a)} and {len(b)} samples are too few, {MIN_PAIRS} of each are the fewest that count")
    elif kind == "abstained":
        reasons.append(f"{len(a)} and {len(b)} samples are too few to tell a difference of {_percent(wish.effect)}")
    found = "abstained" if reasons else kind
    return Verdict(found, comparison, (), reasons, notes, metric, wish.effect, wish.tolerance, "samples of each")


@dataclass(slots=True, frozen=True)
class Claims:
    """What may be said of a log ratio; above 0, B is better."""

    interval: tuple[float, float] | None
    """At 95%."""
    bounds: tuple[float, float] | None
    """Either one-sided at 95%: what a difference can be ruled out by (two one-sided tests)."""
    effect: float
    tolerance: float

    def kind(self, off_by: float = 0.0) -> Kind:
        """`off_by`: by that much the interval is wider at both ends."""
        if self.interval is None or self.bounds is None:
            return "abstained"
        low, high = self.interval[0] - off_by, self.interval[1] + off_by
        if low > 0:
            return "faster"
        if high < -math.log1p(self.tolerance):
            return "slower"
        if high < 0:
            return "slower within tolerance"
        most = max(-self.bounds[0], self.bounds[1]) + off_by
        return "no different" if most <= math.log1p(self.effect) else "abstained"


def _logs(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return interval and (math.log(interval[0]), math.log(interval[1]))


def _too_few(experiment: Experiment) -> str:
    pairs, wish = len(experiment.pairs), experiment.wish
    limit = "the time was up" if experiment.out_of_time else f"--max-pairs is {wish.max_pairs}"
    wanted = experiment.pairs_wanted
    more = f"about {wanted:.0f} would do" if wanted > pairs else "a few more would do"
    why = f"a difference of {_percent(wish.effect)} where a pair varies by {experiment.noise:.1%}"
    return f"{pairs} pairs are too few to tell {why}; {more}, and {limit}"


def _words(comparison: Comparison, metric: Metric, counted: str) -> str:
    """`B is 1.31× faster, 95% interval 1.26–1.36, 12 pairs`."""
    better, worse = ("faster", "slower") if metric.is_speed else ("better", "worse")
    ratio, (low, high), word = comparison.ratio, _interval(comparison), better
    if ratio < 1:
        ratio, low, high, word = 1 / ratio, 1 / high, 1 / low, worse
    digits = 2 if ratio >= 1.1 else 3
    interval = f", 95% interval {low:.{digits}f}–{high:.{digits}f}" if comparison.interval else ""
    return f"B is {ratio:.{digits}f}× {word}{interval}, {comparison.pairs} {counted}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _interval(comparison: Comparison) -> tuple[float, float]:
    return comparison.interval or (math.nan, math.nan)
