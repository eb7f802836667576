"""Incomplete captures are named, and files that are none are refused."""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from support import kineto_files, nsys_files
from support.late_launches import MS, Recorded, Scenario

from redline.errors import TraceError
from redline.lab.traces.causes import UNRECORDED
from redline.lab.traces.diagnosis import Diagnosis, diagnose
from redline.lab.traces.read import is_trace, read


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Scenario(engines=1, steps=12).record()


def lacks(diagnosis: Diagnosis) -> str:
    return "\n".join(diagnosis.lacks)


def lost_of(diagnosis: Diagnosis, call: str) -> int:
    return sum(cause.lost for cause in diagnosis.engines[0].causes if cause.call == call)


def test_a_complete_capture_lacks_nothing(recorded: Recorded, tmp_path: Path) -> None:
    assert lacks(diagnose(kineto_files.write_ranks(recorded, tmp_path))) == ""
    assert lacks(diagnose([nsys_files.write(recorded, tmp_path / "report.sqlite")])) == ""


def test_a_missing_rank_is_named(recorded: Recorded, tmp_path: Path) -> None:
    found = diagnose(kineto_files.write_ranks(recorded, tmp_path)[:3])
    assert "Ranks are missing: 3." in lacks(found)
    assert "rank 0 … rank 2" in found.verdict


def test_the_sender_that_was_not_recorded_is_not_invented(recorded: Recorded, tmp_path: Path) -> None:
    found = diagnose(kineto_files.write_ranks(recorded, tmp_path)[1:])
    assert "Ranks are missing: 0." in lacks(found)
    assert lost_of(found, "pickle.dumps") == 0
    assert lost_of(found, "zmq.recv") > 0


def test_a_truncated_file_is_named_and_what_is_there_is_used(recorded: Recorded, tmp_path: Path) -> None:
    path = kineto_files.write_ranks(recorded, tmp_path)[3]
    path.write_bytes(path.read_bytes()[:-9000])
    found = diagnose([tmp_path])
    assert f"{path.name}: the file ends in the middle" in lacks(found)
    assert lost_of(found, "pickle.dumps") > 0


def test_a_file_of_a_folder_that_ends_before_its_events_is_named_and_the_others_are_used(
    recorded: Recorded, tmp_path: Path
) -> None:
    path = kineto_files.write_ranks(recorded, tmp_path)[3]
    path.write_text('{"schemaVersion": 1, "deviceProperties": [')
    found = diagnose([tmp_path])
    assert f"{path.name}: it was left out: it has no traceEvents." in lacks(found)
    assert lost_of(found, "pickle.dumps") > 0
    with pytest.raises(TraceError, match="no traceEvents"):
        diagnose([path])


def test_a_clock_that_is_ahead_is_named_and_corrected(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "apart").mkdir()
    same = diagnose(kineto_files.write_ranks(recorded, tmp_path / "same"))
    apart = diagnose(kineto_files.write_ranks(recorded, tmp_path / "apart", ahead={3: 40 * MS, 1: -7 * MS}))
    assert "The clock of rank 3 is 40.0 ms ahead of that of rank 0" in lacks(apart)
    assert "The clock of rank 1 is 7.0 ms behind that of rank 0" in lacks(apart)
    for call in ("pickle.dumps", "pickle.loads"):
        assert lost_of(apart, call) == pytest.approx(lost_of(same, call), rel=0.02)


def test_a_capture_without_calls_is_named_and_blames_nobody(recorded: Recorded, tmp_path: Path) -> None:
    found = diagnose([nsys_files.write(recorded, tmp_path / "report.sqlite", without=("calls",))])
    assert "no calls into CUDA" in lacks(found)
    assert {cause.kind for cause in found.engines[0].causes} == {UNRECORDED}
    assert found.engines[0].lost.total > 0


def test_a_capture_without_device_work_is_named(recorded: Recorded, tmp_path: Path) -> None:
    found = diagnose([nsys_files.write(recorded, tmp_path / "report.sqlite", without=("device",))])
    assert "There is no device work" in lacks(found)
    assert found.verdict.startswith("Nothing can be said")


def test_launches_whose_replays_were_not_recorded_are_counted(recorded: Recorded, tmp_path: Path) -> None:
    half = replace(recorded, kernels=[kernel for kernel in recorded.kernels if kernel.correlation < 160])
    found = diagnose([nsys_files.write(half, tmp_path / "report.sqlite")])
    assert "24 of 48 launches of CUDA graphs have no device work" in lacks(found)


def test_what_nsys_says_it_dropped_is_repeated(recorded: Recorded, tmp_path: Path) -> None:
    path = nsys_files.write(recorded, tmp_path / "report.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 2, 3, 2, 'CUDA device 3: events were dropped.', NULL)")
        database.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 2, 3, 1, 'Process was launched.', NULL)")
    database.close()
    assert lacks(diagnose([path])) == "report.sqlite: nsys says: CUDA device 3: events were dropped."


def test_a_thread_that_recorded_little_is_bounded_and_the_rest_is_said(recorded: Recorded, tmp_path: Path) -> None:
    paths = kineto_files.write_ranks(recorded, tmp_path)
    whole, bounded = read(paths), read(paths, most_ranges=120)
    assert len(whole.ranges) > 2 * len(bounded.ranges)
    assert len(bounded.ranges) < 120
    assert any("were left out, to bound memory" in sentence for sentence in bounded.lacks)
    assert sum(name.startswith("cudaGraphLaunch") for name in bounded.names) == 1


def test_a_folder_of_traces_is_told_from_a_run(recorded: Recorded, tmp_path: Path) -> None:
    kineto_files.write_ranks(recorded, tmp_path)
    assert is_trace(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_trace(tmp_path)
    assert not is_trace(tmp_path / "nowhere")


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        diagnose([path])
    assert caught.value.hint
    return caught.value.message


def test_what_is_neither_is_refused_with_the_reason(tmp_path: Path) -> None:
    def file(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    assert "no such file" in refused(tmp_path / "none.json")
    assert "empty" in refused(file("empty.json", b""))
    assert "neither JSON nor SQLite" in refused(file("trace.pb", b"\x0a\x1b\x08\x01perfetto"))
    assert "no traceEvents" in refused(file("metrics.json", json.dumps({"loss": 1}).encode()))
    assert "no events with a length" in refused(file("nothing.json", b'{"traceEvents": []}'))
    assert "only nsys reads" in refused(file("report.nsys-rep", b"NVIDIA"))
    assert "damaged gzip" in refused(file("half.json.gz", b"\x1f\x8b\x08"))
    (tmp_path / "folder").mkdir()
    assert "no traces in this folder" in refused(tmp_path / "folder")


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    database.close()
    assert "no export of nsys" in refused(path)
    path.write_bytes(path.read_bytes()[:600] + b"\x00" * 4000)
    assert "damaged" in refused(path) or "no export" in refused(path)


def test_a_database_whose_damage_is_in_a_name_is_refused(tmp_path: Path) -> None:
    """SQLite names the damaged table, in bytes that are no text."""
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    database.close()
    path.write_bytes(path.read_bytes().replace(b"users", b"us\xffrs").replace(b"CREATE TABLE", b"CREATE \xffABLE"))
    assert "damaged" in refused(path)


def test_a_file_may_have_any_name(recorded: Recorded, tmp_path: Path) -> None:
    path = nsys_files.write(recorded, tmp_path / "report.sqlite")
    odd = path.rename(tmp_path / os.fsdecode(b"100%41 of #1?\xff.sqlite"))
    assert lacks(diagnose([odd])) == ""


@pytest.mark.parametrize(("times", "by", "words"), [(1, -5 * MS, "before"), (1000, 0, "after")])
def test_devices_whose_times_do_not_fit_their_threads_are_named_and_nobody_is_blamed(
    recorded: Recorded, tmp_path: Path, times: int, by: int, words: str
) -> None:
    """A clock that was never lined up, and nanoseconds where microseconds belong."""
    moved = [replace(each, start=times * each.start + by, end=times * each.end + by) for each in recorded.kernels]
    found = diagnose(kineto_files.write_ranks(replace(recorded, kernels=moved), tmp_path))
    assert lacks(found).count(f"{words} the calls that launched it: devices and threads have different clocks") == 4
    assert {cause.call for engine in found.engines for cause in engine.causes} == {""}
    assert {cause.kind for engine in found.engines for cause in engine.causes} == {UNRECORDED}
