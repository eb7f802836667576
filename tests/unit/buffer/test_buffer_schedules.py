"""The buffer's promises under random schedules, and proof that the schedules would notice if one were broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from support.buffer_schedules import Schedules, group

from redline.buffer import buffer as buffer_module
from redline.buffer.buffer import GroupBuffer
from redline.buffer.store import memory_store
from redline.buffer.store.group_store import GroupInfo
from redline.buffer.store.memory_store import MemoryStore
from redline.config.sections.buffer import BufferConfig

SCHEDULES = settings(max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
HUNT = settings(SCHEDULES, max_examples=6000, database=None, derandomize=True, phases=[Phase.generate])


def test_no_schedule_breaks_a_promise() -> None:
    run_state_machine_as_test(Schedules, settings=SCHEDULES)


@pytest.mark.slow
def test_no_long_schedule_breaks_a_promise() -> None:
    run_state_machine_as_test(Schedules, settings=settings(SCHEDULES, max_examples=2000, stateful_step_count=60))


# ── planted faults ─────────────────────────────────────────────────────────────────────────────────────────────────────


def no_second_look_at_the_lag(patch: pytest.MonkeyPatch) -> None:
    def settled(self: GroupBuffer, version: int) -> list[GroupInfo]:
        return [group for group in self._store.ready() if group.index not in self._repeated]

    def make_buffer(self: Schedules) -> GroupBuffer:
        """Where groups grow old: those without signal come last, and there is little time. Elsewhere it takes luck."""
        keys = {"order": "signal_first", "late_groups": "drop", "max_reuses": self.config.max_reuses}
        self.config = BufferConfig(max_lag=1, depth=2, **keys)
        self.size, self.extra_rounds = 3, 0
        return GroupBuffer(self.config, self.size, self.store, clock=lambda: self.now)

    patch.setattr(GroupBuffer, "_settled", settled)
    patch.setattr(Schedules, "make_buffer", make_buffer)


def more_begun_than_can_be_trained(patch: pytest.MonkeyPatch) -> None:
    right = buffer_module.room
    patch.setattr(
        buffer_module, "room", lambda alive, target, lag, size, left: right(alive, target + size, lag + 1, size, left)
    )


def one_more_reuse(patch: pytest.MonkeyPatch) -> None:
    class Faulty(GroupBuffer):
        def __init__(self, config: BufferConfig, *args: object, **fields: object) -> None:
            super().__init__(config.model_copy(update={"max_reuses": config.max_reuses + 1}), *args, **fields)

    def make_buffer(self: Schedules) -> GroupBuffer:
        return Faulty(self.config, self.size, self.store, max_extra_rounds=self.extra_rounds, clock=lambda: self.now)

    patch.setattr(Schedules, "make_buffer", make_buffer)


def one_group_too_many(patch: pytest.MonkeyPatch) -> None:
    right = buffer_module.room
    patch.setattr(buffer_module, "room", lambda *args: right(*args) + 1)


def a_target_below_a_batch(patch: pytest.MonkeyPatch) -> None:
    right = buffer_module.room
    patch.setattr(buffer_module, "room", lambda alive, *args: max(0, right(alive, *args) - 1))


def a_lost_number(patch: pytest.MonkeyPatch) -> None:
    right = GroupBuffer.resume

    def resume(self: GroupBuffer, version: int) -> None:
        right(self, version)
        self._again = self._again[1:]

    patch.setattr(GroupBuffer, "resume", resume)


def a_group_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = MemoryStore.add
    patch.setattr(MemoryStore, "add", lambda self, *groups: right(self, *(g for g in groups if g.index % 3 != 2)))


def trained_groups_that_come_back(patch: pytest.MonkeyPatch) -> None:
    right = memory_store._is_attempted_again
    patch.setattr(memory_store, "_is_attempted_again", lambda entry, version: right(entry, version - 1))


def groups_of_a_lost_policy_that_stay(patch: pytest.MonkeyPatch) -> None:
    right = memory_store._is_attempted_again

    def kept(entry: memory_store._Entry, version: int) -> bool:
        if entry.info is not None:
            entry.info = replace(entry.info, versions=replace(entry.info.versions, newest=0))
        return right(entry, version)

    patch.setattr(memory_store, "_is_attempted_again", kept)


def replays_first(patch: pytest.MonkeyPatch) -> None:
    right = buffer_module.choose

    def choose(ready: list[GroupInfo], under_way: object, replays: list[GroupInfo], *args: object) -> list[GroupInfo] | None:
        chosen = right(ready, under_way, replays, *args)
        return None if chosen is None else sorted([*replays, *chosen][: len(chosen)], key=lambda info: info.index)

    patch.setattr(buffer_module, "choose", choose)


def no_order_in_lockstep(patch: pytest.MonkeyPatch) -> None:
    right = buffer_module.choose

    def choose(*args: object) -> list[GroupInfo] | None:
        chosen = right(*args)
        return chosen and chosen[::-1]

    patch.setattr(buffer_module, "choose", choose)


def silent_groups_replaced_without_end(patch: pytest.MonkeyPatch) -> None:
    right = GroupBuffer._settled

    def settled(self: GroupBuffer, version: int) -> list[GroupInfo]:
        self._num_replaced = 0
        return right(self, version)

    patch.setattr(GroupBuffer, "_settled", settled)


def groups_that_are_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupBuffer, "overdue", lambda self, version: [])


def late_groups_that_nobody_waits_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buffer_module, "must_wait", lambda *args: False)


def only_the_last_moment_is_waited_at(patch: pytest.MonkeyPatch) -> None:
    def must_wait(begun_versions: list[int], version: int, max_lag: int, groups_per_step: int) -> bool:
        return any(begun + max_lag <= version for begun in begun_versions)

    patch.setattr(buffer_module, "must_wait", must_wait)


def groups_without_a_time_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupBuffer, "_timed_out", lambda self: [])


FAULTS = {
    no_second_look_at_the_lag: "over the lag budget",
    more_begun_than_can_be_trained: "over the target|more begun than can be trained in time",
    one_group_too_many: "over the target",
    one_more_reuse: "trained on too often",
    a_target_below_a_batch: "a deadlock",
    a_lost_number: "numbers to repeat come first",
    a_group_that_is_forgotten: "is lost, or in two places|over the target",
    trained_groups_that_come_back: "is lost, or in two places",
    groups_of_a_lost_policy_that_stay: "is lost, or in two places",
    replays_first: "a replay took the place|not in order",
    no_order_in_lockstep: "not in order|as they were begun",
    silent_groups_replaced_without_end: "too many replaced",
    groups_that_are_waited_for_without_end: "given up too early, or never",
    late_groups_that_nobody_waits_for: "a late group was not waited for",
    only_the_last_moment_is_waited_at: "a late group was not waited for",
    groups_without_a_time_limit: "given up too early, or never",
}


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "broken"), FAULTS.items(), ids=[plant.__name__ for plant in FAULTS])
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=broken):
        run_state_machine_as_test(Schedules, settings=HUNT)


# ── lockstep ───────────────────────────────────────────────────────────────────────────────────────────────────────────

STEPS = 6


def history(store: MemoryStore, size: int, extra_rounds: int, silent: set[int], kills: list[int]) -> list[tuple[int, ...]]:
    """The batches of a run in lockstep that is killed after so many events, each time one step after its checkpoint."""
    batches: list[tuple[int, ...]] = []
    kills = [*kills, 10**6]
    while len(batches) < STEPS:
        buffer = GroupBuffer(BufferConfig(), size, store, max_extra_rounds=extra_rounds, clock=lambda: 0.0)
        batches = batches[:-1]
        buffer.resume(len(batches))
        under_way: list[int] = []
        for _ in range(kills.pop(0)):
            version = len(batches)
            under_way += buffer.admit(version)
            if buffer.has_batch(version):
                batch = buffer.next_batch(version)
                buffer.trained(batch)
                batches.append(batch.indices)
            else:
                number = under_way.pop(0)
                buffer.offer(group(number, version, silent=number in silent))
            if len(batches) == STEPS:
                break
    return batches


@given(
    size=st.integers(1, 3),
    extra_rounds=st.integers(0, 2),
    silent=st.sets(st.integers(0, 40)),
    kills=st.lists(st.integers(0, 25), max_size=4),
)
def test_lockstep_takes_the_same_batches_however_often_it_is_killed(
    size: int, extra_rounds: int, silent: set[int], kills: list[int]
) -> None:
    whole = history(MemoryStore(), size, extra_rounds, silent, [])
    assert history(MemoryStore(), size, extra_rounds, silent, kills) == whole
    if not extra_rounds:
        assert whole == [tuple(range(v * size, (v + 1) * size)) for v in range(STEPS)]
