"""A mean reward is a reward. An accuracy is what a task calls so."""

from __future__ import annotations

from collections.abc import Sequence

from redline.types import Trajectory

PARTS = ("accuracy", "correct")
"""Names of a part of the reward that is 1 for a right answer and 0 for any other."""


def accuracy(attempts: Sequence[Trajectory]) -> float | None:
    """Share of right answers, where the task says which are right: a part of the reward has one of the names of `PARTS`, and is
    0 or 1 in every answer. An attempt that failed is not right. None where the task does not say so."""
    scored = [attempt.reward_parts for attempt in attempts if attempt.failure is None]
    for name in PARTS:
        if scored and all(parts.get(name) in (0, 1) for parts in scored):
            return sum(parts[name] for parts in scored) / len(attempts)
    return None
