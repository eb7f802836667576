"""Attempts that failed: how many, and why most of them did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from redline.errors import TaskError, shortened

if TYPE_CHECKING:
    from redline.types import Failure, Trajectory  # needs NumPy, which telemetry does without

WORTH_SAYING = 0.03
"""Share of failed attempts above which a person is told of them."""
MAX_LINE = 400
"""Characters of a reason in a row of metrics and on the console; an attempt's own is stored with it."""
MAX_REASONS = 1000
"""Kept apart. What a message holds may differ every time."""


def reaches_target(row: Mapping[str, Any], target: float | None) -> bool:
    """Whether the evaluation of a row ends a run that is to stop at `target`. The one before the first step does not, and one
    with more than a few failures neither: its mean is over the other attempts alone."""
    reward, failed = row.get("evaluation/reward_mean"), row.get("evaluation/failures", 0)
    if target is None or reward is None or not row.get("step") or failed > WORTH_SAYING * row.get("evaluation/num_answers", 0):
        return False
    return bool(reward >= target)


class FailureTally:
    """Counts attempts and their failures. Failures at one place of the user's code are of one kind, whatever they say."""

    def __init__(self) -> None:
        self.num_attempts = 0
        self.num_failed = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._examples: dict[tuple[str, str], Failure] = {}

    def add(self, attempts: Iterable[Trajectory]) -> None:
        """Count attempts, each by one of its sequences."""
        for attempt in attempts:
            self.num_attempts += 1
            if attempt.failure is not None:
                self.num_failed += 1
                self._count(attempt.failure)

    def _count(self, failure: Failure) -> None:
        kind = failure.stage, failure.where or failure.reason
        if kind in self._counts or len(self._counts) < MAX_REASONS:
            self._counts[kind] += 1
            self._examples.setdefault(kind, failure)

    @property
    def share(self) -> float:
        """Failed over all attempts; 0 where there are none."""
        return self.num_failed / self.num_attempts if self.num_attempts else 0.0

    @property
    def all_failed(self) -> bool:
        return 0 < self.num_attempts == self.num_failed

    @property
    def commonest(self) -> Failure | None:
        """One of the kind that is most frequent, the first of it."""
        return self._examples[max(self._counts, key=lambda kind: self._counts[kind])] if self._counts else None

    @property
    def line(self) -> str | None:
        """The commonest failure in a line: a long reason is shortened."""
        return None if self.commonest is None else shortened(str(self.commonest), MAX_LINE)

    def kinds(self, most: int) -> list[tuple[Failure, int]]:
        """The most frequent kinds of failure, one of each with how many there were."""
        return [(self._examples[kind], count) for kind, count in self._counts.most_common(most)]

    def sentence(self) -> str:
        """`12 of 640 attempts failed (2%), most often with: reward: KeyError: 'x', at rewards.py:7, in score`."""
        said = f"{self.num_failed} of {self.num_attempts} attempts failed ({self.share:.0%})"
        return f"{said}, {'all' if len(self._counts) == 1 else 'most often'} with: {self.line}" if self.commonest else said

    def stop(self, when: str) -> TaskError:
        """What ends a run that only makes failures."""
        assert self.commonest is not None
        failure = self.commonest
        hint = failure.hint or {
            "task": "`train(index)` must give a Task for every index, counted from 0 without end",
            "prompt": "the model's chat template must be able to render the task's messages",
            "reward": "`score(task, text)` must return a number, or named numbers, for any text",
        }.get(failure.stage, "see the reason")
        return TaskError(f"every attempt of {when} failed ({self.num_failed} of {self.num_attempts}): {self.line}", hint)
