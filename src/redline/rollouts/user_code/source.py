"""The user's task source, called in threads of their own with limits of time, and by no more threads at once than it bears."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from redline.ports import Score
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.tasks.checks import check_task
from redline.rollouts.user_code.calls import UserCalls
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.permits import Permits
from redline.types import Failure, Task

Result = TypeVar("Result")


class CalledSource:
    """Fetches tasks and makes calls that score. What goes wrong in the user's code is a `Failure`."""

    def __init__(self, setup: RolloutSetup) -> None:
        self._tasks, self._config = setup.tasks, setup.config
        self._loop = EventLoop()
        self._train_permits = Permits()
        self._score_permits = Permits(1 if setup.max_reward_workers == 1 else None, setup.group_timeout_s)
        """Where one thread may score, no second call is made while one is under way, in any thread."""
        self._batch_calls = self._score_calls(setup.max_reward_workers)
        """For the rewards of a whole batch."""
        self._of_this_thread = threading.local()
        self._all_calls = [self._batch_calls]
        self._version = 0

    def train(self, indices: Sequence[int]) -> list[Task | Failure]:
        """The training tasks of these indices, in order. Blocks until all are there or were given up."""
        return self._own_calls("train").results([partial(self._train, index) for index in indices])

    def _train(self, index: int) -> Task:
        return check_task(self._tasks.train(index), f"train({index})", bare=self._config.environment.name is not None)

    def score(self, task: Task, text: str) -> Score:
        """What the user's `score` returns. Blocks until it comes, also where it is a coroutine. Call it in works of `results`,
        which have a limit of time."""
        score: Score = self._loop.result(self._tasks.score(task, text))
        return score

    def results(self, works: Sequence[Callable[[], Result]], *, as_batch: bool) -> list[Result | Failure]:
        """What comes of works that score, in order. Blocks until all are there or were given up. With `as_batch`, as many
        threads help as may score at once; without, the calling thread has one that scores for it."""
        return (self._batch_calls if as_batch else self._own_calls("score")).results(works)

    def step_begins(self, version: int) -> None:
        """A new version gives calls that did not return in time another chance: some of each step, not some of each group."""
        if version != self._version:
            self.try_again("train")
            self.try_again("score")
        self._version = version

    def try_again(self, what: Literal["train", "score"]) -> None:
        """Forget which calls did not return in time."""
        (self._train_permits if what == "train" else self._score_permits).try_again()

    def thread_ends(self) -> None:
        """Called last in a thread that has fetched tasks or scored: those that made its calls end too."""
        for calls in vars(self._of_this_thread).values():
            self._all_calls.remove(calls)
            calls.close()

    def close(self) -> None:
        """End its threads; one whose call never returns ends with the process."""
        for calls in list(self._all_calls):
            calls.close()
        self._loop.close()

    def _own_calls(self, what: Literal["train", "score"]) -> UserCalls:
        """Those of the calling thread: one that is left behind may be waiting for its own for ever."""
        calls: UserCalls | None = getattr(self._of_this_thread, what, None)
        if calls is None:
            calls = self._train_calls() if what == "train" else self._score_calls(1)
            setattr(self._of_this_thread, what, calls)
            self._all_calls.append(calls)
        return calls

    def _train_calls(self) -> UserCalls:
        limit_s, key = self._config.task_timeout_s, "rollouts.task_timeout_s"
        return UserCalls("task", "train", limit_s, key, loop=self._loop, permits=self._train_permits)

    def _score_calls(self, most: int) -> UserCalls:
        limit_s, key = self._config.reward_timeout_s, "rollouts.reward_timeout_s"
        return UserCalls("reward", "score", limit_s, key, most=most, loop=self._loop, permits=self._score_permits)
