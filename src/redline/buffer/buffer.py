"""The buffer between rollouts and trainer: asks for what is missing, keeps to the lag budget, hands out packed batches."""

from __future__ import annotations

from collections import deque

from redline.buffer.packing import pack
from redline.buffer.store import TrajectoryStore
from redline.telemetry import span
from redline.types import TrainBatch, TrajectoryGroup


class GroupBuffer:
    """Groups in memory, and as Arrow files once a batch is made of them. Implements `ports.Buffer`."""

    def __init__(self, groups_per_step: int, max_lag: int, store: TrajectoryStore | None = None) -> None:
        self._groups_per_step = groups_per_step
        self._max_lag = max_lag
        self._store = store
        self._ready: deque[TrajectoryGroup] = deque()
        self.num_dropped = 0
        """Groups that grew older than the lag budget, since the start."""

    def demand(self, version: int) -> int:
        self._drop_stale(version)
        return max(0, self._groups_per_step - len(self._ready))

    def offer(self, group: TrajectoryGroup) -> None:
        self._ready.append(group)

    def next_batch(self, version: int) -> TrainBatch:
        """The oldest groups within budget. Call it when `demand` is 0."""
        self._drop_stale(version)
        assert len(self._ready) >= self._groups_per_step, "next_batch before the demand was met"
        groups = [self._ready.popleft() for _ in range(self._groups_per_step)]
        with span("buffer.pack", version=version):
            batch = pack(groups, version)
        if self._store is not None:
            with span("buffer.store", version=version):
                self._store.write(version, groups)
        return batch

    def _drop_stale(self, version: int) -> None:
        fresh = deque(group for group in self._ready if group.versions.lag(version) <= self._max_lag)
        self.num_dropped += len(self._ready) - len(fresh)
        self._ready = fresh
