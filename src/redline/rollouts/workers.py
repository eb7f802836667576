"""The threads that call the user's code beside the trainer: one for tasks, one or more for rewards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from redline.rollouts.user_code.jobs import ThreadKind
from redline.rollouts.user_code.limited_calls import UserCalls
from redline.rollouts.user_code.source import CalledSource

if TYPE_CHECKING:
    from redline.rollouts.dispatcher import Dispatcher


class Workers:
    """The threads that call the user's code beside the trainer."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        source: CalledSource,
        lock: threading.RLock,
        max_reward_workers: int,
        prepare_thread: Callable[[], None],
    ) -> None:
        rewards = ThreadKind("rewards", max_reward_workers, "rollouts.reward", "wait.for_completions", prepare_thread)
        self.rewards = UserCalls(source.score_function, rewards, fail=dispatcher.fail, lock=lock)
        tasks = ThreadKind("tasks", 1, "rollouts.tasks", "wait.for_budget", prepare_thread)
        self.tasks = UserCalls(source.train_function, tasks, fail=dispatcher.fail, lock=lock)

    def why_idle(self) -> str:
        """Why the engine has nothing to do: others still owe it requests, or what follows from its answers, or may begin no
        more."""
        return "wait.for_requests" if self.tasks.num_to_score or self.rewards.num_to_score else "wait.for_budget"

    @property
    def num_calling(self) -> int:
        """Threads that call the user's code now."""
        return self.tasks.num_scoring + self.rewards.num_scoring

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, none of them begins anything new."""
        for pool in (self.tasks, self.rewards):
            pool.be_quiet(quiet=True)
        try:
            yield
        finally:
            for pool in (self.tasks, self.rewards):
                pool.be_quiet(quiet=False)

    def cancel(self, indices: set[int]) -> None:
        self.tasks.cancel(indices)
        self.rewards.cancel(indices)

    def close(self) -> None:
        self.tasks.close()
        self.rewards.close()

    def join(self, patience_s: float) -> None:
        self.tasks.join(patience_s)
        self.rewards.join(patience_s)
