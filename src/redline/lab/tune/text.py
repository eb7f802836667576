"""A tuning for people, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from redline.lab.tune.proposals import Prediction
from redline.lab.tune.space import overrides_of
from redline.lab.tune.trials import Gain, Trial
from redline.lab.tune.tune import Tuned


def line_of(number: int, trial: Trial) -> str:
    """`3  kept  engine.max_num_seqs=64: 2.10 times as fast (2.02 to 2.19), predicted 1.84 (1.31 to 2.62, doctor)`."""
    told = f"{_times(trial.gain)}, {trial.why}" if trial.gain else trial.why
    beside = "; ".join(guard.words for guard in trial.guards if guard.is_told and not guard.is_broken)
    return (
        f"{number:>3}  {trial.outcome:<8}  {trial.name}: {told}; {predicted(trial.prediction)}{f'; {beside}' if beside else ''}"
    )


def predicted(prediction: Prediction | None) -> str:
    """What was expected, in words."""
    if prediction is None:
        return "nothing was predicted"
    bounds = "" if prediction.low is None or prediction.high is None else f"{prediction.low:.2f} to {prediction.high:.2f}, "
    return f"predicted {prediction.likely:.2f} ({bounds}{prediction.source})"


def lines_of(tuned: Tuned, proof: str) -> Iterator[str]:
    """Give the lines: how it ended, what was kept, what it comes to. `proof` is the sentence of the comparison."""
    trials = tuned.state.trials
    outcomes = [sum(trial.outcome == outcome for trial in trials) for outcome in ("kept", "reverted", "failed")]
    yield f"{counted(trials)}: {outcomes[0]} kept, {outcomes[1]} reverted, {outcomes[2]} failed; {tuned.ended}"
    if not tuned.state.kept:
        yield "nothing was kept: no change is shown to make this recipe faster here"
        return
    yield f"kept: {' '.join(overrides_of(tuned.state.kept))}"
    yield f"A is the recipe as it was, B as it is now: {proof}"


def counted(trials: Sequence[Trial]) -> str:
    """`1 trial`, `12 trials`."""
    return f"{len(trials)} trial{'' if len(trials) == 1 else 's'}"


def _times(gain: Gain | None) -> str:
    assert gain is not None
    return f"{gain.ratio:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f})"
