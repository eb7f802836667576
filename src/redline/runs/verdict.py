"""What bounded a run, in words: who waited for whom, as the ledger has it, or as its steps so far do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.telemetry.ledger import UNACCOUNTED, LaneLedger, Ledger
from redline.telemetry.summary.timeline import ROLLOUTS_LANE, by_phase, in_words

SMALL = 0.05
"""Waiting of a smaller part of the time is no bound worth a sentence."""
_WORK = ("generation", "training")
_GROUPS = ("wait_for_rollouts", "wait_for_late_groups")
"""Waits of the trainer for generation."""
_ENVIRONMENTS = ("environment", "wait_for_environments")
_ENVIRONMENTS_HINT = (
    "The lane of the environments and rollouts/environment_pNN_s say where; more attempts at once keep the engine busier."
)


@dataclass(slots=True, frozen=True)
class Bound:
    """What to tell a person first."""

    headline: str
    details: tuple[str, ...]


def bound_of(phases: Mapping[str, float], ledger: Ledger | None, max_lag: int) -> Bound:
    """`phases` is the time of all steps in the main lane."""
    total = sum(phases.values())
    if total <= 0:
        return Bound("No step is done yet.", ())
    shares = {phase: seconds / total for phase, seconds in phases.items()}
    rollouts = ledger.lanes.get(ROLLOUTS_LANE) if ledger else None
    if max_lag == 0:
        bound = _lockstep(shares)
    elif rollouts is not None and rollouts.wall_ns:
        bound = _side_by_side(shares, rollouts)
    else:
        bound = _one_side(shares)
    return Bound(bound.headline, (*bound.details, *_remarks(shares, ledger)))


def _lockstep(shares: Mapping[str, float]) -> Bound:
    """Engine and trainer take turns: what takes longer is what to make faster, and the shorter is what overlap could hide."""
    environments = sum(shares.get(phase, 0.0) for phase in _ENVIRONMENTS)
    if environments > max(shares.get(phase, 0.0) for phase in _WORK):
        of = ", ".join(f"{phase} {shares.get(phase, 0.0):.0%}" for phase in _WORK)
        return Bound(f"Environments bound this run: {environments:.0%} of a step, {of}.", (_ENVIRONMENTS_HINT,))
    first, second = sorted(_WORK, key=lambda phase: -shares.get(phase, 0.0))
    headline = (
        f"{first.capitalize()} bounds this run: {shares.get(first, 0):.0%} of a step, {second} {shares.get(second, 0):.0%}."
    )
    turns = "Engine and trainer took turns (buffer.max_lag: 0), so each stood still while the other worked."
    hidden = f"Side by side, with buffer.max_lag: 1 or more, up to {shares.get(second, 0):.0%} of the time could be hidden."
    return Bound(headline, (turns, hidden))


def _side_by_side(shares: Mapping[str, float], rollouts: LaneLedger) -> Bound:
    """The side that waits less is the one that bounds."""
    phases = by_phase(rollouts.rows)
    evaluating_ns = phases.pop("wait_for_evaluation", 0)  # lies between the steps, as in the trainer's shares
    theirs = {phase: ns / max(1, rollouts.wall_ns - evaluating_ns) for phase, ns in phases.items()}
    trainer_waits = sum(shares.get(phase, 0.0) for phase in _GROUPS)
    environments = theirs.get("wait_for_environments", 0.0)
    all_waits = sum(share for phase, share in theirs.items() if phase.startswith("wait"))
    rollouts_wait = all_waits - environments
    details = (
        f"The trainer waited for rollouts {trainer_waits:.0%} of the time; rollouts waited {all_waits:.0%} of theirs"
        f"{_for_whom(theirs)}.",
    )
    if trainer_waits >= SMALL and trainer_waits >= rollouts_wait and environments > theirs.get("generation", 0.0):
        headline = f"Environments bound this run: the engine waits for them {environments:.0%} of the time."
        return Bound(headline, (*details, _ENVIRONMENTS_HINT))
    if max(trainer_waits, rollouts_wait) < SMALL:
        return Bound("Neither side waits: generation and training keep each other busy.", details)
    if trainer_waits >= rollouts_wait:
        return Bound(f"Generation bounds this run: the trainer waits for it {trainer_waits:.0%} of the time.", details)
    return Bound(f"Training bounds this run: rollouts wait for it {rollouts_wait:.0%} of the time.", details)


def _one_side(shares: Mapping[str, float]) -> Bound:
    """While a run goes on there is no ledger, and its steps tell the trainer's side."""
    waits = sum(shares.get(phase, 0.0) for phase in (*_GROUPS, "wait"))
    if waits < SMALL:
        return Bound(f"Training bounds this run so far: the trainer waits {waits:.0%} of the time.", ())
    return Bound(f"Generation bounds this run so far: the trainer waits for rollouts {waits:.0%} of the time.", ())


def _for_whom(shares: Mapping[str, float]) -> str:
    waits = sorted(((share, phase) for phase, share in shares.items() if phase.startswith("wait_for_")), reverse=True)
    parts = [f"{in_words(phase).removeprefix('waiting ')} {share:.0%}" for share, phase in waits if share >= 0.005]
    return f" ({', '.join(parts)})" if parts else ""


def _remarks(shares: Mapping[str, float], ledger: Ledger | None) -> tuple[str, ...]:
    """What else took a part that should not be overlooked."""
    known = {*_WORK, "wait_for_rollouts", "wait", UNACCOUNTED}
    others = [(share, phase) for phase, share in shares.items() if phase not in known and share >= SMALL]
    parts = [f"{in_words(phase)} {share:.0%}" for share, phase in sorted(others, reverse=True)]
    remarks = [f"Beside that, of a step: {', '.join(parts)}."] if parts else []
    lanes = ledger.lanes.items() if ledger else ()
    gaps = [(lane.unaccounted_fraction, name) for name, lane in lanes]
    if gaps:
        worst, name = max(gaps)
        remarks.append(f"Unaccounted is at most {worst:.1%} of a lane ({name}).")
    return tuple(remarks)
