"""An answer of the simulator for people, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from redline.lab.simulate.whatif import Answer, Prediction


def lines_of(answer: Answer) -> Iterator[str]:
    """Give the lines: what was measured, the replay beside it, the what-if, and what was assumed."""
    yield f"measured   {answer.measured_s:.3g} s a step"
    yield f"replayed   {_step(answer.replayed)}: {round(answer.error, 3) + 0.0:+.1%} beside the measurement"
    yield f"simulated  {_step(answer.simulated)}, {answer.speedup:.2f}x the samples a second"
    yield f"           {_waits(answer.simulated)}"
    yield from (f"assumed    {assumption}" for assumption in answer.assumptions)


def _step(prediction: Prediction) -> str:
    return f"{prediction.step_s:.3g} s a step ({prediction.low_s:.3g} to {prediction.high_s:.3g})"


def _waits(prediction: Prediction) -> str:
    lags = ", ".join(f"{share:.0%} at lag {lag}" for lag, share in prediction.lags.items())
    return f"the trainer waits {prediction.trainer_waits:.0%} of the time, engines work {prediction.engines_busy:.0%}; {lags}"
