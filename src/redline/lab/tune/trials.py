"""One trial: pairs of processes until they say whether a change pays, and what is decided by them.

a pair        two fresh processes, the recipe so far and the recipe with the change, that take a step in turn
the interval  of the rounds of all pairs, without assuming a distribution, wider by what two processes of the same recipe
              differ by (the pairs of the recipe with itself), less with every further pair
kept          the interval lies above 1;  reverted  it does not, or something that must stay did not;  failed  no figure
"""

from __future__ import annotations

import errno
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redline.errors import SideError
from redline.lab.evidence.experiment import Metric, Pair, Round
from redline.lab.evidence.statistics import hodges_lehmann
from redline.lab.tune.guards import METRICS, Kept, kept
from redline.lab.tune.proposals import Prediction, Proposal
from redline.lab.tune.space import Change, name_of

METRIC = Metric("run/step_s")
MOST_PAIRS = 3
"""Pairs of one trial: a change that they do not show to pay is reverted."""
UNKNOWN = 10.0
"""Half of the interval, in log units, where rounds are too few for one."""
KILLED = -9
"""Exit code of a process that the kernel ended for want of memory."""
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "bad_alloc",
    "no room",
    "does not fit",
)
"""Words of errors for want of memory, in lower case."""

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors of a disk, whatever is written to it."""

Outcome = Literal["kept", "reverted", "failed"]
Measure = Callable[[Change, Change, int], Pair]
"""Makes the pair of a number: the recipe with the first change, beside the recipe with the second. Raises `SideError`."""


@dataclass(slots=True, frozen=True)
class Gain:
    """How many times as fast B is, with its interval."""

    ratio: float
    low: float
    high: float
    step_s: float
    """Seconds of a step of A: the median."""

    @classmethod
    def of(cls, pairs: Sequence[Pair], allowance: float) -> Gain:
        """`allowance` is what one pair may be off by, in log units."""
        rounds = [each for pair in pairs for each in pair.rounds]
        estimate = hodges_lehmann([METRIC.log_ratio(each) for each in rounds])
        low, high = estimate.interval or (-UNKNOWN, UNKNOWN)
        wider = allowance / math.sqrt(len(pairs))
        step_s = statistics.median(each.a[METRIC.name] for each in rounds)
        return cls(math.exp(estimate.value), math.exp(low - wider), math.exp(high + wider), step_s)

    def decides(self, worth: float) -> bool:
        """Whether further pairs would change nothing: it pays, or it cannot be worth a change."""
        return self.low > 1 or self.high < 1 + worth


@dataclass(slots=True, frozen=True)
class Trial:
    """What was tried, what was expected, and what came of it."""

    change: Change
    against: Change
    """What had been kept before."""
    outcome: Outcome
    why: str
    prediction: Prediction | None = None
    gain: Gain | None = None
    """None where a side gave no figures."""
    guards: Sequence[Kept] = ()
    pairs: int = 0
    seconds: float = 0.0
    failure: str = ""
    """Why there are no figures: memory, crash or hang."""

    @property
    def name(self) -> str:
        return name_of(self.change)

    def as_json(self) -> dict[str, Any]:
        return {
            "change": dict(self.change),
            "against": dict(self.against),
            "outcome": self.outcome,
            "why": self.why,
            "predicted": self.prediction.as_json() if self.prediction else None,
            "measured": {name: getattr(self.gain, name) for name in Gain.__slots__} if self.gain else None,
            "guards": [guard.as_json() for guard in self.guards],
            "pairs": self.pairs,
            "seconds": self.seconds,
            "failure": self.failure,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Trial:
        """Read what `as_json` gave."""
        predicted, measured = row["predicted"], row["measured"]
        return cls(
            row["change"],
            row["against"],
            row["outcome"],
            row["why"],
            Prediction(**predicted) if predicted else None,
            Gain(**measured) if measured else None,
            [Kept(**guard) for guard in row["guards"]],
            row["pairs"],
            row["seconds"],
            row["failure"],
        )


@dataclass(slots=True)
class Trying:
    """Runs trials. `clock` gives seconds."""

    measure: Measure
    allowance: float
    """What a pair of processes may be off by, in log units."""
    worth: float
    clock: Callable[[], float]
    number: int = 0
    """The number of the first pair; each has a seed of its own."""
    pairs: list[Pair] = field(default_factory=list)

    def run(self, proposal: Proposal, against: Change) -> Trial:
        """Measure until it is decided. Blocks for some processes. Raises `SideError` where the recipe so far itself fails."""
        began, changed = self.clock(), {**against, **proposal.change}
        self.pairs = []
        try:
            while len(self.pairs) < MOST_PAIRS:
                self.pairs.append(self.measure(against, changed, self.number + len(self.pairs)))
                if Gain.of(self.pairs, self.allowance).decides(self.worth):
                    break
        except SideError as error:
            if error.side != name_of(changed):
                raise
            kind = failure_kind(error)
            why = f"{FAILURES[kind]}: {_last_line(error.message)}"
            return Trial(
                proposal.change, against, "failed", why, proposal.prediction, pairs=len(self.pairs), failure=kind,
                seconds=self.clock() - began,
            )  # fmt: skip
        return self._decided(proposal, against, self.clock() - began)

    def _decided(self, proposal: Proposal, against: Change, seconds: float) -> Trial:
        gain, guards = Gain.of(self.pairs, self.allowance), kept(self.pairs)
        broken = [guard.words for guard in guards if guard.is_broken]
        outcome: Outcome = "kept" if gain.low > 1 and not broken else "reverted"
        if broken:
            why = "; ".join(broken)
        elif gain.low > 1:
            why = "faster"
        elif gain.high < 1:
            why = "slower"
        else:
            why = f"no gain of {self.worth:.0%}" if gain.high < 1 + self.worth else "not shown to be faster"
        return Trial(
            proposal.change, against, outcome, why, proposal.prediction, gain, guards, len(self.pairs), seconds
        )  # fmt: skip


FAILURES = {"memory": "no memory for it", "crash": "it ended with an error", "hang": "it did not end"}
"""Kind of a failure → its words."""


def failure_kind(error: SideError) -> str:
    """Why a side gave no figures."""
    if error.code is None:
        return "hang"
    said = error.message.lower()
    return "memory" if error.code == KILLED or any(words in said for words in OUT_OF_MEMORY) else "crash"


def refuse_for_the_disk(error: SideError) -> None:
    """Raise `OSError` where a side ended for want of a disk: that says nothing of its settings."""
    said = next((number for number in DISK if os.strerror(number) in error.message), None)
    if said is not None:
        raise OSError(said, _last_line(error.message)) from None


def _last_line(message: str) -> str:
    """What the process said last: the error itself, without its frames."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("hint:")]
    return lines[-1][:200] if lines else ""


def pair_from_json(row: Mapping[str, Any]) -> Pair:
    """Read what `pair_as_json` gave."""
    peaks = row["peak_bytes"]
    rounds = [Round(each["A"], each["B"], each["first"] == "A") for each in row["rounds"]]
    return Pair(rounds, (peaks["A"], peaks["B"]) if peaks else None)


def pair_as_json(pair: Pair) -> dict[str, Any]:
    """A pair with those metrics of its rounds that decide anything."""
    trimmed = [Round(_kept_of(each.a), _kept_of(each.b), each.a_first) for each in pair.rounds]
    return Pair(trimmed, pair.peak_bytes).as_json()


def _kept_of(sample: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in sample.items() if name in METRICS}
