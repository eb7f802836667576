"""How long attempts at a task will be: as long as the last ones at it were.

A batch ends with its longest attempt, so the longest should not begin last. Where an engine has fewer rows than a batch has
attempts, the groups that are expected to take longest begin first. A task that was never attempted counts as long as the others
are on average. The order decides when something is sampled, and nothing of what.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 1 << 15
"""Groups that are remembered; a task that none of them attempted is a new one again."""

Order = tuple[int, float]
"""As `GenerateRequest.order`: the version at which a group is begun, then less its expected length."""


@dataclass(slots=True, frozen=True)
class _Last:
    """The last group at a task."""

    group: int
    """Counts groups as they were learned."""
    tokens: int
    attempts: int


class ExpectedLengths:
    """Learns from groups that are complete. Any thread may call it."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self._last: OrderedDict[str, _Last] = OrderedDict()
        """By task, in the order of `group`."""
        self._num_learned = self._tokens = self._attempts = 0
        """Tokens and attempts: the sums over all tasks that are remembered, whole numbers, so that they do not depend on the
        order in which groups came."""
        self._lock = threading.Lock()

    def learn(self, task_id: str, lengths: Sequence[int]) -> None:
        """Take in the tokens that the policy chose in each attempt of a group. Attempts without any have failed before they
        asked, and tell nothing."""
        sampled = [length for length in lengths if length]
        with self._lock:
            self._num_learned += 1
            if sampled:
                self._forget(task_id)
                self._last[task_id] = _Last(self._num_learned, sum(sampled), len(sampled))
                self._tokens, self._attempts = self._tokens + sum(sampled), self._attempts + len(sampled)
            for old in [task for task, last in self._oldest() if last.group <= self._num_learned - self._max_groups]:
                self._forget(old)

    def _oldest(self) -> list[tuple[str, _Last]]:
        """One group is learned at a time, so that one is forgotten at most."""
        return [next(iter(self._last.items()))] if self._last else []

    def _forget(self, task_id: str) -> None:
        last = self._last.pop(task_id, None)
        if last is not None:
            self._tokens, self._attempts = self._tokens - last.tokens, self._attempts - last.attempts

    def of(self, task_id: str) -> float | None:
        """Mean tokens of the last attempts at a task; None where none is remembered."""
        with self._lock:
            last = self._last.get(task_id)
        return None if last is None else last.tokens / last.attempts

    @property
    def mean(self) -> float:
        """Mean tokens of an attempt, over the last groups at all tasks; 0 where none is remembered."""
        with self._lock:
            return self._tokens / self._attempts if self._attempts else 0.0

    def order(self, task_id: str, version: int) -> Order:
        """The order of a group that is begun at `version`: behind those of earlier versions, before shorter ones."""
        expected = self.of(task_id)
        return version, -(self.mean if expected is None else expected)
