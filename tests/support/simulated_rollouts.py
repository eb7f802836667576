"""The loop in simulated time: rollouts and a trainer that only take their time, around the real buffer."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
from support.fakes import trajectory

from redline.buffer.buffer import GroupBuffer
from redline.buffer.store.memory_store import MemoryStore
from redline.config.sections.buffer import BufferConfig
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
    score_s: Seconds | None = None
    """What the reward of a group takes; None is nothing."""
    max_workers: int = 1
    are_all_held: bool = False
    """All of them score from the beginning, whatever the controller says."""
    rewards_compute: bool = False
    """Several at once take as long as one after the other."""
    workers: list[int] = field(default_factory=list)
    """Those that score, after each step."""
    ends: list[float] = field(default_factory=list)
    """Of the steps."""

    def run(self, steps: int) -> Simulation:
        self._rng = Random(self.seed)
        self._slots_free_at = [0.0] * self.slots
        self._under_way: list[tuple[float, int, int]] = []
        config = BufferConfig(max_lag=self.max_lag, depth=self.depth)
        self._workers = SimulatedWorkers(self) if self.score_s else None
        self.buffer = GroupBuffer(
            config, self.groups_per_step, MemoryStore(self.max_lag), clock=lambda: self.now, workers=self._workers
        )
        for version in range(steps):
            self._offer_finished()
            self._begin(version)
            while not self.buffer.has_batch(version):
                self.now = max(self.now, self._next_event())
                self._offer_finished()
                self._begin(version)
            batch = self.buffer.next_batch(version)
            self.now += self.train_s(version, self._rng)
            self.buffer.trained(batch)
            self.targets.append(self.buffer.decision.new)
            self.workers.append(self.buffer.worker_decision.new)
            self.ends.append(self.now)
            self.lags += batch.lags
        return self

    def _begin(self, version: int) -> None:
        self.buffer.cancel_late(version)  # they go on for nothing, and nobody takes what comes of them
        for number in self.buffer.admit(version):
            start = max(self.now, heapq.heappop(self._slots_free_at))
            end = start + self.group_s(version, self._rng)
            heapq.heappush(self._slots_free_at, end)
            heapq.heappush(self._under_way, (end, number, version))

    def _next_event(self) -> float:
        return min([*self._under_way[:1], *(self._workers.scoring[:1] if self._workers else [])])[0]

    def _offer_finished(self) -> None:
        while (self._under_way or (self._workers and self._workers.scoring)) and self._next_event() <= self.now:
            if self._workers is None:
                _, number, version = heapq.heappop(self._under_way)
                self._offer(number, version)
            elif self._workers.scoring and self._workers.scoring[0][0] == self._next_event():
                self._offer(*self._workers.scored())
            else:
                self._workers.put(*heapq.heappop(self._under_way))

    def _offer(self, number: int, version: int) -> None:
        self.buffer.offer(TrajectoryGroup("task", [_attempt(version)], np.ones(1, dtype=np.float32), number))

    def step_s(self, first: int, last: int) -> float:
        """Mean, of some steps."""
        return (self.ends[last] - self.ends[first]) / (last - first)

    @property
    def steps_per_s(self) -> float:
        return len(self.targets) / self.now

    @property
    def mean_lag(self) -> float:
        return sum(self.lags) / len(self.lags)


class SimulatedWorkers:
    """Score one group after the other, so many at once. Implements `RewardWorkers`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = Random(simulation.seed + 1)
        self.most = simulation.max_workers
        self._count = self.most if simulation.are_all_held else 1
        self._line: deque[tuple[int, int]] = deque()
        self.scoring: list[tuple[float, int, int]] = []
        """When each ends, its number and version."""
        self._load: list[float] = []
        self._since = 0.0

    def hold(self, count: int) -> None:
        assert 1 <= count <= self.most
        self._count = self.most if self._simulation.are_all_held else count
        self._start(self._simulation.now)

    def take_load(self) -> list[float]:
        self._note(self._simulation.now)
        load, self._load = self._load, []
        return load

    def put(self, at: float, number: int, version: int) -> None:
        self._note(at)
        self._line.append((number, version))
        self._start(at)

    def scored(self) -> tuple[int, int]:
        at = self.scoring[0][0]
        self._note(at)
        _, number, version = heapq.heappop(self.scoring)
        self._start(at)
        return number, version

    def _start(self, at: float) -> None:
        assert self._simulation.score_s is not None
        while self._line and len(self.scoring) < self._count:
            number, version = self._line.popleft()
            seconds = self._simulation.score_s(version, self._rng)
            if self._simulation.rewards_compute:
                seconds *= len(self.scoring) + 1
            heapq.heappush(self.scoring, (at + seconds, number, version))

    def _note(self, at: float) -> None:
        count = len(self._line) + len(self.scoring)
        self._load += [0.0] * (count + 1 - len(self._load))
        self._load[count] += at - self._since
        self._since = at


@cache
def _attempt(version: int) -> Trajectory:
    return trajectory([1], [2], version=version)
