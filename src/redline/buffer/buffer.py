"""The buffer between rollouts and trainer: admits groups, keeps to the lag budget, hands out packed batches.

    admit ──indices──► rollouts ──offer──► ready ──next_batch──► trainer ──trained──► done, or kept for a replay
      ▲                                      │
      └───────────── room ◄──────────────────┴── dropped: no signal under dynamic sampling, timed out, or late with
                                                 `buffer.late_groups: drop`

The store remembers what became of every index. Here is only what ends with the process: which groups are under way, how often
one was trained on, and who waited for whom.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from redline.buffer.admission import must_wait, room
from redline.buffer.control.groups import Controller, Decision, Waits
from redline.buffer.control.workers import Controllers, WorkerController
from redline.buffer.drops import LATE, NO_SIGNAL, OVERDUE, STALE, TIMED_OUT, LateDrops
from redline.buffer.packing import pack
from redline.buffer.selection import choose
from redline.buffer.store.group_store import GroupInfo, GroupStore
from redline.buffer.store.stored_groups import StoredGroups, pack_stored
from redline.config.sections.buffer import BufferConfig
from redline.errors import GroupsLateError
from redline.ports import RewardWorkers
from redline.telemetry import span
from redline.types import TrainBatch, TrajectoryGroup

MAX_TIMED_OUT = 16
"""Groups of which all may time out with none coming in between, and at least three times as many as may be under way."""


@dataclass(slots=True, frozen=True)
class _Replay:
    """A group that was trained on and may be again."""

    group: GroupInfo
    uses: int


@dataclass(slots=True, frozen=True)
class _Begun:
    """When a group was."""

    version: int
    at_s: float
    """On the buffer's clock."""


class GroupBuffer:
    """Implements `ports.Buffer`, over any `GroupStore`."""

    def __init__(
        self,
        config: BufferConfig,
        groups_per_step: int,
        store: GroupStore,
        *,
        keep_no_signal: bool = False,
        max_extra_rounds: int = 0,
        clock: Callable[[], float] = time.monotonic,
        workers: RewardWorkers | None = None,
        steps: int | None = None,
        sampled_tokens: Callable[[int], Sequence[int]] = lambda index: (),
    ) -> None:
        """`keep_no_signal`: attempts without an advantage have a gradient all the same. `max_extra_rounds`: groups without
        signal are replaced, at most this many times a batch of them per step. `workers`: who computes rewards beside the
        trainer. `steps`: of the whole run; nothing is begun that none of them would train on. `sampled_tokens`: tokens that
        each attempt of a group under way has so far."""
        self._config, self._groups_per_step, self._store = config, groups_per_step, store
        self._keep_no_signal = keep_no_signal
        self._max_replaced = max_extra_rounds * groups_per_step
        self._steps, self._sampled_tokens = steps, sampled_tokens
        self._late = LateDrops()
        """Since the last step."""
        self._is_held_up = False
        self._in_flight: dict[int, _Begun] = {}
        """By index."""
        self._again: list[int] = []
        """Indices to give out before new ones, in rising order."""
        self._repeated: set[int] = set()
        """Indices that are ready, and are attempted again to give the others of their batch the company they had."""
        self._cancelled: set[int] = set()
        """Indices given up while they were under way; a group may still come."""
        self._leased: list[GroupInfo] = []
        """The batch that the trainer is at."""
        self._replays: dict[int, _Replay] = {}
        self._version = self._num_replaced = 0
        """The last version seen, and the groups replaced at it for want of signal."""
        self._first_index = 0
        """New indices begin here, where the store knows of none."""
        self.controller = Controller.for_config(config, groups_per_step)
        self._workers = workers
        self._controllers = Controllers(self.controller, WorkerController(workers.most if workers else 1))
        self._clock = clock
        self._waits = Waits(clock)
        self._timed_out_in_a_row = 0
        """Groups, since one came."""
        self._totals: Counter[str] = Counter()
        self._last_step: dict[str, float] = {}
        self.decision = Decision(self.controller.target, self.controller.target, "the beginning")
        """How many groups may be under way or waiting from now on, and why."""
        self.worker_decision = Decision(1, 1, "the beginning")
        """How many workers compute rewards from now on, and why."""

    # ── what rollouts may begin, and what becomes of it ────────────────────────────────────────────────────────────────

    def admit(self, version: int) -> list[int]:
        """Indices to attempt now: those that a resumed run has to repeat, then new ones."""
        with span("buffer.admit", version=version):
            return self._admitted(version)

    def _admitted(self, version: int) -> list[int]:
        self._waits.trainer_is_free()
        # Replays among the leased count too: what is begun now has no place in a batch that has left.
        num_alive = len(self._in_flight) + len(self._settled(version)) + len(self._leased)
        steps_left = None if self._steps is None else self._steps - version
        wanted = room(num_alive, self.controller.target, self._config.max_lag, self._groups_per_step, steps_left)
        again, self._again = self._again[:wanted], self._again[wanted:]
        first = max(self._first_index, self._store.next_index)
        indices = [*again, *range(first, first + wanted - len(again))]
        if indices:
            with span("buffer.store", version=version):
                self._store.begin([index for index in indices if index not in self._repeated], version)
            self._in_flight |= dict.fromkeys(indices, _Begun(version, self._clock()))
        return indices

    def offer(self, *groups: TrajectoryGroup) -> None:
        if groups:
            self._timed_out_in_a_row = 0
        new = [group for group in groups if self._is_new(group.index)]
        if new:
            with span("buffer.store"):
                self._store.add(*new)

    def _is_new(self, index: int) -> bool:
        """A group has come: whether anybody still wants it, and the store has it not."""
        if index in self._cancelled:
            self._cancelled.remove(index)
            return False
        assert index in self._in_flight, f"nobody asked for group {index}"
        del self._in_flight[index]
        if index in self._repeated:
            self._repeated.remove(index)
            return False
        return True

    def cancel_late(self, version: int) -> list[int]:
        overdue = self.overdue(version)
        self.cancel(overdue, OVERDUE)
        timed_out = self._timed_out()
        self.cancel(timed_out, TIMED_OUT)
        self._timed_out_in_a_row += len(timed_out)
        if timed_out and self._timed_out_in_a_row >= max(MAX_TIMED_OUT, 3 * self.controller.target):
            raise GroupsLateError(
                f"the last {self._timed_out_in_a_row} groups all took longer than buffer.group_timeout_s ="
                f" {self._config.group_timeout_s:g}, and none came",
                "give them more time, or find what holds them up: the environment, `score`, long answers",
            )
        return [*overdue, *timed_out]

    @property
    def patience_s(self) -> float | None:
        limit = self._config.group_timeout_s
        if limit is None or not self._in_flight:
            return None
        return max(0.0, min(begun.at_s for begun in self._in_flight.values()) + limit - self._clock())

    @contextmanager
    def clock_stands_still(self) -> Iterator[None]:
        """While somebody else has the engine, time does not count towards `group_timeout_s` of the groups under way."""
        began = self._clock()
        try:
            yield
        finally:
            held_s = self._clock() - began
            later = {index: replace(begun, at_s=begun.at_s + held_s) for index, begun in self._in_flight.items()}
            self._in_flight = later

    def overdue(self, version: int) -> list[int]:
        """Groups under way that were begun too long ago: what they have sampled so far can no longer be trained on."""
        return [index for index, begun in self._in_flight.items() if version - begun.version > self._config.max_lag]

    def _timed_out(self) -> list[int]:
        limit, now = self._config.group_timeout_s, self._clock()
        return [] if limit is None else [index for index, begun in self._in_flight.items() if now - begun.at_s >= limit]

    def cancel(self, indices: Iterable[int], reason: str) -> None:
        """Forget groups that are attempted no longer; others take their place."""
        for index in indices:
            if reason in LATE:
                self._late.add(self._sampled_tokens(index))
            del self._in_flight[index]
            self._cancelled.add(index)
            self._repeated.discard(index)
            self._drop([index], reason)

    def resume(self, version: int) -> None:
        """Go back to a checkpoint of `version`. Counts of replays start again, and no group is replayed once more."""
        again = self._store.resume(version)
        self._repeated = self._part_of_a_batch(version)
        self._again = sorted([*again, *self._repeated])
        if self._store.next_index == 0:  # it kept nothing: go on with the tasks that lockstep would be at
            self._first_index = version * self._groups_per_step
        self._in_flight, self._cancelled, self._leased, self._replays = {}, set(), [], {}
        self._version, self._num_replaced = version, 0
        self._totals = Counter({f"dropped_{reason}": count for reason, count in self._store.dropped.items()})

    def not_counted(self, count: int) -> list[TrajectoryGroup]:
        """Groups that a resumed run has and will not attempt again, apart from the first `count` that ever came: those that the
        metrics up to its checkpoint know of."""
        return [group for group in self._store.arrived_after(count) if group.index not in self._repeated]

    def _part_of_a_batch(self, version: int) -> set[int]:
        """What is ready, if in lockstep it is less than a batch. An engine's last bits depend on what it computes together, and
        in lockstep they are to be the same: those that are missing must not be attempted alone."""
        if self._config.max_lag:
            return set()
        ready = [group for group in self._store.ready() if group.versions.oldest == version]
        num_kept = sum(group.has_signal for group in ready) if self._max_replaced else len(ready)
        return {group.index for group in ready} if num_kept < self._groups_per_step else set()

    # ── what the trainer gets ──────────────────────────────────────────────────────────────────────────────────────────

    def has_batch(self, version: int) -> bool:
        with span("buffer.choose", version=version):
            return self._chosen(version) is not None

    @property
    def waits_for_late_groups(self) -> bool:
        """The last `has_batch` found enough groups, and said no because others would grow too old under way."""
        return self._is_held_up

    def next_batch(self, version: int) -> TrainBatch:
        """Call it when `has_batch`."""
        with span("buffer.choose", version=version):
            return self._next_batch(version)

    def _next_batch(self, version: int) -> TrainBatch:
        chosen = self._chosen(version)
        assert chosen is not None, "next_batch before there is one"
        assert not self._leased, "next_batch before the last one was trained on"
        self._waits.batch_is_taken()
        self._leased = chosen
        with span("buffer.store", version=version):
            self._store.lease(self._fresh(chosen), version)
        indices, lags = zip(*((group.index, group.versions.lag(version)) for group in chosen), strict=True)
        assert max(lags) <= self._config.max_lag, "a batch over the lag budget"
        with span("buffer.pack", version=version):
            batch = self._packed(self._store.read(indices), version)
        return replace(batch, indices=indices, lags=lags)

    def trained(self, batch: TrainBatch) -> None:
        """Its groups are done with, unless they may be replayed; the controller looks at how the step went."""
        with span("buffer.settle", version=batch.version):
            self._settle(batch)

    def _settle(self, batch: TrainBatch) -> None:
        fresh = self._fresh(self._leased)
        rewards = [group.reward for group in self._leased if group.reward is not None]
        with span("buffer.store", version=batch.version):
            self._store.trained(fresh, batch.version)
        self._totals["replays"] += len(self._leased) - len(fresh)
        self._count_uses(batch.version + 1)
        self._leased = []
        to_score_s = self._workers.take_load() if self._workers else ()
        observation = self._waits.step_is_done(len(self._store.ready()), to_score_s)
        self.decision, self.worker_decision = self._controllers.observe(observation)
        if self._workers and self.worker_decision.is_change:
            self._workers.hold(self.worker_decision.new)
        self._last_step = {
            "buffer/trainer_wait_s": observation.trainer_wait_s,
            "buffer/late_wait_s": observation.late_wait_s,
            "buffer/groups_left": observation.groups_left,
            "buffer/trained_groups": len(batch.indices),
            "buffer/trained_tokens_mean": batch.num_tokens_sampled / max(1, batch.num_attempts_sampled),
            "buffer/trained_reward_mean": sum(rewards) / len(rewards) if rewards else math.nan,
            **self._late.metrics(len(batch.indices)),
            "buffer/lag_mean": sum(batch.lags) / len(batch.lags),
            **{f"buffer/groups_at_lag_{lag}": count for lag, count in sorted(Counter(batch.lags).items())},
        }
        if sum(to_score_s):
            mean = sum(count * seconds for count, seconds in enumerate(to_score_s)) / sum(to_score_s)
            self._last_step["buffer/groups_to_score"] = mean
        self._late = LateDrops()

    def news(self) -> list[str]:
        """Sentences for a person about what the controllers changed, or found, at the last step."""
        told = {"groups under way or waiting": self.decision, "workers for rewards": self.worker_decision}
        return [
            f"buffer: {f'{decision.old} → ' if decision.is_change else ''}{decision.new} {what}, {decision.why}"
            for what, decision in told.items()
            if decision.is_change or decision.is_news
        ]

    @property
    def metrics(self) -> dict[str, float]:
        """The last step's row of the buffer. Replays are counted since the process began, drops as the store has them."""
        return {
            **self._last_step,
            "buffer/target": self.decision.new,
            **({"buffer/reward_workers": self.worker_decision.new} if self._workers else {}),
            "buffer/in_flight": len(self._in_flight),
            "buffer/replays": self._totals["replays"],
            **{
                f"buffer/dropped_{reason}": self._totals[f"dropped_{reason}"]
                for reason in (STALE, NO_SIGNAL, OVERDUE, TIMED_OUT)
            },
            **{f"buffer/{name}": count for name, count in self._totals.items()},
        }

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _chosen(self, version: int) -> list[GroupInfo] | None:
        """The batch of `version`, where there is one and it need not wait for late groups."""
        under_way = [begun.version for begun in self._in_flight.values()]
        budget = (version, self._config.max_lag, self._groups_per_step)
        chosen = choose(self._settled(version), under_way, self._within_budget(version), *budget, self._config.order)
        can_be_late = self._config.max_lag > 0 and self._config.late_groups == "wait"
        self._is_held_up = can_be_late and chosen is not None and must_wait(under_way, *budget)
        if self._is_held_up:
            self._waits.late_groups_are_waited_for()
            return None
        return chosen

    def _settled(self, version: int) -> list[GroupInfo]:
        """What is ready, once everything is dropped that must be."""
        if version != self._version:
            self._version, self._num_replaced = version, 0
        ready = [group for group in self._store.ready() if group.index not in self._repeated]
        stale = {group.index for group in ready if group.versions.lag(version) > self._config.max_lag}
        no_signal = [group.index for group in ready if not group.has_signal and group.index not in stale]
        replaced = set(no_signal[: self._max_replaced - self._num_replaced])
        self._num_replaced += len(replaced)
        for group in ready:
            if group.index in stale:
                self._late.add(self._lengths(group.index), group.reward)
        self._drop(sorted(stale), STALE)
        self._drop(sorted(replaced), NO_SIGNAL)
        return [group for group in ready if group.index not in stale | replaced]

    def _lengths(self, index: int) -> list[int]:
        """Tokens that the policy chose in each attempt of a group that is ready."""
        groups = self._store.read([index])
        if not isinstance(groups, StoredGroups):
            return [sum(t.num_completion_tokens for t in own) for group in groups for own in group.attempts]
        lengths = np.add.reduceat(groups.loss_mask, groups.offsets[:-1], dtype=np.int64)
        _, attempt_S = np.unique(groups.attempts, return_inverse=True)
        return np.bincount(attempt_S, lengths).astype(int).tolist()

    def _packed(self, groups: StoredGroups | Sequence[TrajectoryGroup], version: int) -> TrainBatch:
        if isinstance(groups, StoredGroups):
            return pack_stored(groups, version, keep_no_signal=self._keep_no_signal)
        return pack(groups, version, keep_no_signal=self._keep_no_signal)

    def _drop(self, indices: Sequence[int], reason: str) -> None:
        if indices:
            with span("buffer.store"):
                self._store.drop(indices, reason)
            self._totals[f"dropped_{reason}"] += len(indices)

    def _fresh(self, groups: Sequence[GroupInfo]) -> list[int]:
        """The indices of the groups that are no replays."""
        return [group.index for group in groups if group.index not in self._replays]

    def _within_budget(self, version: int) -> list[GroupInfo]:
        """Those to replay, the least used and newest first."""
        replays = [r for r in self._replays.values() if r.group.versions.lag(version) <= self._config.max_lag]
        ordered = sorted(replays, key=lambda r: (r.uses, -r.group.versions.oldest, r.group.index))
        return [replay.group for replay in ordered]

    def _count_uses(self, version: int) -> None:
        """Remember what was leased for replays at `version` and after, and forget what is used up or too old for them."""
        for group in self._leased:
            uses = self._replays[group.index].uses + 1 if group.index in self._replays else 1
            self._replays[group.index] = _Replay(group, uses)
        self._replays = {
            index: replay
            for index, replay in self._replays.items()
            if replay.uses <= self._config.max_reuses
            and replay.group.versions.lag(version) <= self._config.max_lag
            and (replay.group.has_signal or self._keep_no_signal)
        }
