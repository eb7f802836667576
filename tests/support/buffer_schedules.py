"""Random schedules for the buffer: groups that finish in any order, fail, are given up or teach nothing, steps, crashes and
resumed runs, against a ledger of its own of what the contract says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fakes import group as made_group

from redline.buffer.buffer import GroupBuffer
from redline.buffer.drops import NO_SIGNAL, STALE
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.memory_store import MemoryStore
from redline.config.sections.buffer import BufferConfig
from redline.types import TrainBatch, TrajectoryGroup, VersionSpan

GIVEN_UP = "failed"


def group(number: int, oldest: int, newest: int | None = None, *, silent: bool = False) -> TrajectoryGroup:
    """Two attempts; the second saw the newest policy."""
    made = made_group([0.0, 0.0] if silent else [1.0, -1.0], version=oldest)
    first, second = made.trajectories
    second = replace(second, versions=VersionSpan(oldest, oldest if newest is None else newest))
    return replace(made, trajectories=[first, second], index=number)


@dataclass
class Known:
    """What the ledger says of a number."""

    begun: int
    begun_s: float = 0.0
    state: GroupState = GroupState.IN_FLIGHT
    versions: VersionSpan | None = None
    silent: bool = False
    trained_at: list[int] = field(default_factory=list)
    """In the history that counts: steps that a crash undid are not there."""


class Schedules(RuleBasedStateMachine):
    """Every rule is something that may happen in a run; every assertion a promise of the buffer."""

    fault: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Known] = {}
        self.again: list[int] = []
        self.repeated: set[int] = set()
        """Ready, and attempted again in lockstep, for a batch that is computed as a whole."""
        self.late: set[int] = set()
        """Given up, and still at work."""
        self.version = 0
        self.batch: TrainBatch | None = None
        self.replaced_at: Counter[int] = Counter()
        self.now = 0.0

    @initialize(
        max_lag=st.sampled_from([0, 1, 2, 4]),
        groups_per_step=st.integers(1, 3),
        order=st.sampled_from(["fresh_first", "oldest_first", "signal_first"]),
        max_reuses=st.integers(0, 2),
        extra_rounds=st.integers(0, 2),
        full_depth=st.booleans(),
        timeout_s=st.sampled_from([None, 2.0]),
        late_groups=st.sampled_from(["wait", "wait", "drop"]),
    )
    def begin(
        self,
        max_lag: int,
        groups_per_step: int,
        order: str,
        max_reuses: int,
        extra_rounds: int,
        full_depth: bool,
        timeout_s: float | None,
        late_groups: str,
    ) -> None:
        depth = max_lag + 1 if full_depth else None
        keys = {"max_lag": max_lag, "depth": depth, "order": order, "max_reuses": max_reuses, "group_timeout_s": timeout_s}
        self.config = BufferConfig(**keys, late_groups=late_groups if max_lag else "wait")
        self.size, self.extra_rounds, self.store = groups_per_step, extra_rounds, MemoryStore()
        self.buffer = self.make_buffer()

    def make_buffer(self) -> GroupBuffer:
        return GroupBuffer(self.config, self.size, self.store, max_extra_rounds=self.extra_rounds, clock=lambda: self.now)

    def numbers(self, *states: GroupState) -> list[int]:
        return sorted(number for number, known in self.known.items() if known.state in states)

    # ── what happens ───────────────────────────────────────────────────────────────────────────────────────────────────

    @rule()
    def admit(self) -> None:
        self.admitted()

    def admitted(self) -> list[int]:
        numbers = self.buffer.admit(self.version)
        self.see_drops()
        assert len(set(numbers)) == len(numbers), "a number was given out twice"
        repeated, new = numbers[: len(self.again)], numbers[len(self.again) :]
        assert repeated == self.again[: len(numbers)], "numbers to repeat come first, in rising order"
        self.again = self.again[len(repeated) :]
        assert new == list(range(len(self.known), len(self.known) + len(new))), "new numbers follow one another"
        for number in numbers:
            if number not in self.repeated:
                self.known[number] = Known(self.version, self.now)
        alive = self.numbers(GroupState.IN_FLIGHT, GroupState.READY, GroupState.LEASED)
        begun = len(self.numbers(*GroupState)) - len(self.numbers(GroupState.DROPPED)) - len(self.again)
        if numbers:
            assert len(alive) - len(self.again) <= max(self.size, self.buffer.controller.target), "over the target"
            assert begun <= (self.version + self.config.max_lag + 1) * self.size, "more begun than can be trained in time"
        return numbers

    @precondition(lambda self: self.config.depth is None)
    @rule(share=st.floats(0, 1))
    def change_the_target(self, share: float) -> None:
        """Whatever the controller decides."""
        self.buffer.controller.target = round(self.size * (1 + share * self.config.max_lag))

    def under_way(self) -> list[int]:
        return sorted({*self.numbers(GroupState.IN_FLIGHT), *self.repeated} - set(self.again))

    @precondition(lambda self: self.under_way())
    @rule(rng=st.randoms(use_true_random=False), silent=st.booleans(), most=st.sampled_from([1, 1, 1, 3]))
    def finish(self, rng: Random, silent: bool, most: int = 1) -> None:
        under_way = self.under_way()
        finished = rng.sample(under_way, min(most, len(under_way)))
        self.buffer.offer(*(self.finished(number, rng, silent=silent) for number in finished))

    def finished(self, number: int, rng: Random, *, silent: bool) -> TrajectoryGroup:
        known = self.known[number]
        oldest = rng.randint(known.begun, self.version)
        newest = rng.randint(oldest, self.version)
        if number in self.repeated:
            self.repeated.remove(number)
        else:
            known.state, known.versions, known.silent = GroupState.READY, VersionSpan(oldest, newest), silent
        return group(number, oldest, newest, silent=silent)

    @rule(rng=st.randoms(use_true_random=False), steps=st.integers(1, 4), silence=st.sampled_from([0.0, 0.3, 1.0]))
    def run_the_loop(self, rng: Random, steps: int, silence: float) -> None:
        """As loop.py does; whoever is not finished when the batch is full stays under way."""
        for _ in range(steps):
            self.give_up_what_takes_too_long()
            self.admitted()
            while self.batch is None:
                self.now += rng.random()
                for _ in range(rng.randint(0, 3)):
                    if self.under_way():
                        self.finish(rng, rng.random() < silence)
                self.give_up_what_takes_too_long()
                assert self.admitted() or self.under_way() or self.buffer.has_batch(self.version), "a deadlock"
                self.take()
            self.now += rng.random()
            self.train()

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.under_way()))
        self.buffer.cancel([number], GIVEN_UP)
        self.known[number].state = GroupState.DROPPED
        self.repeated.discard(number)
        self.late.add(number)
        assert self.store.fate(number) == (GroupState.DROPPED, GIVEN_UP)

    @rule()
    def give_up_what_takes_too_long(self) -> None:
        assert self.config.late_groups == "drop" or not self.buffer.overdue(self.version), "a late group was not waited for"
        given_up = self.buffer.cancel_late(self.version)
        for number in self.under_way():
            known = self.known[number]
            is_overdue = self.version - known.begun > self.config.max_lag
            is_timed_out = self.config.group_timeout_s is not None and self.now - known.begun_s >= self.config.group_timeout_s
            if number not in self.repeated:
                assert (number in given_up) == (is_overdue or is_timed_out), "given up too early, or never"
        for number in given_up:
            assert number in self.under_way(), "nobody was at it"
            self.known[number].state = GroupState.DROPPED
            self.repeated.discard(number)
            self.late.add(number)
        assert self.buffer.patience_s is None or self.buffer.patience_s > 0, "it is time to give up more"

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.late)))
        self.late.remove(number)
        self.buffer.offer(group(number, self.known[number].begun))

    @precondition(lambda self: self.batch is None)
    @rule()
    def take(self) -> None:
        full = self.buffer.has_batch(self.version)
        self.see_drops()
        ready = [number for number in self.numbers(GroupState.READY) if number not in self.repeated]
        if not full:
            assert len(ready) < self.size or self.somebody_would_be_late(), "a full batch within budget is never waited with"
            assert self.buffer.waits_for_late_groups or len(ready) < self.size
            return
        assert self.config.late_groups == "drop" or not self.somebody_would_be_late(), "a late group was not waited for"
        self.batch = self.buffer.next_batch(self.version)
        self.check(self.batch, ready)
        for number in self.batch.indices:
            if number in ready:
                self.known[number].state = GroupState.LEASED

    def somebody_would_be_late(self) -> bool:
        """Even if every later batch took only groups that are under way now, the oldest first."""
        if self.config.max_lag == 0 or self.config.late_groups == "drop":
            return False
        begun = sorted(self.known[number].begun for number in self.under_way())
        next_batch = self.version + 1
        return any(next_batch + place // self.size > version + self.config.max_lag for place, version in enumerate(begun))

    @precondition(lambda self: self.batch is not None)
    @rule()
    def train(self) -> None:
        assert self.batch is not None
        self.buffer.trained(self.batch)
        for number in self.batch.indices:
            self.known[number].trained_at.append(self.version)
            self.known[number].state = GroupState.TRAINED
        self.version += 1
        self.batch = None

    @rule(data=st.data(), new_process=st.booleans())
    def crash_and_resume(self, data: st.DataObject, new_process: bool) -> None:
        checkpoint = data.draw(st.integers(max(0, self.version - 3), self.version))
        if new_process:
            self.buffer = self.make_buffer()
        self.buffer.resume(checkpoint)
        self.version, self.batch, self.late, self.replaced_at = checkpoint, None, set(), Counter()
        for known in self.known.values():
            self.go_back(known, checkpoint)
        self.repeated = self.part_of_a_batch() if self.config.max_lag == 0 else set()
        self.again = sorted([*self.numbers(GroupState.IN_FLIGHT), *self.repeated])

    def part_of_a_batch(self) -> set[int]:
        ready = {n for n in self.numbers(GroupState.READY) if self.known[n].versions == VersionSpan(self.version, self.version)}
        kept = [number for number in ready if not (self.extra_rounds and self.known[number].silent)]
        return ready if len(kept) < self.size else set()

    def go_back(self, known: Known, checkpoint: int) -> None:
        known.trained_at = [version for version in known.trained_at if version < checkpoint]
        if known.trained_at or known.versions is None:
            return
        if known.versions.newest > checkpoint:
            known.state, known.versions = GroupState.IN_FLIGHT, None
        elif known.state is not GroupState.DROPPED or known.versions.newest == checkpoint:
            known.state = GroupState.READY

    # ── what must hold ─────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, batch: TrainBatch, ready: list[int]) -> None:
        budget = self.config.max_lag
        assert len(set(batch.indices)) == self.size == len(batch.lags)
        assert list(batch.indices) == sorted(batch.indices), "not in order"
        for number, lag in zip(batch.indices, batch.lags, strict=True):
            known = self.known[number]
            assert known.versions is not None
            assert lag == self.version - known.versions.oldest
            assert 0 <= lag <= budget, "over the lag budget"
            assert len(known.trained_at) <= self.config.max_reuses, "trained on too often"
        assert batch.lag == max(batch.lags)
        replays = [number for number in batch.indices if number not in ready]
        assert not replays or set(ready) <= set(batch.indices), "a replay took the place of a group that was ready"
        if budget == 0:
            assert list(batch.indices) == ready[: self.size], "lockstep takes groups as they were begun"

    def see_drops(self) -> None:
        """The ledger believes a drop only for a reason it can see."""
        for number in self.numbers(GroupState.READY):
            state, reason = self.store.fate(number)
            if state is not GroupState.DROPPED:
                continue
            known = self.known[number]
            assert known.versions is not None
            if reason == STALE:
                assert known.versions.lag(self.version) > self.config.max_lag
                can_wait = self.config.max_lag > 0 and self.config.late_groups == "wait"
                assert not can_wait or known.silent, "a group with signal grew too old"
            else:
                assert (reason, known.silent) == (NO_SIGNAL, True)
                self.replaced_at[self.version] += 1
                assert self.replaced_at[self.version] <= self.extra_rounds * self.size, "too many replaced at one step"
            known.state = GroupState.DROPPED

    @invariant()
    def every_number_is_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        for number, known in self.known.items():
            assert self.store.fate(number)[0] is known.state, f"{number} is lost, or in two places"
        assert sum(self.store.counts.values()) == len(self.known) == self.store.next_index

    @precondition(lambda self: self.batch is None and not self.under_way())
    @rule()
    def go_on(self) -> None:
        """Where nothing is under way, something can be done: no deadlock."""
        assert self.admitted() or self.buffer.has_batch(self.version), "a deadlock"
        self.see_drops()
