"""What held-out tasks say of a run: its first evaluation beside its last one, and how sure the difference is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from redline.telemetry.summary.intervals import mean_interval

Row = Mapping[str, Any]
Word = Literal["rose", "fell", "unclear", "same", "once"]


@dataclass(slots=True, frozen=True)
class Evaluation:
    """One row of evaluations.jsonl."""

    step: int
    """Steps that were behind the policy; 0 is the policy that the run began with."""
    reward: float
    """Mean over the answers."""
    accuracy: float | None
    """Share of right answers, where the task says which are right."""
    answers: int
    tasks: int
    scores: Sequence[float | None] = field(default=(), repr=False)
    """By task, its accuracy where there is one, else its mean reward, or None where all attempts at it failed; empty in runs
    that did not write it."""

    @classmethod
    def read(cls, row: Row) -> Evaluation | None:
        """Return the evaluation of a row; None where the row is damaged or somebody else's."""
        names = ("reward_mean", "accuracy", "num_answers", "num_tasks")
        values = {name: row.get(f"evaluation/{name}") for name in names}
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        step, reward, scores = row.get("step"), numbers.get("reward_mean"), row.get("evaluation/task_scores")
        if not isinstance(step, int) or reward is None:
            return None
        known = isinstance(scores, list) and all(isinstance(score, int | float | None) for score in scores)
        answers, tasks = (int(numbers.get(name, 0)) for name in ("num_answers", "num_tasks"))
        return cls(step, reward, numbers.get("accuracy"), answers, tasks, tuple(scores) if known and scores else ())


@dataclass(slots=True, frozen=True)
class HeldOut:
    """The first and the last evaluation of a run, on the same tasks.

    Everything that is said of the change is over the tasks that were scored in both, each with its own mean: its value before
    and after, its interval, and whether it is a rise. Runs that did not write scores by task have the means over answers.
    """

    before: Evaluation
    after: Evaluation

    @classmethod
    def read(cls, rows: Iterable[Row]) -> HeldOut | None:
        """Return what the rows of evaluations.jsonl say; None where nothing was evaluated."""
        first = last = None
        for row in rows:
            last = Evaluation.read(row) or last
            first = first or last
        return cls(first, last) if first and last else None

    @property
    def measure(self) -> Literal["accuracy", "reward"]:
        """Accuracy where the task says which answers are right, else the reward."""
        return "reward" if self.before.accuracy is None or self.after.accuracy is None else "accuracy"

    @property
    def values(self) -> tuple[float, float]:
        """The measure before and after, over the tasks that were scored in both."""
        if self._pairs and self.before.step != self.after.step:
            before, after = zip(*self._pairs, strict=True)
            return fmean(before), fmean(after)
        return getattr(self.before, self.measure), getattr(self.after, self.measure)

    @property
    def left_out(self) -> int:
        """Tasks that were not scored in both evaluations: all attempts at them failed in one of the two."""
        return len(self.after.scores) - len(self._pairs) if self._is_paired and self.before.step != self.after.step else 0

    @property
    def _is_paired(self) -> bool:
        """Whether both have scores of the same tasks, and of the same measure."""
        same_measure = (self.before.accuracy is None) == (self.after.accuracy is None)
        return same_measure and 0 < len(self.before.scores) == len(self.after.scores)

    @property
    def _pairs(self) -> list[tuple[float, float]]:
        """The scores of each task before and after, where it has both."""
        pairs = zip(self.before.scores, self.after.scores, strict=True) if self._is_paired else ()
        return [(before, after) for before, after in pairs if before is not None and after is not None]

    @property
    def change(self) -> float:
        """after − before."""
        return self.values[1] - self.values[0]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the change: mean ± t · s / √n of the tasks' own changes. None with too few tasks, and where all
        tasks changed alike."""
        changes = [after - before for before, after in self._pairs]
        return None if self.before.step == self.after.step else mean_interval(changes)

    @property
    def word(self) -> Word:
        """What may be said: the measure rose or fell, or the interval has 0 in it, or no task was scored in both, or it is not
        known how many answers there were."""
        if self.before.step == self.after.step:
            return "once"
        if self.left_out and not self._pairs:
            return "unclear"
        if not self.change:
            return "same"
        if not self.after.answers or (self.interval and self.interval[0] <= 0 <= self.interval[1]):
            return "unclear"
        return "rose" if self.change > 0 else "fell"

    @property
    def sentence(self) -> str:
        """`held-out accuracy rose from 10.0% to 93.0%, by 83.0 points (95% interval 75.4 to 90.6, 100 answers)`."""
        before, after = (shown(value, self.measure) for value in self.values)
        if self.word == "once":
            return f"held-out {self.measure} is {before} ({self._answers} at step {self.after.step})"
        if self.word == "same":
            return f"held-out {self.measure} stayed at {before} ({self._interval_words})"
        verb = {"rose": "rose", "fell": "fell"}.get(self.word, "went")
        chance = ", which may be chance," if self.word == "unclear" else ""
        by = shown_change(abs(self.change) if verb != "went" else self.change, self.measure, signed=verb == "went")
        return f"held-out {self.measure} {verb} from {before} to {after}, by {by}{chance} ({self._interval_words})"

    @property
    def _interval_words(self) -> str:
        answers = self._answers + (f"; {self.left_out_words}" if self.left_out else "")
        if self.interval is None or self.word == "same":
            return answers
        low, high = self.interval if self.change > 0 or self.word == "unclear" else (-self.interval[1], -self.interval[0])
        ends = (shown_change(end, self.measure, unit=False, signed=False) for end in (low, high))
        return f"95% interval {' to '.join(ends)}, {answers}"

    @property
    def _answers(self) -> str:
        return f"{self.after.answers:,} answers" if self.after.answers else "an unknown number of answers"

    @property
    def left_out_words(self) -> str:
        """`8 of 16 tasks left out, not scored in both`."""
        return f"{self.left_out:,} of {len(self.after.scores):,} tasks left out, not scored in both"

    def as_json(self) -> dict[str, Any]:
        """Return everything but the scores, for pages."""
        sides = {side: {k: v for k, v in asdict(getattr(self, side)).items() if k != "scores"} for side in ("before", "after")}
        found = {"measure": self.measure, "values": list(self.values), "change": self.change, "word": self.word}
        found |= {"left_out": self.left_out}
        return sides | found | {"interval": self.interval and list(self.interval), "sentence": self.sentence}


def shown(value: float, measure: str) -> str:
    """Return a value as a person reads it: `93.0%`, `0.930`."""
    return f"{value:.1%}" if measure == "accuracy" else f"{value:.3f}"


def shown_change(value: float, measure: str, *, unit: bool = True, signed: bool = True) -> str:
    """Return a difference as a person reads it: `+83.0 points`, `+0.830`."""
    sign = "+" if signed else ""
    if measure == "accuracy":
        return f"{100 * value:{sign}.1f}" + (" points" if unit else "")
    return f"{value:{sign}.3f}"
