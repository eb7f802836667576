"""Held-out tasks, answered through the same pipeline as training tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redline.types import Task, Trajectory

if TYPE_CHECKING:
    from redline.rollouts.dispatcher import Dispatcher

EVALUATION_STREAM = 2**31
"""Added to the place of a held-out task to get its index, so that no evaluation repeats a training sample's randomness."""


def evaluate(rollouts: Dispatcher, tasks: Sequence[Task], patience_s: float | None = None) -> list[list[Trajectory]]:
    """Attempts at held-out tasks, with the same randomness every time, so that two evaluations differ by policy alone.

    Blocks until all are scored. Meanwhile groups under way rest; the user's calls for them are waited for first, but no longer
    than `patience_s`. Afterwards the engine forgets the prompts: no training sample depends on whether there was an
    evaluation."""
    config = rollouts.config.evaluation
    indices = range(EVALUATION_STREAM, EVALUATION_STREAM + len(tasks))
    with rollouts.paused(patience_s):
        attempts = rollouts.attempt(tasks, indices, config.samples_per_task, config.temperature)
        rollouts.session.reset_prefix_cache()
    return attempts
