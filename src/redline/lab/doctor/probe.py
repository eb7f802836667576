"""Proves causes on a run that goes on: parts of it are delayed a little, one after the other, and the step time is looked at.

    slope = seconds that a step becomes longer / seconds that were added to a part of it

A slope near 1 says that the part is on the critical path: what is saved there, the run saves. A slope near 0 says that it is
hidden behind something else. What several threads do at once has a slope in between.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.errors import RunFolderError
from redline.lab.doctor.doctor import Diagnosis, diagnose
from redline.lab.doctor.facts import FEWEST, Facts
from redline.lab.doctor.finding import Finding
from redline.lab.evidence.statistics import Estimate, hodges_lehmann
from redline.runs import Run
from redline.runs.status import is_locked
from redline.telemetry.delays import MOST_LIFE_S, MOST_S, PLAN, TOTAL, DelayPlan, ask, seconds_in, withdraw
from redline.telemetry.files.tail import Tail

SPANS: Mapping[str, str] = {
    "generation": "engine.decode",
    "training": "trainer.forward",
    "rewards": "rollouts.reward",
    "environments": "rollouts.parse",
    "tasks": "rollouts.tasks",
    "prompts": "rollouts.prompts",
    "buffer": "buffer.pack",
    "weights": "weight_sync.publish",
}
"""Part of a run → the span that is delayed in its place."""
PARTS: Mapping[str, str] = {
    "slow_reward": "rewards",
    "serial_episodes": "environments",
    "no_overlap": "training",
    "retokenising": "prompts",
    "loading_stall": "tasks",
    "serialisation": "buffer",
    "sync_stall": "weights",
    **dict.fromkeys(
        ("low_concurrency", "prefix_cache_off", "preemption", "kv_cache_too_small", "failed_attempts", "long_tail"),
        "generation",
    ),
    **dict.fromkeys(("too_much_tensor_parallelism", "staleness_waits"), "generation"),
    **dict.fromkeys(("micro_batch_too_small", "checkpointing_not_needed", "offload_not_needed"), "training"),
    **dict.fromkeys(("double_forward", "kv_cache_too_large", "memory_spike"), "training"),
}
"""Cause → the part of a run whose time it claims; causes outside the loop have none."""
ALWAYS = ("generation", "training")
"""Parts that are probed whatever was found."""
FINDINGS = 3
"""The first findings, which are put to the proof."""
PILOT_S = 0.001
"""Delay of every span in the first step of a probe, which counts how often each opens."""
SHARE = 0.3
"""Share of a step's time that is added to a part of it."""
PAIRS = 6
"""Steps with and without a delay that are compared; an interval takes as many."""
POLL_S = 0.1
CRITICAL, HIDDEN = 0.5, 0.25
"""Slopes from which on, and up to which, a part counts as on the critical path, or as hidden."""


@dataclass(slots=True, frozen=True)
class Probed:
    """What delays of one part did to the step."""

    part: str
    span: str
    slope: Estimate
    """Seconds that a step became longer for each second that the part did."""
    injected_s: float
    """Seconds that were added to a step, on average."""
    step_s: float
    """Seconds of the steps without delays between them."""
    num_steps: int

    @property
    def says(self) -> str:
        """`critical`, `hidden` or `unclear`."""
        low, high = self.slope.interval or (-np.inf, np.inf)
        return "critical" if low >= CRITICAL else "hidden" if high <= HIDDEN else "unclear"

    @property
    def line(self) -> str:
        low, high = self.slope.interval or (float("nan"), float("nan"))
        words = {
            "critical": "on the critical path: time saved here is saved by the run",
            "hidden": "hidden behind something else: time saved here is not saved by the run",
            "unclear": "partly hidden, or too noisy to tell",
        }[self.says]
        return f"{self.part} ({self.span}): slope {self.slope.value:.2f} ({low:.2f} to {high:.2f}), {words}"


@dataclass(slots=True, frozen=True)
class Proof:
    """A diagnosis of a run that goes on, and what delays say about it."""

    diagnosis: Diagnosis
    probed: tuple[Probed, ...]

    def about(self, finding: Finding) -> str:
        """One sentence: whether the probe bears a finding out."""
        found = next((probed for probed in self.probed if probed.part == PARTS.get(finding.cause)), None)
        if found is None:
            told = "the command after `prove:` can" if finding.proof(self.diagnosis.run) else "a run with the change does"
            return f"{finding.cause}: delays cannot show it; {told}"
        return (
            f"{finding.cause}: "
            + {
                "critical": f"borne out, {found.part} bounds the step",
                "hidden": f"not borne out, {found.part} is hidden behind something else",
                "unclear": f"neither borne out nor excluded, the slope of {found.part} is not clear",
            }[found.says]
        )

    def lines(self) -> Iterator[str]:
        """The probe for people."""
        yield "What delays of a running step say (slope 1: the step takes as much longer, 0: nothing happens):"
        yield from (f"  {probed.line}" for probed in self.probed)
        for finding in self.diagnosis.findings[:FINDINGS]:
            yield f"  {self.about(finding)}"

    def as_json(self) -> dict[str, Any]:
        probed = [
            {
                "part": each.part,
                "span": each.span,
                "slope": each.slope.value,
                "interval_95": each.slope.interval,
                "injected_s": each.injected_s,
                "step_s": each.step_s,
                "steps": each.num_steps,
                "says": each.says,
            }
            for each in self.probed
        ]
        about = {finding.cause: self.about(finding) for finding in self.diagnosis.findings[:FINDINGS]}
        return {**self.diagnosis.as_json(), "probe": {"parts": probed, "findings": about}}


def probe(run: Run, tell: Callable[[str], None]) -> Proof:
    """Delay parts of a run that goes on, one after the other. Blocks until that is done, a hundred steps or so; whatever ends
    it, the delays end too. Raises RunFolderError where no run goes on in the folder, or it ends meanwhile."""
    pid, facts, diagnosis = _process(run), Facts.of(run), diagnose(run)
    if facts.num_steps < FEWEST:
        raise RunFolderError(
            f"{run.folder.shown}: {facts.num_steps} steady steps are too few", "probe when a few more are taken"
        )
    wanted = parts_of(diagnosis)
    spans = {part: _span_of(part, facts) for part in wanted}
    [pilot] = _taken(run, pid, [dict.fromkeys(spans.values(), PILOT_S)], facts.period_s)
    counts = {span: seconds_in(pilot, span) / PILOT_S for span in spans.values()}
    probed = []
    for part, span in spans.items():
        if counts[span] < 1:
            tell(f"{part}: {span} does not open in a step, and is left out")
            continue
        delay_s = min(MOST_S, SHARE * facts.step_s / max(1.0, round(0.9 * counts[span])))
        pattern = blocks(facts.setting("buffer.max_lag", 0))
        tell(f"delaying {part} in {sum(on for on, _ in pattern)} of {len(pattern)} steps, by {SHARE:.0%} of a step each")
        rows = _taken(run, pid, [{span: delay_s} if on else {} for on, _ in pattern], (1 + SHARE) * facts.period_s)
        probed.append(slope_of(part, span, rows, pattern))
    return Proof(diagnosis, tuple(probed))


def parts_of(diagnosis: Diagnosis) -> list[str]:
    """The parts to probe: those of the first findings, then generation and training."""
    found = [PARTS[finding.cause] for finding in diagnosis.findings[:FINDINGS] if finding.cause in PARTS]
    return list(dict.fromkeys([*found, *ALWAYS]))


def blocks(max_lag: int) -> list[tuple[bool, bool]]:
    """For each step of a probe: whether it is delayed, and whether it counts. Delays come in the order off, on, on, off, so
    that what drifts cancels out. With a lag the first steps of a block still feel the block before, and do not count."""
    apart, each = (max_lag + 1, 3) if max_lag else (0, 1)
    pairs = -(-PAIRS // each)
    order = list(itertools.islice(itertools.cycle([False, True, True, False]), 2 * pairs))
    return [(on, place >= apart) for on in order for place in range(apart + each)]


def slope_of(part: str, span: str, rows: Sequence[Mapping[str, Any]], pattern: Sequence[tuple[bool, bool]]) -> Probed:
    """The slope from pairs of neighbouring steps, one with a delay and one without."""
    counted = [(row, on) for row, (on, counts) in zip(rows, pattern, strict=True) if counts]
    delayed, plain = ([row for row, is_on in counted if is_on is on] for on in (True, False))
    longer = [_step_s(a) - _step_s(b) for a, b in zip(delayed, plain, strict=True)]
    added = [seconds_in(a, span) - seconds_in(b, span) for a, b in zip(delayed, plain, strict=True)]
    slopes = [seconds / max(1e-9, more) for seconds, more in zip(longer, added, strict=True)]
    step_s = float(np.mean([_step_s(row) for row in plain]))
    return Probed(part, span, hodges_lehmann(slopes), float(np.mean(added)), step_s, len(rows))


def _step_s(row: Mapping[str, Any]) -> float:
    value = row.get("run/step_s")
    return float(value) if isinstance(value, int | float) else float("nan")


def _span_of(part: str, facts: Facts) -> str:
    """The span that stands for a part in this run: engines of their own are asked from here."""
    return "engine.remote" if part == "generation" and facts.setting("placement.engines", 0) else SPANS[part]


def _process(run: Run) -> int:
    """The process that runs in the folder."""
    lock = run.folder.path / ".lock"
    try:
        pid = int(lock.read_text()) if is_locked(lock) else 0
    except (OSError, ValueError):
        pid = 0
    if not pid:
        raise RunFolderError(
            f"{run.folder.shown}: no run goes on in this folder",
            "delays are for a run that goes on, on this machine; without --probe its record is read",
        )
    return pid


def _taken(run: Run, pid: int, steps: Sequence[Mapping[str, float]], step_s: float) -> list[dict[str, Any]]:
    """Have the run take these steps, and return their rows. Blocks until they are there; the plan is gone afterwards, whatever
    happens here."""
    life_s = min(MOST_LIFE_S, 60 + 4 * step_s * (len(steps) + 2))
    tail = Tail(run.folder.metrics)
    tail.skip()
    plan = ask(run.folder, pid, steps, life_s)
    try:
        return _wait_for(run, tail, plan)
    finally:
        withdraw(run.folder, plan)


def _wait_for(run: Run, tail: Tail, plan: DelayPlan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        rows += [row for row in tail.read()[1] if row.get(PLAN) == plan.id and TOTAL in row]
        if len(rows) >= len(plan.steps):
            return rows[: len(plan.steps)]
        if not is_locked(run.folder.path / ".lock"):
            raise RunFolderError(f"{run.folder.shown}: the run ended while it was probed", "probe earlier, or a longer run")
        if time.time() >= plan.expires:
            raise RunFolderError(
                f"{run.folder.shown}: its steps take much longer than before; delays have ended",
                "look at its stalls, then probe",
            )
        time.sleep(POLL_S)
