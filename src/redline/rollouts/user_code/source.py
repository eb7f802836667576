"""The user's task source, called in threads of their own with limits of time, and by no more threads at once than it bears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, TypeVar

from redline.ports import Score, TaskSource
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.tasks.checks import check_task
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.elsewhere import ScoredElsewhere
from redline.rollouts.user_code.jobs import ThreadKind, UserFunction
from redline.rollouts.user_code.limited_calls import Gathering, UserCalls
from redline.rollouts.user_code.permits import Permits
from redline.types import Failure, Task

Result = TypeVar("Result")

PATIENCE_S = 1.0
"""Seconds for threads that have nothing to do, when all is to end."""


class CalledSource:
    """Fetches tasks and makes calls that score. What goes wrong in the user's code is a `Failure`."""

    def __init__(self, setup: RolloutSetup) -> None:
        self._tasks, self._config = setup.tasks, setup.config
        self._loop = EventLoop()
        self._train_permits = Permits()
        self._score_permits = Permits(1 if setup.max_reward_workers == 1 else None, setup.group_timeout_s)
        """Where one thread may score, no second call is made while one is under way, in any thread."""
        limit_s, key = self._config.task_timeout_s, "rollouts.task_timeout_s"
        self.train_function = UserFunction("task", "train", limit_s, key, self._loop, self._train_permits)
        limit_s, key = self._config.reward_timeout_s, "rollouts.reward_timeout_s"
        self.score_function = UserFunction("reward", "score", limit_s, key, self._loop, self._score_permits)
        self._train_calls = UserCalls(self.train_function)
        self._score_calls = UserCalls(self.score_function, ThreadKind("score", setup.max_reward_workers))
        self._version = 0

    def train(self, indices: Sequence[int]) -> list[Task | Failure]:
        """The training tasks of these indices, in order. Blocks until all are there or were given up."""
        return self._train_calls.results([self.fetching(index) for index in indices])

    def fetching(self, index: int) -> Callable[[], Task]:
        """The call that fetches a training task."""
        return partial(self._train, index)

    def _train(self, index: int) -> Task:
        return check_task(self._tasks.train(index), f"train({index})", bare=self._config.environment.name is not None)

    def score(self, task: Task, text: str) -> Score:
        """What the user's `score` returns. Blocks until it comes, also where it is a coroutine. Call it in works of `results`,
        which have a limit of time."""
        score: Score = self._loop.result(self._tasks.score(task, text))
        return score

    def gathering(self) -> AbstractContextManager[Gathering]:
        """Works that score, as they come, and what comes of them or why they were given up. As many threads help as may score
        at once."""
        return self._score_calls.gathering()

    @property
    def scored_by(self) -> TaskSource:
        """The source whose `score` is called."""
        return self._tasks

    def step_begins(self, version: int) -> None:
        """A new version gives calls that did not return in time another chance: some of each step, not some of each group."""
        if version != self._version:
            self.try_again("train")
            self.try_again("score")
        self._version = version

    def try_again(self, what: Literal["train", "score"]) -> None:
        """Forget which calls did not return in time."""
        (self._train_permits if what == "train" else self._score_permits).try_again()

    def close(self) -> None:
        """End its threads; one whose call never returns ends with the process."""
        for calls in (self._train_calls, self._score_calls):
            calls.close()
            calls.join(PATIENCE_S)
        self._loop.close()
        if isinstance(self._tasks, ScoredElsewhere):
            self._tasks.close()
