"""The trajectories of a run, read: groups from an index back, and the tokens of their attempts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fakes import trajectory
from support.stored_groups import filled, numbered

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.errors import RunFolderError
from redline.runs.stored import StoredRun


def test_groups_come_from_the_newest_back_or_from_before_one_of_them(tmp_path: Path) -> None:
    filled(tmp_path / "trajectories", 5).close()
    stored = StoredRun(tmp_path)
    assert [group.index for group in stored.newest()] == [4, 3, 2, 1, 0]
    assert [group.index for group in stored.newest(before=2)] == [1, 0]


def test_groups_of_the_policy_that_began_them_are_there_whatever_became_of_them(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    store.begin([0, 1], 4)
    store.begin([2, 3], 6)
    for number in range(3):
        store.add(numbered(number))
    store.drop([1], "no_signal")
    store.close()
    stored = StoredRun(tmp_path)
    assert stored.sampled_steps() == [5, 7]
    assert [group.index for group in stored.sampled(5)] == [0, 1]
    assert [group.index for group in stored.sampled(7)] == [2]
    assert stored.trained_steps() == []


def test_texts_are_the_tokens_of_every_attempt_with_what_the_policy_sampled_of_them(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    store.begin([0, 1], 0)
    store.add(numbered(0))
    group = numbered(1)
    group.trajectories[1] = trajectory([7, 8], [9, 10, 11])
    store.add(group)
    store.close()
    (_, [short, _]), (found, texts) = StoredRun(tmp_path).texts(StoredRun(tmp_path).groups())
    assert (short.task_id, short.token_ids.tolist()) == ("task/0", [10, 11, 12, 100])
    assert found.index == 1
    assert texts[1].token_ids.tolist() == [7, 8, 9, 10, 11]
    assert [(turn["start"], turn["end"], turn["finish_reason"]) for turn in texts[1].turns] == [(2, 5, "stop")]


def test_texts_of_a_damaged_segment_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "trajectories", 3).close()
    [segment] = (tmp_path / "trajectories").glob("segment-*.arrow")
    written = bytearray(segment.read_bytes())
    place = written.rindex((101).to_bytes(4, "little") * 2)
    written[place] ^= 1
    segment.write_bytes(written)
    stored = StoredRun(tmp_path)
    with pytest.raises(RunFolderError, match="the trajectories are damaged"):
        list(stored.texts(stored.groups()))
