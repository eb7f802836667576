"""One question, one answer, one score: every task of a `TaskSource` is played this way."""

from __future__ import annotations

from collections.abc import Callable

from redline.ports import Policy, Score
from redline.types import Task


class SingleTurn:
    """Asks the policy for one reply to the task's messages and scores it. Implements `ports.Environment`."""

    asks_once = True
    """`play` awaits one reply and nothing else."""

    def __init__(self, score: Callable[[Task, str], Score]) -> None:
        """`score` returns the reward for a reply to a task, and may block."""
        self._score = score

    async def play(self, task: Task, policy: Policy) -> Score:
        turn = await policy.say(task.messages)
        return self._score(task, turn.text)
