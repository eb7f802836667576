"""The buffer between rollouts and trainer: asks for what is missing, keeps to the lag budget, hands out packed batches."""

from __future__ import annotations

from collections import deque

from redline.buffer.packing import pack
from redline.buffer.store import TrajectoryStore
from redline.telemetry import span
from redline.types import TrainBatch, TrajectoryGroup


class GroupBuffer:
    """Groups in memory, and as Arrow files once a batch is made of them. Implements `ports.Buffer`."""

    def __init__(
        self,
        groups_per_step: int,
        max_lag: int,
        store: TrajectoryStore | None = None,
        *,
        keep_silent: bool = False,
        replace_silent: bool = False,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_lag = max_lag
        self._store = store
        self._keep_silent = keep_silent
        self._replace_silent = replace_silent
        self._ready: deque[TrajectoryGroup] = deque()
        self.num_dropped = 0
        """Groups that grew older than the lag budget, since the start."""
        self.num_replaced = 0
        """Groups without signal whose place another took, since the start."""

    def demand(self, version: int) -> int:
        self._drop_stale(version)
        return max(0, self._groups_per_step - len(self._ready))

    def offer(self, group: TrajectoryGroup) -> None:
        self._ready.append(group)

    def next_batch(self, version: int) -> TrainBatch:
        """The oldest groups within budget. Call it when `demand` is 0."""
        self._drop_stale(version)
        assert len(self._ready) >= self._groups_per_step, "next_batch before the demand was met"
        replaced = self._take_replaced() if self._replace_silent else []
        groups = [self._ready.popleft() for _ in range(self._groups_per_step)]
        with span("buffer.pack", version=version):
            batch = pack(groups, version, keep_silent=self._keep_silent)
        if self._store is not None:
            with span("buffer.store", version=version):
                self._store.write(version, groups + replaced)
        return batch

    def _take_replaced(self) -> list[TrajectoryGroup]:
        """Dynamic sampling: the groups without signal that a batch does not need, taken out. Where groups with signal are too
        few, the first of the others fill it."""
        with_signal = [group for group in self._ready if group.has_signal]
        silent = [group for group in self._ready if not group.has_signal]
        needed = max(0, self._groups_per_step - len(with_signal))
        self._ready = deque(with_signal + silent[:needed])
        self.num_replaced += len(silent[needed:])
        return silent[needed:]

    def _drop_stale(self, version: int) -> None:
        fresh = deque(group for group in self._ready if group.versions.lag(version) <= self._max_lag)
        self.num_dropped += len(self._ready) - len(fresh)
        self._ready = fresh
