from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.buffer_schedules import group as numbered
from support.fakes import group, trajectory

from redline.buffer.buffer import GroupBuffer
from redline.buffer.packing import pack
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.memory_store import MemoryStore
from redline.config.sections.buffer import BufferConfig
from redline.errors import GroupsLateError
from redline.types import Failure, TrajectoryGroup, VersionSpan


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    size: int, max_lag: int = 0, *, store: MemoryStore | None = None, extra_rounds: int = 0, **keys: object
) -> GroupBuffer:
    config = BufferConfig(max_lag=max_lag, **{"depth": max_lag + 1} | keys)
    return GroupBuffer(config, size, store or MemoryStore(), max_extra_rounds=extra_rounds, clock=Clock())


def step(buffer: GroupBuffer, version: int) -> tuple[int, ...]:
    """Everything that was admitted finishes at once; the numbers trained on."""
    for number in buffer.admit(version):
        buffer.offer(numbered(number, version))
    batch = buffer.next_batch(version)
    buffer.trained(batch)
    return batch.indices


# ── admitting, offering, taking ────────────────────────────────────────────────────────────────────────────────────────


def test_lockstep_admits_the_tasks_of_one_step_and_takes_them_in_order() -> None:
    buffer = make(3)
    for version in range(4):
        numbers = buffer.admit(version)
        assert numbers == [3 * version, 3 * version + 1, 3 * version + 2]
        assert buffer.admit(version) == []
        for number in reversed(numbers):
            assert not buffer.has_batch(version)
            buffer.offer(numbered(number, version))
        assert buffer.has_batch(version)
        batch = buffer.next_batch(version)
        assert batch.indices == tuple(numbers)
        assert batch.lags == (0, 0, 0)
        assert buffer.admit(version) == [], "nothing is begun for the next version before this step is done"
        buffer.trained(batch)


def test_a_lag_of_one_samples_the_next_batch_beside_the_trainer() -> None:
    buffer = make(2, max_lag=1)
    assert buffer.admit(0) == [0, 1, 2, 3]
    for number in (1, 3):
        buffer.offer(numbered(number, 0))
    batch = buffer.next_batch(0)
    assert batch.indices == (1, 3)
    buffer.trained(batch)
    assert buffer.admit(1) == [4, 5]


def test_a_batch_before_there_is_one_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="before there is one"):
        make(2).next_batch(0)


def test_a_group_that_nobody_asked_for_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="nobody asked for group 7"):
        make(2).offer(numbered(7, 0))


def test_what_was_given_up_is_replaced_and_ignored_when_it_comes_after_all() -> None:
    store = MemoryStore()
    buffer = make(2, store=store)
    buffer.admit(0)
    buffer.cancel([0], "environment")
    assert buffer.admit(0) == [2]
    buffer.offer(numbered(0, 0))
    assert not store.ready()
    assert store.fate(0) == (GroupState.DROPPED, "environment")
    assert buffer.metrics["buffer/dropped_environment"] == 1


def test_groups_that_can_no_longer_be_trained_on_are_given_up_and_replaced() -> None:
    store = MemoryStore()
    buffer = make(1, max_lag=2, store=store)
    assert buffer.admit(0) == [0, 1, 2]
    assert buffer.cancel_late(2) == []
    assert buffer.cancel_late(3) == [0, 1, 2]
    assert store.fate(1) == (GroupState.DROPPED, "overdue")
    assert buffer.metrics["buffer/dropped_overdue"] == 3
    assert buffer.admit(3) == [3, 4, 5]


def test_groups_that_take_too_long_are_given_up_though_the_trainer_stands_still() -> None:
    clock, store = Clock(), MemoryStore()
    buffer = GroupBuffer(BufferConfig(max_lag=1, depth=2, group_timeout_s=10), 1, store, clock=clock)
    assert buffer.patience_s is None, "nothing is under way"
    assert buffer.admit(0) == [0, 1]
    clock.now = 4.0
    buffer.offer(numbered(1, 0))
    buffer.trained(buffer.next_batch(0))
    assert buffer.admit(1) == [2]
    assert (buffer.patience_s, buffer.cancel_late(1)) == (6.0, [])
    clock.now = 11.0
    assert (buffer.patience_s, buffer.cancel_late(1)) == (0.0, [0])
    assert store.fate(0) == (GroupState.DROPPED, "timed_out")
    assert buffer.metrics["buffer/dropped_timed_out"] == 1
    assert buffer.patience_s == 3.0
    assert buffer.admit(1) == [3]


def test_groups_that_all_take_too_long_end_the_run_and_one_that_comes_in_between_does_not() -> None:
    clock = Clock()
    buffer = GroupBuffer(BufferConfig(max_lag=1, depth=2, group_timeout_s=10), 1, MemoryStore(), clock=clock)

    def wave() -> list[int]:
        buffer.admit(0)
        clock.now += 10
        return buffer.cancel_late(0)

    assert wave() == [0, 1]
    assert wave() == [2, 3]
    assert buffer.admit(0) == [4, 5]
    buffer.offer(numbered(4, 0))
    assert wave() == [5]
    assert wave() == [6]
    buffer.offer(numbered(5, 0))  # given up before, and yet: something comes
    for index in range(7, 22):
        assert wave() == [index]
    with pytest.raises(GroupsLateError) as caught:
        wave()
    assert caught.value.message == "the last 16 groups all took longer than buffer.group_timeout_s = 10, and none came"


def test_of_groups_that_come_together_only_those_that_are_still_wanted_are_kept() -> None:
    store = MemoryStore()
    buffer = make(2, max_lag=1, store=store)
    assert buffer.admit(0) == [0, 1, 2, 3]
    buffer.cancel([1, 2], "overdue")
    buffer.offer(*(numbered(number, 0) for number in (3, 1, 0)))
    assert [info.index for info in store.ready()] == [0, 3]
    assert store.fate(1) == (GroupState.DROPPED, "overdue")
    with pytest.raises(AssertionError, match="nobody asked for group 1"):
        buffer.offer(numbered(1, 0))


def test_the_time_of_an_evaluation_does_not_count_towards_the_limit_of_the_groups_under_way() -> None:
    clock = Clock()
    buffer = GroupBuffer(BufferConfig(max_lag=1, depth=2, group_timeout_s=10), 1, MemoryStore(), clock=clock)
    assert buffer.admit(0) == [0, 1]
    clock.now = 4.0
    with buffer.clock_stands_still():
        clock.now = 104.0
    assert buffer.patience_s == 6.0
    clock.now = 109.0
    assert buffer.cancel_late(0) == []
    clock.now = 110.0
    assert buffer.cancel_late(0) == [0, 1]


def test_a_group_that_is_overdue_and_timed_out_is_given_up_once() -> None:
    clock = Clock()
    buffer = GroupBuffer(BufferConfig(max_lag=1, depth=2, group_timeout_s=10), 1, MemoryStore(), clock=clock)
    buffer.admit(0)
    clock.now = 11.0
    assert buffer.cancel_late(2) == [0, 1]


def test_without_a_limit_nobody_loses_patience() -> None:
    buffer = make(1, max_lag=1, group_timeout_s=None)
    buffer.admit(0)
    assert buffer.patience_s is None


# ── the lag budget ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_lag", [1, 3])
def test_a_group_older_than_the_lag_budget_is_dropped_and_replaced(max_lag: int) -> None:
    store = MemoryStore()
    buffer = make(1, max_lag, store=store)
    late, *others = buffer.admit(0)
    for version, number in enumerate(others):
        buffer.offer(numbered(number, 0))
        buffer.trained(buffer.next_batch(version))
    buffer.offer(numbered(late, 0))
    assert buffer.has_batch(max_lag)
    assert not buffer.has_batch(max_lag + 1)
    assert store.fate(late) == (GroupState.DROPPED, "stale")
    assert buffer.metrics["buffer/dropped_stale"] == 1
    assert len(buffer.admit(max_lag + 1)) == max_lag + 1


def test_the_oldest_token_of_a_group_decides_its_age() -> None:
    buffer = make(1, max_lag=1)
    first, second = buffer.admit(4)
    buffer.offer(numbered(first, 4, 5))
    assert not buffer.has_batch(6)
    buffer.offer(numbered(second, 5, 6))
    assert buffer.has_batch(6)


def test_a_batch_tells_the_lag_of_each_of_its_groups() -> None:
    buffer = make(2, max_lag=2, depth=2)
    for number, version in zip(buffer.admit(3), (3, 4, 5, 5), strict=True):
        buffer.offer(numbered(number, version))
    batch = buffer.next_batch(5)
    assert batch.indices == (0, 2), "the oldest, which is due, and the freshest"
    assert batch.lags == (2, 0)
    assert batch.lag == 2
    assert batch.versions == VersionSpan(3, 5)
    buffer.trained(batch)
    metrics = buffer.metrics
    assert (metrics["buffer/lag_mean"], metrics["buffer/groups_at_lag_0"], metrics["buffer/groups_at_lag_2"]) == (1, 1, 1)


# ── replays ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_group_is_replayed_within_its_limit_and_its_budget() -> None:
    buffer = make(1, max_lag=2, depth=1, max_reuses=1)
    assert step(buffer, 0) == (0,)
    assert buffer.admit(1) == [1]
    replay = buffer.next_batch(1)
    assert (replay.indices, replay.lags) == ((0,), (1,))
    buffer.trained(replay)
    assert not buffer.has_batch(2), "once was the limit"
    assert buffer.metrics["buffer/replays"] == 1


def test_a_replay_never_takes_the_place_of_a_new_group() -> None:
    buffer = make(1, max_lag=2, depth=1, max_reuses=5)
    assert [step(buffer, version) for version in range(3)] == [(0,), (1,), (2,)]


def test_beside_a_batch_of_replays_no_more_is_begun_than_the_later_batches_have_room_for() -> None:
    buffer = make(3, max_lag=2, depth=3, max_reuses=1)
    first, others = (indices := buffer.admit(0))[:3], indices[3:]
    buffer.offer(*(numbered(index, 0) for index in first))
    buffer.trained(buffer.next_batch(0))
    buffer.cancel(others, "no longer wanted")
    assert buffer.next_batch(1).indices == (0, 1, 2)
    assert len(buffer.admit(1)) == 6, "the batches of versions 2 and 3"


def test_nothing_is_replayed_by_default_or_without_signal() -> None:
    buffer = make(1, max_lag=2, depth=1)
    step(buffer, 0)
    assert not buffer.has_batch(1)
    silent = make(1, max_lag=2, depth=1, max_reuses=1)
    silent.offer(numbered(*silent.admit(0), 0, silent=True))
    silent.trained(silent.next_batch(0))
    assert not silent.has_batch(1)


# ── dynamic sampling ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_groups_without_signal_are_replaced_by_other_tasks() -> None:
    store = MemoryStore()
    buffer = make(2, store=store, extra_rounds=1)
    for number in buffer.admit(0):
        buffer.offer(numbered(number, 0, silent=number == 0))
    assert not buffer.has_batch(0)
    assert store.fate(0) == (GroupState.DROPPED, "no_signal")
    assert buffer.admit(0) == [2]
    buffer.offer(numbered(2, 0))
    batch = buffer.next_batch(0)
    assert batch.indices == (1, 2)
    assert batch.num_sequences_sampled == 4, "what was replaced is not part of the mean"
    assert buffer.metrics["buffer/dropped_no_signal"] == 1


def test_where_signal_stays_rare_a_batch_is_filled_with_groups_without() -> None:
    buffer = make(2, extra_rounds=1)
    attempted: list[int] = []
    while not buffer.has_batch(0):
        for number in buffer.admit(0):
            attempted.append(number)
            buffer.offer(numbered(number, 0, silent=True))
    assert attempted == [0, 1, 2, 3], "one extra round of two groups"
    assert buffer.next_batch(0).indices == (2, 3)


def test_each_step_has_its_own_extra_rounds() -> None:
    buffer = make(1, extra_rounds=1)
    for version in range(3):
        while not buffer.has_batch(version):
            for number in buffer.admit(version):
                buffer.offer(numbered(number, version, silent=True))
        buffer.trained(buffer.next_batch(version))
    assert buffer.metrics["buffer/dropped_no_signal"] == 3


def test_without_dynamic_sampling_groups_are_taken_as_they_come() -> None:
    buffer = make(2)
    for number in buffer.admit(0):
        buffer.offer(numbered(number, 0, silent=number == 0))
    batch = buffer.next_batch(0)
    assert (batch.indices, batch.num_sequences, batch.num_sequences_sampled) == ((0, 1), 2, 4)


# ── resuming ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_resumed_run_repeats_what_was_lost_and_nothing_else() -> None:
    store = MemoryStore()
    buffer = make(2, max_lag=1, store=store)
    assert step(buffer, 0) == (0, 1)
    assert buffer.admit(1) == [4, 5]
    buffer.offer(numbered(4, 1))
    buffer.trained(buffer.next_batch(1))  # 2 and 3, sampled at 0
    assert buffer.admit(2) == [6, 7]
    buffer.offer(numbered(6, 2))
    resumed = make(2, max_lag=1, store=store)
    resumed.resume(1)
    assert [info.index for info in store.ready()] == [2, 3, 4]
    assert resumed.admit(1) == [5]
    assert resumed.next_batch(1).indices == (2, 3)


def test_in_lockstep_part_of_a_batch_is_attempted_again_as_a_whole_and_not_stored_twice() -> None:
    store = MemoryStore()
    killed = make(3, store=store)
    killed.admit(0)
    for number in (0, 1):
        killed.offer(numbered(number, 0))
    resumed = make(3, store=store)
    resumed.resume(0)
    assert resumed.admit(0) == [0, 1, 2], "the engine's last bits depend on who is in a batch"
    for number in (0, 1, 2):
        assert not resumed.has_batch(0)
        resumed.offer(numbered(number, 0))
    assert resumed.next_batch(0).indices == (0, 1, 2)


def test_in_lockstep_a_whole_batch_is_not_attempted_again() -> None:
    store = MemoryStore()
    killed = make(2, store=store)
    for number in killed.admit(0):
        killed.offer(numbered(number, 0))
    resumed = make(2, store=store)
    resumed.resume(0)
    assert resumed.admit(0) == []
    assert resumed.has_batch(0)


def test_in_lockstep_replacements_are_attempted_again_in_the_rounds_that_they_came_in() -> None:
    store = MemoryStore()
    killed = make(3, store=store, extra_rounds=1)
    for number in killed.admit(0):
        killed.offer(numbered(number, 0, silent=number > 0))
    assert killed.admit(0) == [3, 4]
    killed.offer(numbered(3, 0))
    resumed = make(3, store=store, extra_rounds=1)
    resumed.resume(0)
    assert resumed.admit(0) == [0, 1, 2]
    for number in (0, 1, 2):
        resumed.offer(numbered(number, 0, silent=number > 0))
    assert resumed.admit(0) == [3, 4]
    for number in (3, 4):
        resumed.offer(numbered(number, 0))
    assert resumed.next_batch(0).indices == (0, 3, 4)


def test_a_resumed_run_that_kept_nothing_goes_on_with_the_tasks_of_its_step() -> None:
    buffer = make(4)
    buffer.resume(5)
    assert buffer.admit(5) == [20, 21, 22, 23]


def test_a_store_in_memory_lets_old_groups_go_and_still_counts_them() -> None:
    store = MemoryStore(horizon=1)
    buffer = make(2, store=store)
    for version in range(10):
        step(buffer, version)
    assert store.counts[GroupState.TRAINED] == 20
    assert len(store._entries) == 4
    with pytest.raises(KeyError):
        store.read([0])


# ── back-pressure ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_controller_hears_how_long_the_trainer_waited_and_its_target_is_kept() -> None:
    clock = Clock()
    buffer = GroupBuffer(BufferConfig(max_lag=3), 2, MemoryStore(), clock=clock)
    for version in range(4):
        numbers = buffer.admit(version)
        clock.now += 3.0
        for number in numbers:
            buffer.offer(numbered(number, version))
        batch = buffer.next_batch(version)
        clock.now += 1.0
        buffer.trained(batch)
        clock.now += 100.0  # a checkpoint or an evaluation is nobody's wait
    assert buffer.metrics["buffer/trainer_wait_s"] == 3.0
    assert (buffer.decision.old, buffer.decision.new) == (4, 6)
    assert buffer.decision.why == "the trainer waited for 75% of the time"
    assert buffer.news() == ["buffer: 4 → 6 groups under way or waiting, the trainer waited for 75% of the time"]
    assert len(buffer.admit(4)) == 4, "two in place of the trained ones, and two more"


# ── packing ────────────────────────────────────────────────────────────────────────────────────────────────────────────

advantage_lists = st.lists(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=1, max_size=4), min_size=1, max_size=4)


@given(advantage_lists)
def test_a_batch_holds_the_attempts_with_an_advantage_end_to_end(advantages: list[list[float]]) -> None:
    groups = [group(values, task_id=str(g), prompt_length=g + 1) for g, values in enumerate(advantages)]
    batch = pack(groups, version=0, keep_no_signal=False)
    kept = [[(t, a) for t, a in zip(g.trajectories, g.advantages, strict=True) if a != 0] for g in groups]
    flat = [pair for pairs in kept for pair in pairs]
    assert batch.num_sequences == len(flat)
    for sequence, (attempt, advantage) in enumerate(flat):
        span = slice(batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1])
        np.testing.assert_array_equal(batch.tokens[span], attempt.token_ids)
        np.testing.assert_array_equal(batch.loss_mask[span], attempt.loss_mask)
        np.testing.assert_array_equal(batch.old_logprobs[span], attempt.logprobs)
        assert batch.advantages[sequence] == advantage
    assert batch.cu_seqlens[-1] == len(batch.tokens) == len(batch.loss_mask) == len(batch.old_logprobs)
    assert np.diff(batch.group_offsets).tolist() == [len(pairs) for pairs in kept]


@given(advantage_lists)
def test_attempts_that_are_left_out_still_count_in_the_mean(advantages: list[list[float]]) -> None:
    groups = [group(values) for values in advantages]
    batch = pack(groups, version=0, keep_no_signal=False)
    assert batch.num_sequences_sampled == sum(len(values) for values in advantages)
    assert batch.num_tokens_sampled == sum(t.num_completion_tokens for g in groups for t in g.trajectories)


@given(advantage_lists)
def test_attempts_without_an_advantage_are_kept_where_something_else_moves_them(advantages: list[list[float]]) -> None:
    batch = pack([group(values) for values in advantages], version=0, keep_no_signal=True)
    assert batch.advantages.tolist() == [value for values in advantages for value in values]
    assert batch.num_sequences == batch.num_sequences_sampled
    assert np.diff(batch.group_offsets).tolist() == [len(values) for values in advantages]
    assert batch.num_tokens_left_out == 0


@pytest.mark.parametrize("keep_no_signal", [True, False])
def test_a_failed_attempt_is_never_trained_on_and_counts_in_no_mean(keep_no_signal: bool) -> None:
    attempts = [trajectory([1], [2, 3]), trajectory([1], [4, 5, 6], failure=Failure("reward", "broken"))]
    made = TrajectoryGroup("task", attempts, np.array([1, 0], dtype=np.float32))
    batch = pack([made], version=0, keep_no_signal=keep_no_signal)
    assert batch.tokens.tolist() == [1, 2, 3]
    assert (batch.num_sequences_sampled, batch.num_tokens_sampled, batch.num_tokens_left_out) == (1, 2, 0)


def test_a_batch_without_any_signal_is_empty_but_well_formed() -> None:
    batch = pack([group([0.0, 0.0], version=3)], version=3, keep_no_signal=False)
    assert (batch.num_sequences, batch.num_sequences_sampled, batch.lag) == (0, 2, 0)
    assert (batch.cu_seqlens.tolist(), batch.group_offsets.tolist()) == ([0], [0, 0])
    assert len(batch.tokens) == len(batch.loss_mask) == len(batch.old_logprobs) == len(batch.advantages) == 0


@pytest.mark.parametrize("advantages", [[1.0, -1.0], [0.0, 0.0]], ids=["with signal", "without"])
def test_arrays_have_the_types_that_the_record_promises(advantages: list[float]) -> None:
    batch = pack([group(advantages)], version=0, keep_no_signal=False)
    promised = {
        "tokens": np.int32,
        "cu_seqlens": np.int64,
        "group_offsets": np.int64,
        "loss_mask": np.bool_,
        "old_logprobs": np.float32,
        "advantages": np.float32,
    }
    assert {name: getattr(batch, name).dtype for name in promised} == promised
