"""The loop in simulated time: rollouts and a trainer that only take their time, around the real buffer."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
from fakes import trajectory

from redline.buffer.buffer import GroupBuffer
from redline.buffer.memory_store import MemoryStore
from redline.config.schema import BufferConfig
from redline.types import Trajectory, TrajectoryGroup

Seconds = Callable[[int, Random], float]
"""From the version at which it begins, and chance."""


@dataclass
class Simulation:
    group_s: Seconds
    train_s: Seconds
    max_lag: int
    groups_per_step: int = 8
    slots: int = 1000
    """Groups that rollouts can work at; the others queue."""
    depth: int | None = None
    seed: int = 0
    now: float = 0.0
    targets: list[int] = field(default_factory=list)
    """The controller's, after each step."""
    lags: list[int] = field(default_factory=list)
    """Of every group that was trained."""

    def run(self, steps: int) -> Simulation:
        self._rng = Random(self.seed)
        self._slots_free_at = [0.0] * self.slots
        self._under_way: list[tuple[float, int, int]] = []
        config = BufferConfig(max_lag=self.max_lag, depth=self.depth)
        self.buffer = GroupBuffer(config, self.groups_per_step, MemoryStore(self.max_lag), clock=lambda: self.now)
        for version in range(steps):
            self._offer_finished()
            self._begin(version)
            while not self.buffer.has_batch(version):
                self.now = max(self.now, self._under_way[0][0])
                self._offer_finished()
                self._begin(version)
            batch = self.buffer.next_batch(version)
            self.now += self.train_s(version, self._rng)
            self.buffer.trained(batch)
            self.targets.append(self.buffer.decision.new)
            self.lags += batch.lags
        return self

    def _begin(self, version: int) -> None:
        self.buffer.give_up(version)  # they go on for nothing, and nobody takes what comes of them
        for number in self.buffer.admit(version):
            start = max(self.now, heapq.heappop(self._slots_free_at))
            end = start + self.group_s(version, self._rng)
            heapq.heappush(self._slots_free_at, end)
            heapq.heappush(self._under_way, (end, number, version))

    def _offer_finished(self) -> None:
        while self._under_way and self._under_way[0][0] <= self.now:
            _, number, version = heapq.heappop(self._under_way)
            self.buffer.offer(TrajectoryGroup("task", [_attempt(version)], np.ones(1, dtype=np.float32), number))

    @property
    def steps_per_s(self) -> float:
        return len(self.targets) / self.now

    @property
    def mean_lag(self) -> float:
        return sum(self.lags) / len(self.lags)


@cache
def _attempt(version: int) -> Trajectory:
    return trajectory([1], [2], version=version)
