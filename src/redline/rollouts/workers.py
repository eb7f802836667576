"""The threads that call the user's code beside the trainer: one for tasks, one or more for rewards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from redline.rollouts.episodes.group import EpisodeGroup
from redline.rollouts.play import GroupPlay
from redline.rollouts.rewards.pool import RewardPool
from redline.types import TrajectoryGroup

if TYPE_CHECKING:
    from redline.rollouts.dispatcher import Dispatcher


class Workers:
    """The threads that call the user's code beside the trainer."""

    def __init__(
        self, dispatcher: Dispatcher, lock: threading.RLock, max_reward_workers: int, prepare_thread: Callable[[], None]
    ) -> None:
        ends = dispatcher.thread_ends
        self.rewards: RewardPool[TrajectoryGroup] = RewardPool(
            "rewards", max_reward_workers, dispatcher.deliver, dispatcher.fail, lock, prepare_thread, finish_thread=ends
        )
        self.tasks: RewardPool[GroupPlay | EpisodeGroup | TrajectoryGroup] = RewardPool(
            "tasks",
            1,
            dispatcher.take_posed,
            dispatcher.fail,
            lock,
            prepare_thread,
            finish_thread=ends,
            idle="wait.for_budget",
        )

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
