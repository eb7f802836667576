from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.stored_groups import attempts, filled, numbered, ready_numbers

from redline.buffer.store.repair import _Salvaged, repair
from redline.buffer.store.segments import segment_files
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.errors import RunFolderError
from redline.types import TrajectoryGroup

SMALL = 4000
PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "trajectories"
    path.mkdir(parents=True)
    return path


def tokens_of(store: TrajectoryStore, number: int) -> list[int]:
    return store.read([number]).tokens.tolist()


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << (place % 8)
    path.write_bytes(data)


def refusal(folder: Path) -> str:
    """What opening and resuming the store says."""
    with pytest.raises(RunFolderError) as caught:
        TrajectoryStore(folder).resume(0)
    assert "redline repair" in caught.value.hint
    return caught.value.message


# ── nothing to do ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("closed", [False, True])
def test_what_is_whole_is_left_alone(folder: Path, closed: bool) -> None:
    store = filled(folder, 5)
    if closed:
        store.close()
    before = {path.name: path.read_bytes() for path in folder.glob("segment-*")}
    report = repair(folder)
    assert report.is_healthy
    assert report.num_intact == 5
    assert report.lines == ["nothing to repair: 5 groups, all as they were written"]
    assert {path.name: path.read_bytes() for path in folder.glob("segment-*")} == before
    assert not list(folder.glob("damaged*"))


def test_a_folder_without_trajectories_needs_no_repair(folder: Path) -> None:
    assert repair(folder).is_healthy


# ── a full disk ────────────────────────────────────────────────────────────────────────────────────────────────────────


class FullDiskError(OSError): ...


class FullDisk:
    """Takes so many bytes more, half of what it is given first, and then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._pwrite = os.pwrite

    def __call__(self, file: int, data: Any, place: int) -> int:
        size = min(len(data), self.room)
        if not size or (place < 2 * PAGE and size < len(data)):  # of a page that is there, all is replaced or nothing
            raise FullDiskError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        return self._pwrite(file, data[:size], place)


@pytest.mark.parametrize("room", [0, 1, 100, 300, 500, 700, 1000, 2000, 6000, 7500, 100_000])
@pytest.mark.parametrize("at_once", [1, 37])
def test_a_full_disk_is_said_and_leaves_the_store_as_it_was(
    folder: Path, room: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(folder, 3, segment_bytes=SMALL)
    store.begin(range(3, 40), 1)
    monkeypatch.setattr(os, "pwrite", FullDisk(room))
    with contextlib.suppress(FullDiskError):
        for first in range(3, 40, at_once):
            store.add(*(numbered(number) for number in range(first, first + at_once)))
    ready = ready_numbers(store)
    assert len(ready) < 40 or room == 100_000
    assert ready == list(range(len(ready))), "a first part of them"
    monkeypatch.undo()
    assert ready_numbers(TrajectoryStore(folder)) == ready
    assert repair(folder).is_healthy
    again = TrajectoryStore(folder, segment_bytes=SMALL)
    for number in again.resume(1):
        again.add(numbered(number))
    assert ready_numbers(again) == list(range(40))
    assert all(tokens_of(again, number)[3] == 100 + number for number in range(40))


def test_the_same_store_goes_on_once_there_is_room_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(folder, 2)
    for room in (0, 50, 200, 400, 600, 1500):
        monkeypatch.setattr(os, "pwrite", FullDisk(room))
        with pytest.raises(OSError, match="No space left"):
            store.add(numbered(2))
        monkeypatch.undo()
    store.add(numbered(2))
    assert store.read([0, 1, 2]).num_runs == 1
    assert TrajectoryStore(folder).resume(0) == []


def test_an_index_without_room_is_a_full_disk_too(folder: Path) -> None:
    store = filled(folder, 2)
    pages = store._index._database.execute("PRAGMA page_count").fetchone()[0]
    store._index._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="No space left") as caught:
        store.begin(range(2, 2000), 0)
    assert caught.value.errno == errno.ENOSPC
    assert store.next_index == 2
    assert TrajectoryStore(folder).next_index == 2


# ── a torn segment ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 31])
def test_a_segment_cut_at_any_byte_gives_back_the_groups_before_the_cut(folder: Path, step: int) -> None:
    """As many as are whole, and never one that is not."""
    store = filled(folder, 6)
    store.add(TrajectoryGroup("last", attempts(), np.zeros(3, dtype=np.float32), 6))
    store.close()
    (whole,) = segment_files(folder)
    expected = {group.index: _rows(group) for group in _Salvaged.of(whole).groups}
    assert len(expected) == 7
    size, counts = whole.path.stat().st_size, []
    for length in [size, *range(size - 1, 0, -step), 0]:
        cut(whole.path, length)
        found = _Salvaged.of(whole)
        assert bool(found.damage) == (length < size)
        assert all(_rows(group) == expected[group.index] for group in found.groups)
        assert [group.index for group in found.groups] == list(range(len(found.groups)))
        counts.append(len(found.groups))
    assert counts == sorted(counts, reverse=True), "what a shorter file has, a longer one has too"
    assert set(counts) >= {7, 0}


def _rows(group: Any) -> list[dict[str, Any]]:
    return group.batch.slice(group.first, group.last - group.first).to_pylist()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_torn_segment_is_refused_and_repaired(folder: Path, is_open: bool) -> None:
    store = filled(folder, 60, segment_bytes=8 * SMALL)
    store.lease(range(4), 0)
    store.trained(range(4), 0)
    if is_open:
        store.flush()
    else:
        store.close()
    (torn,) = segment_files(folder)
    middle = np.array([-0.5, 0, 0, 0, -0.5, -1.0], dtype=np.float32).tobytes()  # logprobs come last
    cut(torn.path, torn.path.read_bytes().rindex(middle) - 700)
    before = torn.path.read_bytes()
    assert "segment-000000" in refusal(folder)

    report = repair(folder)
    assert (folder / "damaged-001" / torn.path.name).read_bytes() == before
    assert not report.index_rebuilt
    assert 0 < report.num_intact < 60
    again = TrajectoryStore(folder)
    attempted = again.resume(1)
    assert attempted == sorted(report.lost) == list(range(60 - len(attempted), 60))
    assert again.counts["trained"] == 4
    for number in ready_numbers(again):
        assert tokens_of(again, number)[3] == 100 + number
    assert repair(folder).is_healthy
    assert any("attempted again" in line for line in report.lines)


def test_a_segment_that_is_gone_takes_its_groups_with_it(folder: Path) -> None:
    store = filled(folder, 40, segment_bytes=SMALL)
    store.close()
    second = segment_files(folder)[1].path
    gone = set(pa.ipc.open_file(second).read_all()["group"].to_pylist())
    second.unlink()
    assert "is missing" in refusal(folder)
    report = repair(folder)
    assert set(report.lost) == gone
    assert set(TrajectoryStore(folder).resume(0)) == gone


def test_a_flipped_bit_costs_one_group(folder: Path) -> None:
    store = filled(folder, 20)
    store.close()
    (segment,) = segment_files(folder)
    place = segment.path.read_bytes().index(np.full(2, 107, dtype=np.int32).tobytes())
    flip(segment.path, place)
    assert "group 7 is not what was written" in refusal(folder)
    report = repair(folder)
    assert (report.num_intact, report.lost, report.num_lost_attempts) == (19, {7: "attempted again"}, 2)
    again = TrajectoryStore(folder)
    assert again.resume(0) == [7]
    again.add(numbered(7))
    assert tokens_of(again, 7)[3] == 107
    assert again.read(range(8, 20)).num_runs == 1


@pytest.mark.slow
def test_a_bit_flipped_anywhere_never_gives_a_group_that_was_not_sampled(folder: Path) -> None:
    store = filled(folder, 6)
    store.close()
    (segment,) = segment_files(folder)
    data = segment.path.read_bytes()
    expected = {group.index: _rows(group) for group in _Salvaged.of(segment).groups}
    for place in range(0, len(data), 11):
        flip(segment.path, place)
        for group in _Salvaged.of(segment).groups:
            found = _rows(group)
            for row, right in zip(found, expected[group.index], strict=True):
                assert row | {"version": -1} == right, "the step that trained on it is not part of the checksum"
        segment.path.write_bytes(data)


# ── a power cut ────────────────────────────────────────────────────────────────────────────────────────────────────────


def flushed_and_more(folder: Path, **settings: Any) -> tuple[TrajectoryStore, bytes]:
    """Groups 0 to 3 are trained on and flushed, as a checkpoint of version 1 does it; 4 to 7 came since, and 4 is trained on.
    Gives the open segment as it was on the disk too."""
    store = filled(folder, 4, **settings)
    store.lease(range(4), 0)
    store.trained(range(4), 0)
    store.flush()
    before = segment_files(folder)[-1].path.read_bytes()
    store.begin(range(4, 8), 1)
    for number in range(4, 8):
        store.add(numbered(number, version=1))
    store.lease([4], 1)
    store.trained([4], 1)
    return store, before


def after_the_cut(folder: Path) -> tuple[TrajectoryStore, list[int], list[str]]:
    """The store as a resumed run opens it, what it attempts again, what it says."""
    told: list[str] = []
    store = TrajectoryStore(folder, tell=told.append)
    return store, store.resume(1), told


def test_a_power_cut_that_took_the_newest_rows_is_mended_when_the_store_is_opened(folder: Path) -> None:
    _, before = flushed_and_more(folder)
    segment_files(folder)[-1].path.write_bytes(before)
    store, again, told = after_the_cut(folder)
    assert again == [4, 5, 6, 7]
    assert store.counts["trained"] == 4
    assert "power cut" in told[0]
    assert any("attempted again: groups 5, 6, 7" in line for line in told)
    for number in again:
        store.add(numbered(number, version=1))
    assert [tokens_of(store, number)[3] for number in range(8)] == [100 + number for number in range(8)]
    store.close()
    assert repair(folder).is_healthy


@pytest.mark.parametrize("what_is_left", [None, b"", b"\0" * 5000])
def test_a_power_cut_that_took_a_whole_new_segment_is_mended(folder: Path, what_is_left: bytes | None) -> None:
    store = filled(folder, 4)
    store.lease(range(4), 0)
    store.trained(range(4), 0)
    store._segments.seal()
    store.flush()
    store.begin([4, 5], 1)
    store.add(numbered(4, version=1), numbered(5, version=1))
    newest = segment_files(folder)[-1].path
    if what_is_left is None:
        newest.unlink()
    else:
        newest.write_bytes(what_is_left)
    again, attempted, _ = after_the_cut(folder)
    assert attempted == [4, 5]
    again.add(numbered(4, version=1), numbered(5, version=1))
    assert tokens_of(again, 5)[3] == 105
    assert tokens_of(again, 2)[3] == 102


@pytest.mark.parametrize("seed", range(12))
def test_whichever_pages_a_power_cut_took_what_a_checkpoint_knows_of_is_there(folder: Path, seed: int) -> None:
    """Pages reach the disk in any order: the head of a segment may be newer than its columns, and the other way round."""
    _, before = flushed_and_more(folder, segment_bytes=64 * SMALL)
    path = segment_files(folder)[-1].path
    after, kept = path.read_bytes(), np.random.default_rng(seed).random(len(before) // PAGE + 1) < 0.5
    pages = range(0, len(before), PAGE)
    path.write_bytes(b"".join((after if kept[p // PAGE] else before)[p : p + PAGE] for p in pages))
    store, again, _ = after_the_cut(folder)
    assert set(again) <= {4, 5, 6, 7}
    assert store.counts["trained"] == 4
    for number in again:
        store.add(numbered(number, version=1))
    assert [tokens_of(store, number)[3] for number in range(8)] == [100 + number for number in range(8)]
    store.close()
    assert repair(folder).is_healthy


def test_damage_to_what_was_flushed_still_asks_for_a_repair(folder: Path) -> None:
    _, before = flushed_and_more(folder)
    path = segment_files(folder)[-1].path
    path.write_bytes(before)
    flip(path, before.index(np.full(2, 102, dtype=np.int32).tobytes()))
    assert "redline repair" in _hint(folder)
    assert not list(folder.glob("damaged-*")), "nothing was changed"
    report = repair(folder)
    assert report.lost == {2: "trained", 4: "trained", 5: "attempted again", 6: "attempted again", 7: "attempted again"}
    assert TrajectoryStore(folder).resume(1) == [4, 5, 6, 7]


def test_an_index_that_does_not_say_what_was_flushed_asks_for_a_repair_which_helps(folder: Path) -> None:
    """One of an earlier version."""
    store, before = flushed_and_more(folder)
    store._index._database.execute("DROP TABLE flushed")
    segment_files(folder)[-1].path.write_bytes(before)
    assert "redline repair" in _hint(folder)
    report = repair(folder)
    assert "has fewer attempts than the index knows of" in report.damage[0]
    assert TrajectoryStore(folder).resume(1) == [4, 5, 6, 7]


def _hint(folder: Path) -> str:
    with pytest.raises(RunFolderError) as caught:
        TrajectoryStore(folder).resume(1)
    return caught.value.hint


# ── another program ────────────────────────────────────────────────────────────────────────────────────────────────────


def locked(folder: Path) -> sqlite3.Connection:
    """Somebody else is writing to the index."""
    other = sqlite3.connect(folder / "index.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    return other


def test_a_lock_of_another_program_is_waited_for(folder: Path) -> None:
    store = filled(folder, 1)
    other = locked(folder)
    timer = threading.Timer(0.3, other.rollback)
    timer.start()
    store.begin([1], 0)
    timer.join()
    assert store.next_index == 2


def test_a_lock_that_is_kept_is_an_error_that_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.buffer.store.index.PATIENCE_S", 0.2)
    store = filled(folder, 1)
    other = locked(folder)
    with pytest.raises(RunFolderError, match=r"index\.sqlite: another program has locked it for more than 0\.2 s") as caught:
        store.begin([1], 0)
    assert "--resume" in caught.value.hint
    other.rollback()
    store.begin([1], 0)
    assert store.next_index == 2


# ── a damaged index ────────────────────────────────────────────────────────────────────────────────────────────────────


def lived(folder: Path) -> TrajectoryStore:
    """Trained at 0 to 2, dropped, ready, and one in flight, of which the index alone knows."""
    store = filled(folder, 30, segment_bytes=SMALL)
    for step in range(3):
        store.lease(range(4 * step, 4 * step + 4), step)
        store.trained(range(4 * step, 4 * step + 4), step)
    store.drop([12, 13], "no_signal")
    store.begin([30], 3)
    return store


@pytest.mark.parametrize("how", ["deleted", "emptied", "overwritten"])
def test_the_index_is_made_again_from_the_segments(folder: Path, how: str) -> None:
    lived(folder).close()
    index = folder / "index.sqlite"
    if how == "deleted":
        index.unlink()
    else:
        index.write_bytes(b"" if how == "emptied" else b"not a database" * 1000)
    refusal(folder)
    report = repair(folder)
    assert report.index_rebuilt
    assert report.num_intact == 30
    again = TrajectoryStore(folder)
    assert again.counts == {"in_flight": 0, "ready": 16, "leased": 0, "trained": 12, "dropped": 2}
    assert again.resume(2) == []
    assert ready_numbers(again) == [8, 9, 10, 11, *range(14, 30)], "trained at step 2, which is taken again, and ready"
    assert again.next_index == 30, "the one in flight is given out once more"
    assert (how == "deleted") != (folder / "damaged-001" / "index.sqlite").exists()


def test_without_index_a_group_that_was_forgotten_does_not_come_back(folder: Path) -> None:
    store = lived(folder)
    store.add(numbered(30, version=5))
    store.resume(3)
    store.close()
    (folder / "index.sqlite").unlink()
    repair(folder)
    again = TrajectoryStore(folder)
    assert (again.counts["in_flight"], again.resume(9)) == (1, [30])


def test_without_index_the_last_attempt_at_a_number_counts(folder: Path) -> None:
    store = filled(folder, 3)
    store.add(numbered(3, version=5))
    store.resume(0)
    store.add(numbered(3, version=0, text="second"))
    store.close()
    (folder / "index.sqlite").unlink()
    repair(folder)
    again = TrajectoryStore(folder)
    assert ready_numbers(again) == [0, 1, 2, 3]
    assert again.ready()[3].versions.newest == 0


def test_without_index_a_gap_is_attempted_again(folder: Path) -> None:
    store = TrajectoryStore(folder)
    store.begin(range(4), 0)
    store.add(numbered(0))
    store.add(numbered(3))
    store.close()
    (folder / "index.sqlite").unlink()
    repair(folder)
    assert TrajectoryStore(folder).resume(0) == [1, 2]


def test_a_bit_flipped_in_the_index_is_noticed_or_changes_nothing(folder: Path) -> None:
    store = lived(folder)
    again, counts, ready = store.resume(9), dict(store.counts), ready_numbers(store)
    store.close()
    index = folder / "index.sqlite"
    data = index.read_bytes()
    noticed = 0
    random = np.random.default_rng(0)
    in_use = np.flatnonzero(np.frombuffer(data, dtype=np.uint8))
    for place in random.choice(in_use, 150, replace=False):
        flip(index, int(place))
        try:
            store = TrajectoryStore(folder)
            assert store.resume(9) == again
        except RunFolderError:
            noticed += 1
        else:
            assert (dict(store.counts), ready_numbers(store)) == (counts, ready)
            store.close()
        for side in ("-wal", "-shm"):
            (folder / f"index.sqlite{side}").unlink(missing_ok=True)
        index.write_bytes(data)
    assert noticed > 75


@pytest.mark.parametrize("column", ["segment", "begun_version", "trained_version", "first_row"])
@pytest.mark.parametrize("value", ["text", b"bytes", 1.5])
def test_what_should_be_a_number_and_is_none_is_noticed(folder: Path, column: str, value: object) -> None:
    lived(folder).close()
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as database, database:
        database.execute(f"UPDATE groups SET {column} = ? WHERE group_index = 5", [value])
    assert "index.sqlite: " in refusal(folder)


def test_damage_to_both_is_repaired_at_once(folder: Path) -> None:
    lived(folder).close()
    first = segment_files(folder)[0].path
    cut(first, first.stat().st_size - 3000)
    (folder / "index.sqlite").write_bytes(b"gone")
    report = repair(folder)
    assert report.index_rebuilt
    assert report.num_intact < 30
    again = TrajectoryStore(folder)
    lost = again.resume(3)
    assert lost == list(range(lost[0], lost[-1] + 1)) if lost else True
    assert sum(again.counts.values()) == 30
    assert repair(folder).is_healthy


def test_every_repair_keeps_its_files_apart(folder: Path) -> None:
    filled(folder, 3).close()
    for _ in range(2):
        (folder / "index.sqlite").write_bytes(b"gone")
        repair(folder)
    assert sorted(path.name for path in folder.glob("damaged-*")) == ["damaged-001", "damaged-002"]
    shutil.rmtree(folder)
