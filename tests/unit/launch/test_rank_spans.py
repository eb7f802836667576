"""Spans of ranks that do not see the run folder, through the store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.eventually import eventually

from redline.launch import rank_spans
from redline.launch.rank_spans import AT_ONCE, SENDERS, SpanReader, SpanSender, mark_of, recording_rank, sees, take_spans
from redline.launch.workers import span_copies
from redline.telemetry import span
from redline.telemetry.processes import read_processes


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def rank_0(store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that rank 0 writes spans of others into, while it reads them."""
    monkeypatch.setattr(rank_spans, "EVERY_S", 0.01)
    over = threading.Event()
    take_spans(store, tmp_path / "run" / "spans", over)
    yield tmp_path / "run" / "spans"
    over.set()


def run_folder(path: Path, started: str) -> Path:
    path.mkdir(parents=True)
    (path / "environment.json").write_text(json.dumps({"started": started}))
    return path


def test_spans_of_a_rank_that_does_not_see_the_folder_come_to_rank_0_with_its_clock(
    store: dist.Store, rank_0: Path, tmp_path: Path
) -> None:
    with recording_rank(3, tmp_path / "nowhere", "mark", lambda: store):
        for _ in range(5):
            with span("trainer.forward", version=7):
                pass
    found = list(read_processes(rank_0))
    assert [process.name for process in found] == ["rank-3"]
    assert [(row.name, row.args) for row in found[0].spans] == [("trainer.forward", {"version": 7})] * 5
    assert found[0].ledger is not None, "its last words came, too"
    assert found[0].clock.how == "shortest of several round trips"
    assert abs(found[0].clock.offset_ns) <= found[0].clock.uncertainty_ns + 1_000_000
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_the_same_name_on_another_disk_is_not_the_run_s(store: dist.Store, rank_0: Path, tmp_path: Path) -> None:
    ours, other = run_folder(tmp_path / "ours", "10:00:00"), run_folder(tmp_path / "other", "10:00:01")
    assert sees(ours, mark_of(ours))
    assert not sees(other, mark_of(ours))
    assert not sees(tmp_path / "none", "")
    with recording_rank(1, other, mark_of(ours), lambda: store):
        pass
    assert list(read_processes(rank_0))
    assert not (other / "spans").exists()
    with recording_rank(2, ours, mark_of(ours), lambda: store):
        pass
    assert [process.name for process in read_processes(ours / "spans")] == ["rank-2"]
    assert store.add(SENDERS, 0) == 1, "one that sees the folder sends nothing"


def test_the_store_stays_small_while_rank_0_takes_nothing_and_everything_comes_in_the_end(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_spans, "EVERY_S", 0.01)
    monkeypatch.setattr(span_copies, "MAX_BYTES", 100)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    text = "".join(f'{{"row": {number}}}\n' for number in range(500))
    (there / "rank-1-5.jsonl").write_text(text)
    reader = SpanReader(store, here)
    with SpanSender(there, lambda: store):
        eventually(lambda: store.add(SENDERS, 0) == 1)
        reader.read()
        eventually(lambda: store.check(["spans/1/sent"]) and int(store.get("spans/1/sent")) >= AT_ONCE)
        time.sleep(0.1)
        assert int(store.get("spans/1/sent")) <= 2 * AT_ONCE, "no more than are taken, and so many"

        def is_whole() -> bool:
            reader.read()
            return (here / "rank-1-5.jsonl").read_text() == text

        eventually(is_whole)


def test_a_sender_that_does_not_tell_its_clock_is_left_out_and_the_others_are_read(
    store: dist.Store, rank_0: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_spans, "ANSWER", timedelta(seconds=0.3))
    store.add(SENDERS, 1)
    time.sleep(1.0)
    with recording_rank(2, tmp_path / "nowhere", "mark", lambda: store):
        pass
    assert [process.name for process in read_processes(rank_0)] == ["rank-2"]


def test_ranks_that_stand_still_do_not_cost_the_spans_of_one_that_began_with_them(
    store: dist.Store, rank_0: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_spans, "ANSWER", timedelta(seconds=0.5))
    store.add(SENDERS, 3)
    with recording_rank(4, tmp_path / "nowhere", "mark", lambda: store):
        time.sleep(2.0)
    assert [process.name for process in read_processes(rank_0)] == ["rank-4"]


def test_where_rank_0_is_gone_a_rank_ends_all_the_same(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_spans, "CLOSE_S", 0.2)
    began = time.monotonic()
    with recording_rank(1, tmp_path / "nowhere", "mark", lambda: store):
        pass
    assert time.monotonic() - began < 5


def test_a_machine_without_room_for_spans_records_none_and_goes_on(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_spans.tempfile, "tempdir", str(tmp_path / "gone"))
    with recording_rank(4, tmp_path / "nowhere", "mark", lambda: store) as recorder, span("trainer.forward"):
        assert recorder is None
    assert "spans of rank 4 are not recorded" in capsys.readouterr().err
    assert store.add(SENDERS, 0) == 0
