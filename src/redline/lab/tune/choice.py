"""Which change is tried next, and when nothing is left to try."""

from __future__ import annotations

from collections.abc import Sequence

from redline.lab.tune.proposals import Proposal
from redline.lab.tune.space import Change
from redline.lab.tune.trials import Trial

MOST_TIMES = 2
"""How often the same change is tried: once more where what was kept meanwhile may have made it worth it."""


def next_proposal(
    proposals: Sequence[Proposal], trials: Sequence[Trial], kept: Change, step_s: float, worth: float
) -> Proposal | None:
    """The first proposal that is open; None where none is: each was measured or predicted to gain less than `worth`. `step_s`
    is what a step takes now."""
    for proposal in proposals:
        if proposal.is_hopeless(worth) or proposal.change.items() <= kept.items():
            continue
        if not is_settled(proposal.change, trials, kept, step_s, worth):
            return proposal
    return None


def is_settled(change: Change, trials: Sequence[Trial], kept: Change, step_s: float, worth: float) -> bool:
    """Whether earlier trials of a change say enough of it."""
    own = [trial for trial in trials if trial.change == change]
    if not own:
        return False
    last = own[-1]
    if len(own) >= MOST_TIMES or last.against == kept or last.outcome == "kept":
        return True
    if last.gain is None:
        return last.failure != "memory"  # which may be free since something else was kept
    return most_now(last, step_s) < 1 + worth


def most_now(trial: Trial, step_s: float) -> float:
    """How many times as fast a change that was reverted can make the run now. What it saves at most is a number of seconds,
    and those weigh more in a step that has become shorter."""
    assert trial.gain is not None
    saved = trial.gain.step_s * (1 - 1 / trial.gain.high)
    return 1 / (1 - saved / step_s) if saved < step_s else float("inf")
