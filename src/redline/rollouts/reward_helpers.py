"""Rewards of many answers that are all there: whoever wants them begins, and others help as soon as rewards make it wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from redline.rollouts.reward_pool import RewardPool
from redline.telemetry import span

Result = TypeVar("Result")

HELP_AFTER_S = 0.02
"""Seconds of waiting, and more than of computing, which threads would not make shorter. To start them takes a millisecond."""
PATIENCE_S = 1.0
"""For helpers that have nothing to do, when all is to end."""


class RewardHelpers:
    """At most as many threads as it is told, all of which live until `close`; none where rewards do not wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pool: RewardPool[Any] | None = None
        self._found: dict[int, Any] = {}
        self._error: Exception | None = None

    def results(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """In their order, whoever computed them."""
        done: list[Result] = []
        began_s, began_computing_s = time.perf_counter(), time.thread_time()
        for work in works:
            done.append(work())
            computed_s = time.thread_time() - began_computing_s
            waited_s = time.perf_counter() - began_s - computed_s
            if self._most > 1 and waited_s > max(HELP_AFTER_S, computed_s):
                break
        return done + self._helped(works[len(done) :])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool.join(PATIENCE_S)
            self._pool = None

    def _helped(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        if not works:
            return []
        if self._pool is None:
            self._pool = RewardPool("helpers", self._most, self._deliver, self._fail, self._lock, is_watched=False)
        pool = self._pool
        pool.hold(len(works))
        with self._changed:
            self._found = {}
            for number, work in enumerate(works):
                pool.put(number, partial(_timed, work))
            try:
                self._changed.wait_for(lambda: len(self._found) == len(works) or self._error)
            finally:  # after an interrupt some are missing, and nobody wants them any more
                pool.abandon(set(range(len(works))) - self._found.keys())
            if self._error is not None:
                raise self._error
            return [self._found[number] for number in range(len(works))]

    def _deliver(self, number: int, result: Any) -> None:
        self._found[number] = result
        self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._changed.notify_all()


def _timed(work: Callable[[], Result]) -> Result:
    with span("rollouts.reward"):
        return work()
