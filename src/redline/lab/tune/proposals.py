"""What to try next: changes of the space, each with what the simulator, the doctor or the planner predicts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.errors import ConfigError
from redline.lab.doctor.doctor import Diagnosis
from redline.lab.doctor.finding import Finding
from redline.lab.simulate.recorded import Recording
from redline.lab.simulate.whatif import KEYS, Answer, simulate
from redline.lab.tune.space import SPACE, Change, name_of, overrides_of

MOST_SHARE = 0.95
"""Share of the time that a change may be said to save: a ratio stays finite."""
ALONE = ("buffer.max_lag", "placement.")
"""Keys that are tried by themselves: what they change besides the speed is to be seen beside their own gain."""


@dataclass(slots=True, frozen=True)
class Prediction:
    """How many times as fast a change would make the run."""

    likely: float
    low: float | None
    high: float | None
    """None where an assumption behind it has no bound: then nothing rules the change out."""
    source: str
    """simulator, doctor or planner."""
    why: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, frozen=True)
class Proposal:
    """A change that may be tried, and what is known of it before."""

    change: Change
    prediction: Prediction | None = None
    """None where nothing predicts it: it is tried after those of which a gain is expected."""

    @property
    def name(self) -> str:
        return name_of(self.change)

    def is_hopeless(self, worth: float) -> bool:
        """Whether the prediction rules out that it gains as much as `worth`."""
        return self.prediction is not None and self.prediction.high is not None and self.prediction.high < 1 + worth


Planner = Callable[[Change], float | None]
"""A change → how many times as fast the planner takes it for; None where it says nothing."""


def proposals(
    changes: Iterable[Change], diagnosis: Diagnosis | None, recording: Recording | None, planner: Planner
) -> list[Proposal]:
    """Predict every change, and those that the doctor asks for; in the order in which they are to be tried."""
    findings = diagnosis.findings if diagnosis else ()
    asked = [finding for finding in findings if finding.change and finding.change.keys() <= SPACE.keys()]
    every = {name_of(change): change for change in [*(finding.change for finding in asked), *changes]}
    made = [Proposal(change, _predicted(change, diagnosis, recording, planner)) for change in every.values()]
    return sorted([*_together(asked, diagnosis), *made], key=_place)


def _together(asked: Sequence[Finding], diagnosis: Diagnosis | None) -> Iterator[Proposal]:
    """All that the doctor asks for as one change, where that is more than one. A recipe with many mistakes loses them in one
    trial; where that fails, each is tried by itself."""
    joined = [finding for finding in asked if not any(key.startswith(ALONE) for key in finding.change)]
    change = {key: value for finding in reversed(joined) for key, value in finding.change.items()}
    if diagnosis is None or len(joined) < 2:
        return
    gains = [finding.gain for finding in joined]
    low, likely, high = (
        _times(sum(getattr(gain, part) for gain in gains), diagnosis) for part in ("low_s", "likely_s", "high_s")
    )
    yield Proposal(change, Prediction(likely, low, high, "doctor", " ".join(finding.title for finding in joined)))


def _place(proposal: Proposal) -> tuple[int, float]:
    """Expected gains first, the largest before; then what nobody predicts; then expected losses."""
    prediction = proposal.prediction
    if prediction is None:
        return 1, 0.0
    return (0, -prediction.likely) if prediction.likely > 1 else (2, -prediction.likely)


def _predicted(change: Change, diagnosis: Diagnosis | None, recording: Recording | None, planner: Planner) -> Prediction | None:
    """The first that knows: a simulation without assumptions, the doctor, one with them, the planner."""
    simulated = _simulated(change, recording)
    if simulated is not None and simulated.high is not None:
        return simulated
    return _diagnosed(change, diagnosis) or simulated or _planned(change, planner)


def _simulated(change: Change, recording: Recording | None) -> Prediction | None:
    if recording is None or not change.keys() <= KEYS.keys():
        return None
    try:
        answer: Answer = simulate(recording, overrides_of(change))
    except ConfigError:  # outside of what the recording supports
        return None
    measured, now = answer.replayed.step_s, answer.simulated
    why = "; ".join(answer.assumptions) or f"replayed, the run is {answer.error:+.1%} beside its measurement"
    low, high = (None, None) if answer.assumptions else (measured / now.high_s, measured / now.low_s)
    return Prediction(answer.speedup, low, high, "simulator", why)


def _diagnosed(change: Change, diagnosis: Diagnosis | None) -> Prediction | None:
    """The finding that asks for this key, whatever value it names; of guesses also what is too little for a finding."""
    if diagnosis is None:
        return None
    finding = next((f for f in diagnosis.findings if f.change.keys() == change.keys()), None)
    if finding is not None:
        gain, why = finding.gain, f"{finding.title} {finding.gain.assumption}"
    elif change.keys() == {"engine.speculation"} and diagnosis.guesses is not None:
        gain, why = diagnosis.guesses, f"attempts of the recording, replayed; {diagnosis.guesses.assumption}"
    else:
        return None
    low, likely, high = (_times(seconds, diagnosis) for seconds in (gain.low_s, gain.likely_s, gain.high_s))
    return Prediction(likely, low, high, "doctor", why)


def _times(saved_s: float, diagnosis: Diagnosis) -> float:
    """How many times as fast a run is that saves so many seconds of those recorded: a third is 1.5 times."""
    return 1 / (1 - min(MOST_SHARE, diagnosis.share(saved_s)))


PLANNED: Mapping[str, str] = {
    "trainer.gradient_checkpointing": "forward passes that are left out",
    "trainer.offload_optimizer": "bytes that need not travel",
    "engine.max_num_seqs": "weights that are read for more rows at once",
}
"""Keys whose time the planner models, and by what."""


def _planned(change: Change, planner: Planner) -> Prediction | None:
    """The planner's arithmetic has no interval, and rules nothing out."""
    if not change.keys() <= PLANNED.keys():
        return None
    times = planner(change)
    return None if times is None else Prediction(times, None, None, "planner", PLANNED[next(iter(change))])
