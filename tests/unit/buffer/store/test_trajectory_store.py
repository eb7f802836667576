from __future__ import annotations

import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.fakes import trajectory
from support.paths import ROOT
from support.stored_groups import SIGNAL, attempts, filled, make_resumable, num_segments, numbered, ready_numbers

from redline.buffer.buffer import GroupBuffer
from redline.buffer.packing import pack
from redline.buffer.store.columns import Rows, group_nodes
from redline.buffer.store.found import found_groups
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import GroupIndex, GroupRow
from redline.buffer.store.segments import read_segment
from redline.buffer.store.stored_groups import pack_stored
from redline.buffer.store.trajectory_store import UNDECIDED, TrajectoryStore, _as_of
from redline.config.sections.buffer import BufferConfig
from redline.rollouts.rewards.parts import reward_parts, total_reward
from redline.types import Failure, TrajectoryGroup, VersionSpan

SMALL = 4000
"""Bytes of a segment that holds a few groups."""


def read(folder: Path) -> pa.Table:
    """As anyone would, with pyarrow alone."""
    return pa.concat_tables(pa.ipc.open_file(path).read_all() for path in sorted(folder.glob("segment-*.arrow")))


# ── what is on disk ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("closed", [False, True], ids=["while the run goes on", "afterwards"])
def test_the_segments_hold_what_was_sampled(tmp_path: Path, closed: bool) -> None:
    group = TrajectoryGroup("sums/1", attempts(), np.array([0.5, -0.5, 0], dtype=np.float32), index=4)
    store = TrajectoryStore(tmp_path)
    store.begin([4], 5)
    store.add(group)
    if closed:
        store.close()
    rows = read(tmp_path).to_pylist()
    assert len(rows) == 3
    for i, (row, attempt) in enumerate(zip(rows, group.trajectories, strict=True)):
        assert (row["group"], row["attempt"], row["task_id"], row["version"]) == (4, i, "sums/1", -1)
        assert row["token_ids"] == attempt.token_ids.tolist()
        assert row["loss_mask"] == attempt.loss_mask.tolist()
        assert row["logprobs"] == attempt.logprobs.tolist()
        assert row["advantage"] == group.advantages[i]
        assert row["reward"] == attempt.reward
        assert {part["name"]: part["value"] for part in row["reward_parts"]} == attempt.reward_parts
        assert row["finish_reason"] == attempt.finish_reason.value
        assert (row["oldest_version"], row["newest_version"]) == (attempt.versions.oldest, attempt.versions.newest)
        assert (row["begun_version"], row["text"]) == (5, attempt.text)
    assert [row["failure"] for row in rows] == [None, None, "reward: ValueError: no number"]
    assert [[(t["start"], t["end"]) for t in row["turns"]] for row in rows] == [[(2, 5)], [(2, 3), (4, 5)], [(1, 3)]]
    assert rows[1]["turns"][0].items() >= {"start": 2, "end": 3, "oldest_version": 5, "newest_version": 6}.items()


def test_whoever_trained_on_a_group_stands_in_the_segment_too(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    store.lease([1], 4)
    store.trained([1], 4)
    store.drop([2], "stale")
    assert read(tmp_path)["version"].to_pylist() == [-1, -1, 4, 4, -2, -2]


def test_the_offsets_on_disk_are_the_trainers(tmp_path: Path) -> None:
    """One layout from sampler to device: a list column is flat values and int64 offsets."""
    filled(tmp_path, 2).close()
    column = read(tmp_path)["token_ids"].chunk(0)
    assert np.asarray(column.offsets).tolist() == [0, 4, 9, 13, 18]
    assert np.asarray(column.offsets).dtype == np.int64
    assert np.asarray(column.values).tolist() == [
        *(10, 11, 12, 100),
        *(10, 11, 12, 100, 100),
        *(10, 11, 12, 101),
        *(10, 11, 12, 101, 101),
    ]


def test_text_that_is_no_unicode_is_stored_as_far_as_it_is(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.add(numbered(0, text="half \ud83d of a pair"))
    assert read(tmp_path)["text"][0].as_py() == "half ? of a pair"


def test_groups_that_come_at_once_lie_as_if_they_had_come_one_by_one(tmp_path: Path) -> None:
    parts = [{"a": 1.0}, {}, {"a": 0.0, "b": 2.0}]
    groups = [
        numbered(3, reward_parts=parts[0], text="ünïcode 🙂"),
        TrajectoryGroup("sums/1", attempts(), np.array([0.5, -0.5, 0], dtype=np.float32), index=0),
        numbered(2, [1.0], reward_parts=parts[1], text=""),
        *(numbered(number, [0.5] * number, version=number, reward_parts=parts[2]) for number in range(4, 9)),
    ]
    at_once, one_by_one = TrajectoryStore(tmp_path / "a"), TrajectoryStore(tmp_path / "b")
    at_once.add(*groups)
    for group in groups:
        one_by_one.add(group)
    assert read(tmp_path / "a").equals(read(tmp_path / "b"))
    assert at_once.ready() == one_by_one.ready()
    segment = Rows(read_segment(next((tmp_path / "a").glob("segment-*"))))
    ends = np.cumsum([len(group.trajectories) for group in groups]).tolist()
    assert all(segment.is_intact(first, last) for first, last in zip([0, *ends], ends, strict=False))


def test_many_groups_at_once_fill_segments_as_they_do_one_by_one(tmp_path: Path) -> None:
    """In portions, of which several lie in a segment: a thousand groups at once are no giant."""
    groups = [numbered(number, [0.5] * 30) for number in range(60)]
    at_once, one_by_one = (TrajectoryStore(tmp_path / name, segment_bytes=100_000) for name in ("a", "b"))
    at_once.add(*groups)
    for group in groups:
        one_by_one.add(group)
    assert 3 <= num_segments(at_once) <= num_segments(one_by_one) + 1
    assert read(tmp_path / "a")["group"].to_pylist() == [number for number in range(60) for _ in range(30)]
    again = TrajectoryStore(tmp_path / "a")
    assert (again.resume(0), ready_numbers(again)) == ([], list(range(60)))


def test_no_groups_are_no_work(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.add()
    assert (num_segments(store), store.next_index) == (0, 0)


def test_a_segment_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    store = filled(tmp_path, 40, segment_bytes=SMALL)
    names = sorted(path.name for path in tmp_path.glob("segment-*"))
    assert len(names) > 2
    assert [".open." in name for name in names] == [False] * (len(names) - 1) + [True]
    assert read(tmp_path)["group"].to_pylist() == [number for number in range(40) for _ in SIGNAL]
    store.close()
    assert all(path.stat().st_size < 2 * SMALL + 8000 for path in tmp_path.glob("segment-*")), "without gaps, and a head each"


def test_a_group_larger_than_a_segment_has_one_to_itself(tmp_path: Path) -> None:
    store = filled(tmp_path, 2, segment_bytes=SMALL)
    long = TrajectoryGroup(
        "long", [trajectory([1], range(60_000)), trajectory([1], [2])], np.array(SIGNAL, dtype=np.float32), 2
    )
    store.add(long)
    store.add(numbered(3))
    assert store.read([2]).tokens.tolist() == [1, *range(60_000), 1, 2]
    assert store.read([3]).tokens.tolist() == [10, 11, 12, 103, 10, 11, 12, 103, 103]


# ── states ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_ready_says_how_long_it_is_and_when_it_was_begun(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.begin([7, 3], 2)
    store.add(numbered(7, version=4))
    [ready] = store.ready()
    assert (ready.num_tokens, ready.begun_version) == (9, 2)


def test_states_survive_the_process(tmp_path: Path) -> None:
    store = filled(tmp_path, 5)
    store.begin([5], 1)
    store.lease([0, 1], 1)
    store.trained([0], 1)
    store.drop([2], "no_signal")
    store.close()
    again = TrajectoryStore(tmp_path)
    assert again.counts == {"in_flight": 1, "ready": 2, "leased": 1, "trained": 1, "dropped": 1}
    assert (ready_numbers(again), again.next_index) == ([3, 4], 6)
    assert again.read([3, 4]).tokens.tolist() == [t for g in (103, 104) for n in (1, 2) for t in [10, 11, 12, *[g] * n]]


# ── resuming ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_forgotten_is_marked_and_can_be_attempted_again(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    make_resumable(store)
    store.resume(5)
    store.begin([3], 5)
    store.add(numbered(3, version=5))
    assert store.read([3]).versions == VersionSpan(5, 5)
    marks = {(row["group"], row["oldest_version"]): row["version"] for row in read(tmp_path).to_pylist()}
    assert marks == {(0, 3): 4, (1, 5): -1, (2, 5): -1, (3, 6): -3, (4, 5): -1, (5, 7): -3, (6, 5): -1, (7, 4): -2, (3, 5): -1}


# ── killed at any point ────────────────────────────────────────────────────────────────────────────────────────────────

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.stored_groups import numbered
from redline.buffer.store.trajectory_store import TrajectoryStore
store = TrajectoryStore(Path(sys.argv[2]), segment_bytes=2_000)
first = store.next_index
for number in range(first, first + 100_000, 4):
    four = range(number, number + 4)
    store.begin(four, number)
    store.add(*(numbered(each, [1.0, -1.0, 0.0], version=number) for each in four))
    print(*four, sep="\\n", flush=True)
    done = [each for each in four if each % 3 == 0]
    store.lease(done, number)
    store.trained(done, number)
"""


def test_a_kill_loses_no_group_that_was_added(tmp_path: Path) -> None:
    tests = str(ROOT / "tests")
    added: list[int] = []
    for round_ in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, tests, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        added += [int(process.stdout.readline()) for _ in range(10 + 7 * round_)]
        time.sleep(0.0037 * round_)
        os.kill(process.pid, signal.SIGKILL)
        added += [int(line) for line in process.stdout.read().splitlines()]
        process.wait()
    store = TrajectoryStore(tmp_path)
    again = store.resume(store.next_index)
    known = {*ready_numbers(store), *again}
    trained = {number for number in added if number % 3 == 0}
    assert len(added) > 40
    assert set(added) - known - trained == set()
    assert len(again) <= 16, "at most the four that were being added at each kill"
    for number in ready_numbers(store):
        assert store.read([number]).tokens[3] == 100 + number


@pytest.mark.parametrize("parts", [[[2], [3]], [[2, 3]]], ids=["one by one", "at once"])
def test_what_the_index_did_not_hear_of_is_taken_in(tmp_path: Path, parts: list[list[int]]) -> None:
    """Killed between the segment and the index."""
    store = filled(tmp_path, 2)
    store.begin([2, 3], 1)
    for numbers in parts:
        store._segments.write(group_nodes([numbered(number, version=1) for number in numbers], [1] * len(numbers)))
    again = TrajectoryStore(tmp_path)
    assert (ready_numbers(again), again.counts["in_flight"]) == ([0, 1, 2, 3], 0)
    assert again.read([0, 1, 2, 3]).num_runs == 1
    assert again.ready()[2].begun_version == 1


def test_the_reward_of_a_group_is_over_the_attempts_that_have_one_whoever_tells_the_index(tmp_path: Path) -> None:
    failed = trajectory([1], [2], failure=Failure("reward", "it raised"))
    mixed = TrajectoryGroup("a", [failed, trajectory([1], [2], reward=0.5)], np.zeros(2, dtype=np.float32))
    lost = TrajectoryGroup("b", [failed, failed], np.zeros(2, dtype=np.float32), 1)
    store = TrajectoryStore(tmp_path)
    store.begin(range(4), 0)
    store.add(mixed, lost)
    store._segments.write(group_nodes([replace(mixed, index=2), replace(lost, index=3)], [0, 0]))
    assert [info.reward for info in TrajectoryStore(tmp_path).ready()] == [0.5, None, 0.5, None]


# ── circular ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_all(store: TrajectoryStore, numbers: Sequence[int], version: int) -> None:
    store.lease(numbers, version)
    store.trained(numbers, version)


def test_segments_are_deleted_by_size_once_nobody_wants_their_groups(tmp_path: Path) -> None:
    store = filled(tmp_path, 60, segment_bytes=SMALL, max_bytes=3 * SMALL)
    before = num_segments(store)
    assert before > 5, "nothing that is ready goes"
    train_all(store, range(20), 0)
    assert 3 < num_segments(store) < before
    assert store.read(range(20, 60)).num_runs > 1
    assert store.counts["trained"] == 20
    train_all(store, range(20, 60), 1)
    assert sum(path.stat().st_size for path in tmp_path.glob("segment-??????.arrow")) <= 3 * SMALL
    store.close()
    again = TrajectoryStore(tmp_path)
    assert again.resume(2) == []
    assert again.counts["trained"] == 60


def test_segments_are_deleted_by_age(tmp_path: Path) -> None:
    store = filled(tmp_path, 60, segment_bytes=SMALL, max_age_steps=2)
    before = num_segments(store)
    train_all(store, range(30), 0)
    train_all(store, range(30, 40), 2)
    assert num_segments(store) == before
    train_all(store, range(40, 41), 3)
    assert num_segments(store) < before
    store.read(range(41, 60))


def test_what_a_resumed_run_may_want_again_is_kept(tmp_path: Path) -> None:
    store = filled(tmp_path, 60, segment_bytes=SMALL, max_bytes=1, keep_steps=2)
    before = num_segments(store)
    train_all(store, range(30), 0)
    train_all(store, range(30, 60), 1)
    assert num_segments(store) == before
    assert store.resume(1) == []
    assert ready_numbers(store) == list(range(30, 60))


def test_what_was_deleted_and_is_wanted_after_all_is_attempted_again(tmp_path: Path) -> None:
    store = filled(tmp_path, 60, segment_bytes=SMALL, max_bytes=1)
    train_all(store, range(60), 0)
    again = store.resume(0)
    assert 0 < len(again) < 60, "the open segment stays"
    assert sorted([*again, *ready_numbers(store)]) == list(range(60))


def test_a_new_segment_never_has_the_name_of_one_that_was_deleted(tmp_path: Path) -> None:
    store = filled(tmp_path, 3, segment_bytes=SMALL, max_bytes=1)
    train_all(store, range(3), 0)
    store.close()
    again = TrajectoryStore(tmp_path, segment_bytes=SMALL, max_bytes=1)
    again.begin([3], 1)
    again.drop([3], "stale")
    assert num_segments(again) == 0
    again.close()
    last = TrajectoryStore(tmp_path, segment_bytes=SMALL)
    last.add(numbered(4, version=1))
    assert [path.name for path in tmp_path.glob("segment-*")] == ["segment-000001.open.arrow"]
    assert last.resume(0) == [0, 1, 2, 4]


# ── what came before ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_rewards_come_back_as_they_went(tmp_path: Path) -> None:
    """In 32 bits, and to the bit: rows of a resumed run are those of one that was never stopped."""
    parts = [reward_parts({"a": 0.1, "b": 1 / 3 + number}) for number in range(3)]
    rated = [
        replace(one, reward=total_reward(own, {"b": 0.7}), reward_parts=own) for one, own in zip(attempts(), parts, strict=True)
    ]
    group = TrajectoryGroup("sums/1", rated, np.array([0.5, -0.5, 0], dtype=np.float32), index=0)
    store = TrajectoryStore(tmp_path)
    store.begin([0], 0)
    store.add(group)
    store.close()
    [found] = TrajectoryStore(tmp_path).arrived_after(0)
    assert [(t.reward, t.reward_parts) for t in found.trajectories] == [(t.reward, t.reward_parts) for t in rated]
    [repaired] = found_groups(read(tmp_path).to_batches()[0])
    assert repaired.row(segment=0).reward == found.reward == group.reward


def test_groups_of_an_earlier_process_come_back_as_they_came(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    given = TrajectoryGroup("sums/1", attempts(), np.array([0.5, -0.5, 0], dtype=np.float32), index=4)
    store.add(given)
    store.close()
    [found] = TrajectoryStore(tmp_path).arrived_after(0)
    assert (found.task_id, found.index, found.versions) == (given.task_id, given.index, given.versions)
    np.testing.assert_array_equal(found.advantages, given.advantages)
    for mine, theirs in zip(found.trajectories, given.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        for name in ("versions", "finish_reason", "text", "reward", "reward_parts", "failure"):
            assert getattr(mine, name) == getattr(theirs, name)


def test_they_come_in_the_order_in_which_they_came_across_segments(tmp_path: Path) -> None:
    store, order = TrajectoryStore(tmp_path, segment_bytes=SMALL // 4), [5, 0, 3, 1, 4, 2, 9, 8, 7, 6]
    store.begin(range(10), 0)
    for number in order:
        store.add(numbered(number))
    assert num_segments(store) > 1
    assert [group.index for group in store.arrived_after(0)] == order
    assert [group.index for group in store.arrived_after(7)] == order[7:]
    assert store.arrived_after(10) == []


def test_what_a_resumed_run_has_and_does_not_attempt_again_is_counted_once(tmp_path: Path) -> None:
    def make(max_lag: int) -> tuple[TrajectoryStore, GroupBuffer]:
        store = TrajectoryStore(tmp_path)
        return store, GroupBuffer(BufferConfig(max_lag=max_lag), 2, store)

    store, buffer = make(1)
    for number in buffer.admit(0):
        buffer.offer(numbered(number))
    buffer.trained(buffer.next_batch(0))  # the row of this step counts the four that came until now
    for number in buffer.admit(1)[:1]:
        buffer.offer(numbered(number, version=1))
    store.close()
    store, resumed = make(1)
    resumed.resume(1)
    assert [group.index for group in resumed.not_counted(4)] == [4]
    assert resumed.admit(1) == [5]
    store.close()
    store, again = make(1)
    again.resume(0)
    assert [group.index for group in again.not_counted(0)] == [0, 1, 2, 3], "4 was sampled by a policy that is lost"
    store.close()


def test_a_resumed_run_knows_what_was_dropped_before_its_checkpoint(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    before = GroupBuffer(BufferConfig(), 2, store, max_extra_rounds=1)
    for version in (0, 1):
        first, second = before.admit(version)
        before.offer(numbered(first, version=version))
        group = numbered(second, version=version)
        before.offer(replace(group, advantages=0 * group.advantages))
        assert not before.has_batch(version)
        [instead] = before.admit(version)
        before.offer(numbered(instead, version=version))
        before.trained(before.next_batch(version))
    assert before.metrics["buffer/dropped_no_signal"] == 2
    store.close()
    store = TrajectoryStore(tmp_path)
    resumed = GroupBuffer(BufferConfig(), 2, store, max_extra_rounds=1)
    resumed.resume(1)
    assert resumed.metrics["buffer/dropped_no_signal"] == 1, "the other was dropped by a step that is taken again"
    store.close()


# ── a power cut ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was flushed, in that order."""
    names: list[str] = []

    def note(file: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)

    monkeypatch.setattr(os, "fsync", note)
    return names


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_flush_takes_tokens_then_names_then_the_index_and_leaves_nothing_out(tmp_path: Path, flushed: list[str]) -> None:
    store = filled(tmp_path, 10, segment_bytes=SMALL // 4)
    store.flush()
    flushed.clear()
    train_all(store, [0, 9], 0)
    store.flush()
    marked = ["segment-000000.arrow", max(path.name for path in tmp_path.glob("segment-*"))]
    assert flushed == [*marked, tmp_path.name, "index.sqlite-wal"]
    flushed.clear()
    store.flush()
    assert flushed == [tmp_path.name, "index.sqlite-wal"], "nothing else has changed"


def test_what_was_flushed_is_all_there_if_the_rest_is_not(tmp_path: Path) -> None:
    """A power cut: the files as they were at the flush, in a folder of their own."""
    store = filled(tmp_path / "run", 6)
    train_all(store, range(3), 0)
    store.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "after")
    train_all(store, range(3, 6), 1)
    again = TrajectoryStore(tmp_path / "after")
    assert again.resume(1) == []
    assert (ready_numbers(again), again.counts[GroupState.TRAINED]) == ([3, 4, 5], 3)


def test_a_flush_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    reader = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM groups").fetchone() == (3,)
    train_all(store, range(3), 0)
    store.flush()
    assert reader.execute("SELECT count(*) FROM groups WHERE state = 'ready'").fetchone() == (3,), "it still sees the past"
    reader.close()


# ── zero copy ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Where this process has files of the folder in its memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]  # type: ignore[misc]


def is_mapped(array: np.ndarray, folder: Path) -> bool:
    address = array.__array_interface__["data"][0]
    return any(low <= address and address + array.nbytes <= high for low, high in mapped_ranges(folder))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("closed", [False, True], ids=["just added", "of an earlier process"])
def test_a_batch_of_neighbours_is_a_view_of_the_file(tmp_path: Path, closed: bool) -> None:
    store = filled(tmp_path, 12)
    if closed:
        store.close()
        store = TrajectoryStore(tmp_path)
    groups = store.read(range(2, 9))
    batch = pack_stored(groups, 0, keep_no_signal=False)
    assert groups.num_runs == 1
    for array in (batch.tokens, batch.loss_mask, batch.old_logprobs):
        assert is_mapped(array, tmp_path)
        assert not array.flags.owndata
    assert np.shares_memory(batch.tokens, store.read([5]).tokens)
    store.add(numbered(12))
    assert np.shares_memory(batch.tokens, store.read([5, 6]).tokens) == closed, "a larger segment is mapped once more"


def test_groups_that_are_not_neighbours_are_read_as_one(tmp_path: Path) -> None:
    store = filled(tmp_path, 9)
    groups = store.read([1, 2, 5, 4])
    assert (groups.num_runs, groups.indices) == (3, (1, 2, 5, 4))
    assert groups.tokens[groups.loss_mask].tolist() == [n for g in (101, 102, 105, 104) for n in [g] * 3]
    assert groups.offsets.tolist() == [0, 4, 9, 13, 18, 22, 27, 31, 36]


def test_a_view_outlives_its_file(tmp_path: Path) -> None:
    store = filled(tmp_path, 30, segment_bytes=SMALL, max_bytes=1)
    batch = pack_stored(store.read([0, 1]), 0, keep_no_signal=True)
    before = batch.tokens.copy()
    train_all(store, range(30), 0)
    assert not (tmp_path / "segment-000000.arrow").exists()
    np.testing.assert_array_equal(batch.tokens, before)


@pytest.mark.parametrize("keep_no_signal", [True, False])
def test_what_is_not_trained_on_is_masked_and_nothing_is_copied_for_it(tmp_path: Path, keep_no_signal: bool) -> None:
    """The trainer computes the same sequences as if they had been left out."""
    from redline.trainer.batches.micro_batches import micro_batches

    groups = [
        numbered(0),
        numbered(1, [0.0, 0.0, 0.0]),
        TrajectoryGroup("mixed", attempts(), np.array([1, -1, 0], dtype=np.float32), 2),
        numbered(3, [0.5, 0.0]),
    ]
    store = TrajectoryStore(tmp_path)
    for group in groups:
        store.add(group)
    batch = pack_stored(store.read(range(4)), 6, keep_no_signal=keep_no_signal)
    expected = pack(groups, 6, keep_no_signal=keep_no_signal)
    assert np.shares_memory(batch.tokens, store.read(range(4)).tokens)
    assert batch.num_sequences_sampled == expected.num_sequences_sampled == 9, "one attempt failed"
    assert batch.num_tokens_sampled == expected.num_tokens_sampled
    assert batch.num_tokens_left_out == expected.num_tokens_left_out
    assert batch.versions == expected.versions
    for mine, theirs in zip(micro_batches(batch, 64), micro_batches(expected, 64), strict=True):
        np.testing.assert_array_equal(mine.tokens_T, theirs.tokens_T)
        np.testing.assert_array_equal(mine.targets_M, theirs.targets_M)
        np.testing.assert_array_equal(mine.old_logprobs_M, theirs.old_logprobs_M)
        np.testing.assert_array_equal(batch.advantages[mine.sequence_M], expected.advantages[theirs.sequence_M])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_do_not_stay_open(tmp_path: Path) -> None:
    def open_files() -> int:
        return sum(str(tmp_path) in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())

    store = filled(tmp_path, 5, segment_bytes=SMALL)
    before = open_files()
    for number in range(5, 105):
        store.add(numbered(number))
        store.read([number, number - 1])
    assert num_segments(store) > 5
    assert open_files() == before
    assert len(mapped_ranges(tmp_path)) < 12


# ── for others ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pandas_reads_a_segment(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    filled(tmp_path, 3)
    assert pandas.read_feather(tmp_path / "segment-000000.open.arrow")["group"].tolist() == [0, 0, 1, 1, 2, 2]


def test_duckdb_reads_the_folder(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    import pyarrow.dataset

    filled(tmp_path, 3).close()
    trajectories = pyarrow.dataset.dataset(sorted(tmp_path.glob("segment-*.arrow")), format="ipc")  # noqa: F841
    assert duckdb.sql('SELECT sum("group") FROM trajectories').fetchall() == [(6,)]


def test_datasets_reads_a_segment(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    filled(tmp_path, 3).close()
    files = [str(path) for path in tmp_path.glob("segment-*.arrow")]
    loaded = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["group"] == [0, 0, 1, 1, 2, 2]


def test_the_dataset_of_pyarrow_is_the_folder(tmp_path: Path) -> None:
    import pyarrow.dataset

    filled(tmp_path, 30, segment_bytes=SMALL)
    files = sorted(tmp_path.glob("segment-*.arrow"))
    assert pyarrow.dataset.dataset(files, format="ipc").count_rows() == 60


def test_a_resume_looks_at_every_group_that_may_be_in_another_state_then(tmp_path: Path) -> None:
    """Whatever is left out of the look is, at that version, as it is now."""
    versions = (None, 0, 1, 2, 3)
    rows = [
        GroupRow(number, state, 0, 1.0, oldest_version=newest, newest_version=newest, trained_version=trained, settled_at=2.0)
        for number, (state, newest, trained) in enumerate(itertools.product(GroupState, versions, versions))
        if (trained is None) != (state in (GroupState.TRAINED, GroupState.LEASED))
    ]
    index = GroupIndex(tmp_path)
    index.put(rows)
    for version in range(5):
        looked_at = {row.index for row in index.rows(UNDECIDED, version, version)}
        left_out = [row for row in rows if row.index not in looked_at]
        assert all(_as_of(row, version, is_there=there) == row for row in left_out for there in (False, True))
        assert left_out
    index.close()
