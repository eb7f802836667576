"""What answers come to: a score for each task and model with its interval, and the difference of two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from redline.lab.evaluate.answers import Answers
from redline.rollouts.rewards.accuracy import accuracy_part, scores_by
from redline.telemetry import describe_environment
from redline.telemetry.summary.intervals import Interval, mean_interval, share_interval
from redline.types import Task, by_attempt
from redline.watch.evaluation import asked_of, scored_of


@dataclass(slots=True, frozen=True)
class Score:
    """How good a model is at a task."""

    answers: Answers
    unit: str
    """Accuracy where the task says which answers are right, here and on the other side of a comparison; else the reward."""
    scores: Sequence[float | None]
    """By task, as `evaluation/task_scores`."""

    @classmethod
    def by(cls, part: str | None, answers: Answers) -> Score:
        """By a part of the reward that says which answers are right; by the reward where that is None."""
        unit = "reward" if part is None else "accuracy"
        return cls(answers, unit, scores_by(part, scored_of(answers.attempts)))

    @property
    def by_question(self) -> dict[str, float]:
        """Question → its score, the mean over its attempts; without those of which every attempt failed."""
        scores = zip(_names(self.answers.tasks), self.scores, strict=True)
        return {name: score for name, score in scores if score is not None}

    @property
    def value(self) -> float:
        """Mean over the questions."""
        return fmean(self.by_question.values())

    @property
    def interval(self) -> Interval | None:
        """95%; None with too few questions."""
        scores = list(self.by_question.values())
        if self.unit == "accuracy":
            return share_interval(scores, self.answers.row["evaluation/num_answers"])
        return mean_interval(scores)

    def as_json(self) -> dict[str, Any]:
        row, config = self.answers.row, self.answers.config
        right = ("accuracy",) if self.unit == "accuracy" else ()
        left = (*right, "reward_mean", "num_answers", "failures", "truncated_fraction", "completion_tokens_mean", "seconds")
        return {
            "name": self.answers.task,
            "model": self.answers.model,
            "value": self.value,
            "unit": self.unit,
            "interval_95": self.interval and list(self.interval),
            "num_tasks": len(self.answers.tasks),
            "left_out": self.answers.left_out,
            **{key: row[f"evaluation/{key}"] for key in left if f"evaluation/{key}" in row},
            "samples": self.by_question,
            "config": {section: getattr(config, section).model_dump(mode="json") for section in ("run", "model", "rollouts")},
        }


def _part(sides: Sequence[Answers]) -> str | None:
    """The part of the reward that says which answers are right, and is the same on all sides; None where there is none."""
    parts = {accuracy_part([one for group in scored_of(answers.attempts) for one in group]) for answers in sides}
    return parts.pop() if len(parts) == 1 else None


def _names(tasks: Sequence[Task]) -> list[str]:
    """A name for each question: its id, with a number behind it where a source gives one id several times."""
    seen: Counter[str] = Counter()
    names = []
    for task in tasks:
        seen[task.id] += 1
        names.append(task.id if seen[task.id] == 1 else f"{task.id} ({seen[task.id]})")
    return names


@dataclass(slots=True, frozen=True)
class Difference:
    """How much better a model is than another, question by question."""

    score: Score
    against: Score

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Both scores of each question that both have one for."""
        ours, theirs = self.score.by_question, self.against.by_question
        return [(score, theirs[question]) for question, score in ours.items() if question in theirs]

    @property
    def value(self) -> float:
        """Mean of score − against over the questions that both have."""
        return fmean(ours - theirs for ours, theirs in self.pairs)

    @property
    def interval(self) -> Interval | None:
        """95% of the mean of the questions' own differences; None with too few, and where all are equal."""
        return mean_interval([ours - theirs for ours, theirs in self.pairs])

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.score.answers.task,
            "model": self.score.answers.model,
            "against": self.against.answers.model,
            "value": self.value,
            "unit": self.score.unit,
            "interval_95": self.interval and list(self.interval),
            "num_tasks": len(self.pairs),
        }


@dataclass(slots=True, frozen=True)
class Document:
    """Everything that `redline eval` found."""

    scores: Sequence[Score]
    differences: Sequence[Difference]
    identity: Mapping[str, Any] = field(default_factory=describe_environment)
    """The machine, the versions and the time."""

    @classmethod
    def of(cls, ours: Sequence[Answers], theirs: Sequence[Answers]) -> Document:
        """`theirs` are answers to the same tasks in the same order, or none. Both sides of a task are scored alike."""
        sides = zip(ours, theirs, strict=True) if theirs else zip(ours, strict=True)
        scored = [[Score.by(_part(answered), answers) for answers in answered] for answered in sides]
        pairs = [Difference(*scores) for scores in scored if len(scores) > 1]
        by_side = [score for side in zip(*scored, strict=True) for score in side]
        return cls(by_side, [pair for pair in pairs if pair.pairs])

    def as_json(self) -> dict[str, Any]:
        return {
            "case": "eval",
            "identity": dict(self.identity),
            "results": [score.as_json() for score in self.scores],
            "differences": [difference.as_json() for difference in self.differences],
        }

    def answer_rows(self) -> Iterator[Mapping[str, Any]]:
        """One row for each attempt, for a file."""
        for answers in (score.answers for score in self.scores):
            for task, attempts in zip(answers.tasks, answers.attempts, strict=True):
                for index, own in enumerate(by_attempt(attempts)):
                    yield {
                        "task": answers.task,
                        "model": answers.model,
                        "question": task.id,
                        "asked": asked_of(task),
                        "reference": task.answer,
                        "attempt": index,
                        "answer": "\n".join(trajectory.text for trajectory in own),
                        "reward": None if own[0].failure else own[0].reward,
                        "reward_parts": dict(own[0].reward_parts),
                        "failure": str(own[0].failure) if own[0].failure else None,
                        "finish_reason": str(own[-1].finish_reason),
                        "tokens": sum(trajectory.num_completion_tokens for trajectory in own),
                    }
