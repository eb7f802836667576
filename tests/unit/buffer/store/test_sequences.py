"""Attempts of several sequences and roles in the store, and what was stored when every attempt was a single one."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.paths import ROOT
from support.played_groups import played
from support.stored_groups import attempts, numbered, ready_numbers

from redline.buffer.store.columns import SCHEMA, SECONDS
from redline.buffer.store.index import GroupIndex, GroupRow, index_files
from redline.buffer.store.repair import repair
from redline.buffer.store.segments import segment_files
from redline.buffer.store.stored_groups import StoredGroups, pack_stored
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.runs.stored import StoredRun
from redline.types import TrajectoryGroup

RECORDED = ROOT / "tests" / "unit" / "buffer" / "store" / "recorded" / "first_columns"
"""Trajectories of an earlier version: groups 0 to 2 trained at version 4, 3 ready, 4 dropped, 5 in flight."""


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run's folder with them."""
    shutil.copytree(RECORDED, tmp_path / "trajectories")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_game_comes_back_as_it_was_played(tmp_path: Path) -> None:
    given = played(7, version=3)
    store = TrajectoryStore(tmp_path)
    store.add(given)
    store.close()
    [found] = TrajectoryStore(tmp_path).arrived_after(0)
    assert [len(own) for own in found.attempts] == [3, 3, 3, 3]
    for mine, theirs in zip(found.trajectories, given.trajectories, strict=True):
        for name in ("attempt", "role", "truncated", "retries", "score_s", "reward", "reward_parts"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert (mine.failure is None) == (theirs.failure is None)
        for turn, said in zip(mine.turns, theirs.turns, strict=True):
            assert list(turn.switches) == list(said.switches)
            for name in ("start", "end", "versions", "finish_reason", "tool_calls", "problem"):
                assert getattr(turn, name) == getattr(said, name) or (name, [*said.tool_calls]) == (
                    "tool_calls",
                    turn.tool_calls,
                )
            assert [getattr(turn, name) for name in SECONDS] == pytest.approx([getattr(said, name) for name in SECONDS])


def test_index_counts_attempts_and_rewards_once_and_knows_the_rows_of_a_game(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.add(numbered(0), played(1), numbered(2))
    assert store.read([0, 1, 2]).group_offsets.tolist() == [0, 2, 14, 16]
    store.close()
    index = GroupIndex(tmp_path, "ro")
    rows = {row.index: row for row in index.rows()}
    index.close()
    assert [(row.num_attempts, row.num_sequences, row.num_rows) for row in rows.values()] == [
        (2, None, 2),
        (4, 12, 12),
        (2, None, 2),
    ]
    assert rows[1].reward == pytest.approx(played().reward)


def test_index_that_is_made_again_from_the_segments_says_the_same_of_a_game(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.add(numbered(0), played(1), played(2))
    store.close()
    before = _rows(tmp_path)
    for path in index_files(tmp_path):
        path.unlink()
    assert repair(tmp_path).index_rebuilt
    for old, new in zip(before, _rows(tmp_path), strict=True):
        for name in ("index", "num_attempts", "num_sequences", "num_tokens", "has_signal", "first_row"):
            assert getattr(old, name) == getattr(new, name)
        assert old.reward == pytest.approx(new.reward)


def _rows(folder: Path) -> list[GroupRow]:
    index = GroupIndex(folder, "ro")
    rows = list(index.rows())
    index.close()
    return rows


def test_open_segment_that_a_kill_left_with_a_game_is_taken_in(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.begin([0, 1], 0)
    store.add(played(0))
    store._index.put([GroupRow(0, store._rows[0].state.IN_FLIGHT, 0, 0.0)])  # as if it had died before the index knew
    store._index.close()
    again = TrajectoryStore(tmp_path)
    assert ready_numbers(again) == [0]
    assert again.read([0]).group_offsets.tolist() == [0, 12]


def test_batch_counts_sequences_in_its_means_and_knows_the_attempts(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.add(played(0), numbered(1))
    batch = pack_stored(store.read([0, 1]), 0, keep_no_signal=True)
    assert batch.group_sequences.tolist() == [9, 2]
    assert (batch.num_sequences_sampled, batch.num_attempts_sampled) == (11, 5)
    assert not batch.loss_mask[batch.cu_seqlens[9] : batch.cu_seqlens[12]].any(), "the attempt that failed"


def test_single_turns_take_a_few_percent_more_than_before(tmp_path: Path) -> None:
    """Bytes of the columns, as they lie in a segment; the head comes once per 16 MiB."""
    store = TrajectoryStore(tmp_path)
    store.add(*(numbered(number, [0.5] * 8, text="x" * 120) for number in range(40)))
    store.close()
    [file] = segment_files(tmp_path)
    batch = pa.ipc.open_file(file.path).get_batch(0)
    new = {"sequence", "role", "truncated", "retries", "score_s"}
    added = sum(batch.column(name).nbytes for name in new) / batch.num_rows
    turns = batch.column("turns").nbytes / batch.num_rows
    assert added + turns - 36 < 40, "a turn of an earlier version took 36 bytes"


# ── files of an earlier version ────────────────────────────────────────────────────────────────────────────────────────


def test_trajectories_of_an_earlier_version_are_shown_as_they_were(earlier: Path) -> None:
    table = StoredRun(earlier).table()
    assert table["attempt"].to_pylist() == [0, 1] * 3 + [0, 1, 2, 0, 1] == table["sequence"].to_pylist()
    assert set(table["role"].to_pylist()) == {""}
    assert table["state"].to_pylist() == ["trained"] * 6 + ["ready"] * 3 + ["dropped"] * 2
    [(_, rows)] = list(StoredRun(earlier).attempts(StoredRun(earlier).groups(index=3)))
    assert rows is not None
    assert [[(t["start"], t["end"], t["oldest_version"]) for t in row["turns"]] for row in rows] == [
        [(2, 5, 6)],
        [(2, 3, 5), (4, 5, 5)],
        [(1, 3, 6)],
    ]
    assert rows[1]["turns"][0]["decode_s"] is None
    assert [row["text"] for row in rows] == [attempt.text for attempt in attempts()]


@pytest.mark.parametrize("is_open", [False, True])
def test_run_of_an_earlier_version_goes_on_in_new_segments(earlier: Path, is_open: bool) -> None:
    folder = earlier / "trajectories"
    if is_open:  # as a kill leaves it
        (folder / "segment-000000.arrow").rename(folder / "segment-000000.open.arrow")
    store = TrajectoryStore(folder)
    assert (store.resume(5), ready_numbers(store)) == ([3, 5], [])
    store.add(played(3), numbered(5, version=5))
    store.lease([3, 5], 5)
    store.trained([3, 5], 5)
    found = store.read([0, 3, 5])
    assert isinstance(found, StoredGroups)
    assert found.group_offsets.tolist() == [0, 2, 14, 16]
    assert [group.index for group in store.arrived_after(0)] == [0, 1, 2, 4, 3, 5]
    store.close()
    assert [pa.ipc.open_file(file.path).schema.equals(SCHEMA) for file in segment_files(folder)] == [False, True]
    assert StoredRun(earlier).table().num_rows == 8 + 14
    assert repair(folder).is_healthy


def test_index_in_which_groups_had_numbers_is_shown_as_it_is_and_renamed_by_a_run_that_goes_on(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.add(numbered(0), played(1), numbered(2))
    store.close()
    before = _rows(tmp_path)
    path = tmp_path / "index.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE groups RENAME COLUMN group_index TO number")
    assert _rows(tmp_path) == before
    assert ready_numbers(TrajectoryStore(tmp_path)) == [0, 1, 2]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT group_index FROM groups").fetchall() == [(0,), (1,), (2,)]


def test_cut_segment_of_an_earlier_version_is_repaired(earlier: Path) -> None:
    folder = earlier / "trajectories"
    path = folder / "segment-000000.arrow"
    path.write_bytes(path.read_bytes()[:-1760])
    report = repair(folder)
    assert report.damage
    assert 0 < report.num_intact < 5
    assert repair(folder).is_healthy
    assert StoredRun(earlier).table().num_rows > 0


def test_group_with_two_attempts_of_one_sequence_and_one_of_two_has_all_rows(tmp_path: Path) -> None:
    game = played().trajectories
    mixed = TrajectoryGroup("mixed", [*game[:2], game[3], game[6]], np.ones(4, dtype=np.float32))
    store = TrajectoryStore(tmp_path)
    store.add(mixed)
    assert len(store.read([0]).advantages) == 4
    assert store.read([0]).attempts.tolist() == [0, 0, 1, 2]
