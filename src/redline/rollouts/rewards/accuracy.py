"""A mean reward is a reward. An accuracy is what a task calls so."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from redline.types import Trajectory

PARTS = ("accuracy", "correct")
"""Names of a part of the reward that is 1 for a right answer and 0 for any other."""


def accuracy(attempts: Sequence[Trajectory]) -> float | None:
    """Share of right answers, from one sequence of each attempt, where the task says which are right: a part of the reward has
    one of the names of `PARTS`, and is 0 or 1 in every answer. An attempt that failed is not right. None where the task does
    not say so."""
    part = accuracy_part(attempts)
    return None if part is None else fmean(_is_right(attempt, part) for attempt in attempts)


def task_scores(attempts: Sequence[Sequence[Trajectory]]) -> list[float | None]:
    """By task, the share of right answers, a failed attempt not being one; where the task does not say which are right, the
    mean reward of the attempts that have one, and None for a task of which every attempt failed."""
    return scores_by(accuracy_part([attempt for group in attempts for attempt in group]), attempts)


def scores_by(part: str | None, attempts: Sequence[Sequence[Trajectory]]) -> list[float | None]:
    """`task_scores` by a part of the reward that says which answers are right; by the reward where that is None."""
    if part is None:
        rewards = [[attempt.reward for attempt in group if attempt.failure is None] for group in attempts]
        return [fmean(found) if found else None for found in rewards]
    return [fmean(_is_right(attempt, part) for attempt in group) for group in attempts]


def accuracy_part(attempts: Sequence[Trajectory]) -> str | None:
    """The part of the reward that says which answers are right; None where none does."""
    scored = [attempt.reward_parts for attempt in attempts if attempt.failure is None]
    return next((name for name in PARTS if scored and all(parts.get(name) in (0, 1) for parts in scored)), None)


def _is_right(attempt: Trajectory, part: str) -> float:
    return attempt.reward_parts[part] if attempt.failure is None else 0.0
