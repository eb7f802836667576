"""Coordinate by coordinate: look at the recipe so far, try the change of which most is expected, keep it or not, look again.

    look ─► proposals, the best first ─► trial ─► kept: look again ─► … ─► nothing left, or the budget is spent ─► proof

A search over combinations is not needed: a kept change changes what the next look sees, and a change that was reverted is
tried again once its seconds may weigh more. Everything that was measured is in the log before the next thing begins, so that
the state after a kill is that of the log.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from redline.errors import SideError
from redline.lab.evidence.experiment import Experiment, Pair, Wish
from redline.lab.evidence.guards import KL, MEMORY, TOLERANCES
from redline.lab.evidence.sample_size import MIN_PAIRS
from redline.lab.tune.choice import next_proposal
from redline.lab.tune.log import State, TrialLog
from redline.lab.tune.proposals import Proposal
from redline.lab.tune.space import Change
from redline.lab.tune.trials import METRIC, Trial, Trying, pair_as_json, refuse_for_the_disk

NOISE_PAIRS = 3
"""Pairs of the recipe with itself: how far processes of the same recipe lie apart."""
LEAST_ALLOWANCE = 0.005
"""Log units that a pair may always be off by."""
PROOF_PAIRS = 12
"""Pairs of the proof at the most."""
FIRST_NUMBERS = {"noise": 1, "trial": 1001, "proof": 501}
"""Numbers of pairs, which are their seeds. A trial has a hundred of its own."""
ANY = 1e6
"""The tolerance of a guard that is told and ends nothing."""


@dataclass(slots=True, frozen=True)
class Look:
    """What a recording of the recipe so far says."""

    step_s: float | None
    """Seconds of a step; None where it was not recorded."""
    bound: str
    """One sentence."""
    proposals: Sequence[Proposal]
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    """Change → why it cannot be tried."""


class Bench(Protocol):
    """What runs recipes."""

    def look(self, settings: Change) -> Look:
        """Record the recipe with these settings, unless that was done. Blocks for a run of a few steps."""
        ...

    def measure(self, a: Change, b: Change, number: int) -> Pair:
        """Blocks for two processes. Raises `SideError`, whose side is the name of the settings that failed."""
        ...


@dataclass(slots=True, frozen=True)
class Budget:
    """What a tuning may cost."""

    trials: int = 30
    seconds: float = 3600.0
    """Seconds of this call, the proof included."""
    worth: float = 0.03
    """The smallest gain that is worth a trial: 0.03 is 3%."""


@dataclass(slots=True, frozen=True)
class Tuned:
    """How it ended."""

    state: State
    ended: str
    """Why: one sentence."""
    experiment: Experiment | None
    """The recipe as it was beside the recipe as it is now; None where nothing was kept."""
    last: Look | None
    """What was seen of the settings that were kept; None where nothing was looked at."""


@dataclass(slots=True)
class Tuning:
    """One call of `redline tune`."""

    bench: Bench
    log: TrialLog
    budget: Budget
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    tell_trial: Callable[[int, Trial], None] = lambda number, trial: None
    began: float = 0.0
    pair_s: float = 0.0
    """Seconds of the longest pair: those of the recipe as it was, which the proof has too, take longer than most."""

    def run(self) -> Tuned:
        """Blocks until nothing is left or the budget is spent. Raises `SideError` where the recipe itself does not run."""
        self.began = self.clock()
        state = self.log.state
        self.pair_s = max((trial.seconds / trial.pairs for trial in state.trials if trial.gain), default=0.0)
        while len(state.noise) < NOISE_PAIRS:
            self._pair("noise", {}, len(state.noise))
        look, ended = self._search()
        return Tuned(state, ended, self._proof() if state.kept else None, look)

    # ── the search ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _search(self) -> tuple[Look | None, str]:
        state, budget, look = self.log.state, self.budget, None
        while True:
            if len(state.trials) >= budget.trials:
                return look, "as many as were allowed"
            if self._left_s() < self._needed_s():
                return look, "then the time was up"
            look = self._look()
            step_s = look.step_s or self._step_s()
            proposal = next_proposal(look.proposals, state.trials, state.kept, step_s, budget.worth)
            if proposal is None:
                return look, f"nothing is left of which a gain of {budget.worth:.0%} is possible"
            trial = self._try(proposal)
            self.log.append("trial", **trial.as_json())
            self.tell_trial(len(state.trials), trial)

    def _needed_s(self) -> float:
        """Seconds without which no further trial begins: of one, and of the proof that is due where something is kept."""
        state = self.log.state
        return self._proof_s() + max(trial.seconds for trial in state.trials) if state.kept else 0.0

    def _look(self) -> Look:
        """Look at the settings that are kept. The log has a line for each settings that was looked at."""
        state = self.log.state
        look = self.bench.look(state.kept)
        if state.kept not in state.looked:
            expected = [(p.name, p.prediction and p.prediction.as_json()) for p in look.proposals]
            self.log.append(
                "look", settings=dict(state.kept), step_s=look.step_s, bound=look.bound, proposals=expected,
                ruled_out=dict(look.ruled_out),
            )  # fmt: skip
            self.tell(look.bound)
        return look

    def _try(self, proposal: Proposal) -> Trial:
        state = self.log.state
        number = FIRST_NUMBERS["trial"] + 100 * len(state.trials)
        trying = Trying(self._measure, self._allowance(), self.budget.worth, self.clock, number)
        return trying.run(proposal, dict(state.kept))

    def _allowance(self) -> float:
        """Twice the median: one pair that a neighbour of the machine fell into would otherwise hide every gain from then on."""
        return max(LEAST_ALLOWANCE, 2 * statistics.median(abs(pair.log_ratio(METRIC)) for pair in self.log.state.noise))

    def _step_s(self) -> float:
        """Seconds of a step of the recipe so far, by what trials measured."""
        gains = [trial for trial in self.log.state.trials if trial.gain]
        if not gains:
            return statistics.median(each.a[METRIC.name] for pair in self.log.state.noise for each in pair.rounds)
        last = gains[-1]
        assert last.gain is not None
        return last.gain.step_s / (last.gain.ratio if last.outcome == "kept" else 1.0)

    # ── the proof ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _proof_s(self) -> float:
        """Seconds that a proof may take, which the search leaves to it."""
        return (MIN_PAIRS + 1) * self.pair_s

    def _proof(self) -> Experiment:
        """Pairs of the recipe as it was and as it is now, until `redline compare` would stop, or the time is up. At least one
        is measured."""
        state = self.log.state
        wish = Wish(self.budget.worth, max_pairs=PROOF_PAIRS)
        experiment = Experiment(METRIC, wish, list(state.noise), list(state.proofs))
        while not experiment.is_enough():
            if experiment.pairs and self._left_s() < self.pair_s:
                experiment.out_of_time = True
                break
            self._pair("proof", state.kept, len(experiment.pairs))
            experiment.pairs.append(state.proofs[-1])
            self.tell(f"proof, pair {len(experiment.pairs)}: {experiment.ratio:.2f} times as fast")
        return experiment

    # ── pairs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pair(self, kind: str, settings: Change, place: int) -> None:
        """Measure a pair of the recipe as it was and one with other settings, and log it."""
        pair = self._measure({}, settings, FIRST_NUMBERS[kind] + place)
        self.log.append(kind, pair=pair_as_json(pair))

    def _measure(self, a: Change, b: Change, number: int) -> Pair:
        began = self.clock()
        try:
            pair = self.bench.measure(a, b, number)
        except SideError as error:
            refuse_for_the_disk(error)
            raise
        self.pair_s = max(self.pair_s, self.clock() - began)
        return pair

    def _left_s(self) -> float:
        return self.budget.seconds - (self.clock() - self.began)


def tolerances(kept: Change) -> dict[str, float]:
    """What the proof may not break. Memory is there to be used, and a larger lag moves the policies apart: both are told."""
    return {**TOLERANCES, MEMORY: ANY, **({KL: ANY} if "buffer.max_lag" in kept else {})}


def explained(error: SideError) -> SideError:
    """The error of a recipe that does not run before anything is changed."""
    return SideError(
        f"the recipe does not run as it is: {error.message}",
        "`redline plan RECIPE` says whether it fits and what would make it fit; `redline train RECIPE` shows the whole error",
        side=error.side,
        code=error.code,
    )


def as_json(tuned: Tuned, budget: Budget) -> dict[str, Any]:
    """What was tried and kept, for programs."""
    return {
        "kept": dict(tuned.state.kept),
        "ended": tuned.ended,
        "trials": [trial.as_json() for trial in tuned.state.trials],
        "budget": {"trials": budget.trials, "seconds": budget.seconds, "worth": budget.worth},
    }
