"""What every group store promises (`GroupStore` of `buffer/store/group_store.py`): states, and the way back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stored_groups import make_resumable, numbered, ready_numbers

from redline.buffer.packing import pack
from redline.buffer.store.group_store import GroupState, GroupStore
from redline.buffer.store.memory_store import MemoryStore
from redline.buffer.store.stored_groups import StoredGroups, pack_stored
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.types import TrainBatch, TrajectoryGroup, VersionSpan

STORES: dict[str, Callable[[Path], GroupStore]] = {"memory": lambda folder: MemoryStore(), "trajectories": TrajectoryStore}
"""Name → a new store, which may use the folder."""
SMALL = 4000
"""Bytes of a segment that holds a few groups."""


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> GroupStore:
    return STORES[request.param](tmp_path)


# ── states ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_states_are_those_of_every_store(store: GroupStore) -> None:
    assert [state.value for state in GroupState] == ["in_flight", "ready", "leased", "trained", "dropped"]
    assert dict(store.counts) == dict.fromkeys(GroupState, 0)


def test_a_group_is_in_flight_then_ready_then_leased_then_trained(store: GroupStore) -> None:
    seen = []

    def note() -> None:
        seen.append([state for state, count in store.counts.items() if count])

    store.begin([0], 3)
    note()
    store.add(numbered(0, version=3))
    note()
    store.lease([0], 4)
    note()
    store.trained([0], 4)
    note()
    assert seen == [["in_flight"], ["ready"], ["leased"], ["trained"]]


def test_what_is_ready_says_what_a_choice_needs(store: GroupStore) -> None:
    store.begin([3, 7], 2)
    store.add(numbered(7, version=4))
    store.add(numbered(3, [0.0, 0.0], version=5))
    without_signal, with_signal = store.ready()
    assert (without_signal.index, with_signal.index) == (3, 7)
    assert (without_signal.has_signal, with_signal.has_signal) == (False, True)
    assert with_signal.versions == VersionSpan(4, 4)
    assert with_signal.reward == 0.0
    assert store.next_index == 8


def test_a_group_does_not_come_twice_at_once(store: GroupStore) -> None:
    store.begin([0], 0)
    with pytest.raises(AssertionError):
        store.add(numbered(0), numbered(0))


def test_a_group_is_not_begun_or_added_or_trained_twice(store: GroupStore) -> None:
    store.begin([0], 0)
    store.add(numbered(0))
    with pytest.raises(AssertionError, match="begun before"):
        store.begin([0], 1)
    with pytest.raises(AssertionError, match="group 0 is ready"):
        store.add(numbered(0))
    store.lease([0], 0)
    store.trained([0], 0)
    with pytest.raises(AssertionError, match="group 0 is trained"):
        store.add(numbered(0))
    with pytest.raises((AssertionError, KeyError)):
        store.trained([0], 1)


def test_a_group_cannot_skip_a_state(store: GroupStore) -> None:
    store.begin([0], 0)
    with pytest.raises(AssertionError, match="group 0 is in_flight, and cannot become leased"):
        store.lease([0], 0)


def test_what_is_dropped_is_counted_by_the_reason_and_never_ready_again(store: GroupStore) -> None:
    store.begin(range(4), 0)
    store.add(*(numbered(number) for number in range(3)))
    store.drop([0, 2], "stale")
    store.drop([3], "timeout")
    assert dict(store.dropped) == {"stale": 2, "timeout": 1}
    assert (ready_numbers(store), store.counts["dropped"]) == ([1], 3)


def test_groups_are_read_in_the_order_asked(store: GroupStore) -> None:
    store.begin(range(3), 0)
    store.add(*(numbered(number) for number in range(3)))
    tokens = np.asarray(batch_of(store, [2, 0]).tokens).tolist()
    assert tokens == [10, 11, 12, 102, 10, 11, 12, 102, 102, 10, 11, 12, 100, 10, 11, 12, 100, 100]


def test_experts_of_tokens_reach_the_batch_and_attempts_without_a_record_are_filled_up(store: GroupStore) -> None:
    """The first group has them, the second has none, in the third one attempt has."""

    def recorded(number: int, *known: bool) -> TrajectoryGroup:
        group, attempts = numbered(number, [1.0] * len(known)), []
        for own, is_known in zip(group.trajectories, known, strict=True):
            routing = np.arange(len(own.token_ids) * 2, dtype=np.uint8).reshape(-1, 2) + number
            attempts.append(replace(own, routing=routing if is_known else None))
        return replace(group, trajectories=attempts)

    store.begin(range(3), 0)
    store.add(recorded(0, True, True), recorded(1, False, False), recorded(2, False, True))
    batch = batch_of(store, [0, 1, 2])
    assert batch.routing_width == 2
    rows = np.asarray(batch.routing).reshape(-1, 2)
    expected = [[[2 * t + number, 2 * t + number + 1] for t in range(length)] for number in (0, 2) for length in (4, 5)]
    nothing = [[255, 255]]
    assert rows.tolist() == [*expected[0], *expected[1], *nothing * (4 + 5), *nothing * 4, *expected[3]]
    assert batch_of(store, [1]).routing is None
    alone = batch_of(store, [0])
    assert np.asarray(alone.routing).reshape(-1, 2).tolist() == [*expected[0], *expected[1]]


# ── resuming ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_is_back_at_the_checkpoint(store: GroupStore) -> None:
    assert store.resume(5) == [3, 5, 8, 9], "sampled by a policy that is lost, or in flight"
    assert ready_numbers(store) == [1, 2, 4, 6], "ready, or leased, trained or dropped since"
    assert store.counts == {"in_flight": 4, "ready": 4, "leased": 0, "trained": 1, "dropped": 1}
    assert store.next_index == 10


def test_resuming_goes_back_to_the_checkpoint(store: GroupStore) -> None:
    make_resumable(store)
    assert_is_back_at_the_checkpoint(store)


def test_another_process_resumes_what_is_on_disk_as_this_one_would(tmp_path: Path) -> None:
    make_resumable(TrajectoryStore(tmp_path))
    assert_is_back_at_the_checkpoint(TrajectoryStore(tmp_path))
    assert TrajectoryStore(tmp_path).resume(5) == [3, 5, 8, 9]


def test_lengths_of_what_was_sampled_before_a_checkpoint_are_found_again(tmp_path: Path) -> None:
    make_resumable(TrajectoryStore(tmp_path, segment_bytes=SMALL))
    opened = TrajectoryStore(tmp_path)
    assert [task for task, _ in opened.lengths_before(5, most=9)] == ["task/0", "task/7"], "sampled at 3 and at 4"
    assert [task for task, _ in opened.lengths_before(6, most=3)] == ["task/4", "task/6", "task/7"]
    assert opened.lengths_before(5, most=9)[0][1] == numbered(0).lengths
    assert MemoryStore().lengths_before(5, most=9) == []


def test_groups_that_were_sampled_before_a_checkpoint_are_found_again(tmp_path: Path) -> None:
    make_resumable(TrajectoryStore(tmp_path, segment_bytes=SMALL))
    [newest, first] = TrajectoryStore(tmp_path).groups_before(5, most=9)
    assert (newest.task_id, first.task_id) == ("task/7", "task/0")
    expected = [trajectory.token_ids.tolist() for trajectory in numbered(0).trajectories]
    assert [trajectory.token_ids.tolist() for trajectory in first.trajectories] == expected
    assert MemoryStore().groups_before(5, most=9) == []


def test_what_is_forgotten_can_be_attempted_again(store: GroupStore) -> None:
    make_resumable(store)
    store.resume(5)
    store.begin([3], 5)
    store.add(numbered(3, version=5))
    assert {info.index: info.versions for info in store.ready()}[3] == VersionSpan(5, 5)


def test_a_number_to_attempt_again_is_not_forgotten_before_it_is_begun(store: GroupStore) -> None:
    make_resumable(store)
    assert store.resume(5) == store.resume(5)


# ── any order of events ────────────────────────────────────────────────────────────────────────────────────────────────

operations = st.lists(
    st.tuples(st.sampled_from(["begin", "add", "lease", "trained", "drop", "step", "resume", "reopen"]), st.integers(0, 9)),
    max_size=40,
)


@settings(max_examples=60)
@given(operations)
def test_the_store_does_what_the_one_in_memory_does(tmp_path_factory: pytest.TempPathFactory, operations: list) -> None:
    folder = tmp_path_factory.mktemp("store")
    stored, memory = TrajectoryStore(folder, segment_bytes=SMALL), MemoryStore()
    version = 0
    in_flight: list[int] = []
    leased: list[int] = []
    for name, choice in operations:
        ready = ready_numbers(stored)
        if name == "begin":
            numbers = list(range(stored.next_index, stored.next_index + choice % 3 + 1))
            in_flight += numbers
            for store in (stored, memory):
                store.begin(numbers, version)
        elif name == "add" and in_flight:
            some = [in_flight.pop(choice % len(in_flight)) for _ in range(min(choice % 4 + 1, len(in_flight)))]
            for store in (stored, memory):
                store.add(*(numbered(number, version=version) for number in some))
        elif name == "lease" and ready:
            leased.append(ready[choice % len(ready)])
            for store in (stored, memory):
                store.lease(leased[-1:], version)
        elif name == "trained" and leased:
            for store in (stored, memory):
                store.trained(leased, version)
            leased = []
        elif name == "drop" and ready:
            for store in (stored, memory):
                store.drop([ready[choice % len(ready)]], "stale")
        elif name == "step":
            version += 1
        elif name == "reopen":
            if choice % 2:
                stored.close()
            stored = TrajectoryStore(folder, segment_bytes=SMALL)
        elif name == "resume":
            version = max(0, version - choice % 3)
            in_flight, leased = stored.resume(version), []
            assert in_flight == memory.resume(version)
        assert [(i.index, i.versions, i.has_signal) for i in stored.ready()] == [
            (i.index, i.versions, i.has_signal) for i in memory.ready()
        ]
        assert dict(stored.counts) == dict(memory.counts)
        assert stored.next_index == memory.next_index
    numbers = ready_numbers(stored)
    if numbers:
        assert_same(batch_of(stored, numbers), batch_of(memory, numbers))


def batch_of(store: GroupStore, numbers: list[int]) -> TrainBatch:
    groups = store.read(numbers)
    if isinstance(groups, StoredGroups):
        return pack_stored(groups, 9, keep_no_signal=True)
    return pack(groups, 9, keep_no_signal=True)


def assert_same(batch: TrainBatch, expected: TrainBatch) -> None:
    names = (
        "tokens",
        "cu_seqlens",
        "group_offsets",
        "loss_mask",
        "old_logprobs",
        "advantages",
        "group_sequences",
        "group_tokens",
    )
    for name in names:
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name), name)
        assert getattr(batch, name).dtype == getattr(expected, name).dtype
    for name in ("num_sequences_sampled", "num_tokens_sampled", "num_tokens_left_out", "versions", "version"):
        assert getattr(batch, name) == getattr(expected, name)
