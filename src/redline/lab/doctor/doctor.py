"""Diagnoses a run: what bounds it in one sentence, then what to change, the most recoverable time first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from redline.lab.doctor.facts import FEWEST, Facts
from redline.lab.doctor.finding import Abstention, Answer, Finding, Gain
from redline.lab.doctor.guesses import may_guess, replayed
from redline.lab.doctor.rules import engine, machine, moving, rollouts, speculation, trainer
from redline.runs.run import Run
from redline.runs.verdict import Bound
from redline.telemetry.summary.timeline import PREFIX

WORTH = 0.03
"""Share of the time from which on a finding is worth a change."""
Rule = Callable[[Facts], Answer]
RULES: Mapping[str, Rule] = {
    "slow_reward": rollouts.slow_reward,
    "serial_episodes": rollouts.serial_episodes,
    "retokenising": rollouts.retokenising,
    "loading_stall": rollouts.loading_stall,
    "frequent_evaluation": rollouts.frequent_evaluation,
    "failed_attempts": rollouts.failures,
    "low_concurrency": engine.low_concurrency,
    "prefix_cache_off": engine.prefix_cache_off,
    "preemption": engine.preemption,
    "kv_cache_too_small": engine.kv_cache_too_small,
    "kv_cache_too_large": engine.kv_cache_too_large,
    "too_much_tensor_parallelism": engine.too_much_tensor_parallelism,
    "speculation_off": speculation.speculation_off,
    "micro_batch_too_small": trainer.micro_batch_too_small,
    "checkpointing_not_needed": trainer.checkpointing_not_needed,
    "offload_not_needed": trainer.offload_not_needed,
    "double_forward": trainer.double_forward,
    "imbalance": trainer.imbalance,
    "memory_spike": trainer.memory_spike,
    "long_tail": moving.long_tail,
    "no_overlap": moving.no_overlap,
    "staleness_waits": moving.staleness_waits,
    "sync_stall": moving.sync_stall,
    "serialisation": moving.serialisation,
    "io_bound": moving.io_bound,
    "slow_first_step": machine.slow_first_step,
    "noisy_neighbour": machine.noisy_neighbour,
    "cpu_bound": machine.cpu_bound,
    "throttling": machine.throttling,
}
"""Cause → the rule that looks for it."""


@dataclass(slots=True, frozen=True)
class Diagnosis:
    """What the doctor says of a run."""

    run: str
    """The folder, as it was given."""
    bound: Bound
    findings: tuple[Finding, ...]
    """Those worth a change, the most recoverable time first."""
    abstentions: tuple[Abstention, ...]
    wall_s: float
    """Seconds of the steps that the findings are about."""
    num_steps: int
    has_phases: bool = True
    num_delayed: int = 0
    """Steps that do not count, since they were delayed on purpose."""
    cannot: str = ""
    """Why nothing can be said, where the recording is not ours."""
    guesses: Gain | None = None
    """What guesses would save, also where that is too little for a finding; None where nobody could tell."""

    @property
    def verdict(self) -> str:
        """One sentence: how many findings there are, that there is none, or that nothing can be said."""
        if self.num_delayed and self.num_steps < FEWEST:
            return f"{self.num_delayed} steps were delayed on purpose, and {self.num_steps} others are too few to tell."
        if self.cannot:
            return self.cannot
        if self.num_steps < FEWEST:
            return f"{self.num_steps} steps after the first ones are too few to tell: record at least {FEWEST + 2}."
        if not self.has_phases:
            return "The steps do not say what their time went to: an earlier version recorded them."
        if not self.findings:
            return "Nothing worth fixing."
        return f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}, the largest gain first."

    def share(self, seconds: float) -> float:
        """Seconds as a share of the recorded time."""
        return seconds / self.wall_s if self.wall_s else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "bound": asdict(self.bound),
            "verdict": self.verdict,
            "wall_s": self.wall_s,
            "steps": self.num_steps,
            "delayed_steps": self.num_delayed,
            "findings": [
                {**asdict(finding), "share": self.share(finding.gain.likely_s), "prove": finding.proof(self.run)}
                for finding in self.findings
            ],
            "abstentions": [asdict(abstention) for abstention in self.abstentions],
        }


def diagnose(run: Run, *, with_delays: bool = False, rules: Mapping[str, Rule] = RULES) -> Diagnosis:
    """Look at a run for every known cause. Blocks for a second or two while its newest steps are read; the run may still go on.
    Steps that were delayed on purpose do not count, unless they are asked for."""
    facts = facts_of(run, with_delays=with_delays)
    phases = {
        name.removeprefix(PREFIX).removesuffix("_s"): facts.total(name) for name in facts.steps if name.startswith(PREFIX)
    }
    bound = run.bound(phases, facts.ledger)
    findings, abstentions = examined(facts, rules) if facts.num_steps >= FEWEST and phases else ((), ())
    return Diagnosis(
        run=str(run.folder.shown),
        bound=bound,
        findings=findings,
        abstentions=abstentions,
        wall_s=facts.wall_s,
        num_steps=facts.num_steps,
        has_phases=bool(phases),
        num_delayed=facts.num_delayed,
        guesses=speculation.gain_of_guesses(facts),
    )


def facts_of(run: Run, *, with_delays: bool = False) -> Facts:
    """Everything that the rules ask for: what the run's logs say, and what guesses would have saved."""
    facts = Facts.of(run, with_delays=with_delays)
    may_pay = facts.num_steps >= FEWEST and may_guess(facts)
    return replace(facts, guesses=replayed(run, facts)) if may_pay else facts


def examined(facts: Facts, rules: Mapping[str, Rule] = RULES) -> tuple[tuple[Finding, ...], tuple[Abstention, ...]]:
    """What all rules say of the facts: findings worth a change by recoverable time, and what could not be told. Each gain is
    what is left for it once those before it are mended, so that together they never come to more than there is."""
    answers = [rule(facts) for rule in rules.values()]
    left = [a for a in answers if isinstance(a, Finding) and a.gain.likely_s > 0]
    ranked: list[Finding] = []
    saved: defaultdict[str, float] = defaultdict(float)
    while left:
        rest = {found.cause: _what_is_left(found, saved, facts.wall_s) for found in left}
        best = max(left, key=lambda found: rest[found.cause].gain.likely_s)
        if rest[best.cause].gain.likely_s < WORTH * facts.wall_s:
            break
        ranked.append(rest[best.cause])
        saved[best.gain.of] += rest[best.cause].gain.likely_s
        left.remove(best)
    return tuple(ranked), tuple(answer for answer in answers if isinstance(answer, Abstention))


def _what_is_left(found: Finding, saved: Mapping[str, float], wall_s: float) -> Finding:
    """The finding with the gain that remains once `saved` seconds of each kind of time are gone. What is saved of all of a step
    is gone from each of its parts too."""
    gain, rest_s = found.gain, wall_s - sum(saved.values())
    if gain.of == "step":
        factor = rest_s / max(wall_s, 1e-9)
    else:
        factor = (1 - saved.get(gain.of, 0.0) / max(gain.of_s, 1e-9)) * (1 - saved.get("step", 0.0) / max(wall_s, 1e-9))
    return replace(found, gain=gain.scaled(max(0.0, min(factor, 1.0, rest_s / max(gain.likely_s, 1e-9)))))
