from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from redline.telemetry import Recorder, TraceWriter, recording, span
from redline.telemetry.ledger import Ledger
from redline.telemetry.processes import (
    SPANS_VARIABLE,
    Clock,
    ClockOffset,
    ProcessRecord,
    RecordedSpan,
    _SpanFile,
    expecting_processes,
    keep_offset,
    measure_offset,
    read_processes,
    recording_process,
    with_processes,
)

WORKER = """
import sys, time
from redline.telemetry import span
from redline.telemetry.processes import recording_process
with recording_process("rewards"):
    with span("reward.score", version=3):
        time.sleep(0.01)
    print("scored", flush=True)
    if sys.argv[1:] == ["hang"]:
        time.sleep(600)
"""


def worker(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True)


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def test_a_workers_spans_are_in_the_trace_on_the_runs_own_clock(tmp_path: Path) -> None:
    with recording(Recorder()) as recorder, expecting_processes(tmp_path / "spans"), span("wait.for_rewards", version=3):
        assert worker().communicate()[0] == "scored\n"
    assert SPANS_VARIABLE not in os.environ
    [process] = read_processes(tmp_path / "spans")
    assert process.clock.offset_ns == 0
    assert process.clock.how == "the same machine, the same clock"
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.write(recorder.drain())
        trace.write_process(process)
    found = events(tmp_path / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {1: "redline", 2: "rewards"}
    waited, scored = (next(e for e in found if e["name"] == name) for name in ("wait.for_rewards", "reward.score"))
    assert (waited["pid"], scored["pid"]) == (1, 2)
    assert waited["args"]["version"] == scored["args"]["version"] == 3
    assert waited["ts"] < scored["ts"]
    assert scored["ts"] + scored["dur"] < waited["ts"] + waited["dur"]
    assert scored["dur"] >= 10_000


def test_a_workers_lanes_join_the_runs_ledger_and_add_up(tmp_path: Path) -> None:
    with expecting_processes(tmp_path):
        worker().communicate()
    [process] = read_processes(tmp_path)
    ledger = with_processes(Recorder().ledger(), [process])
    lane = ledger.lanes[f"rewards-{process.os_pid}/main"]
    assert lane.rows["reward.score"] >= 10_000_000
    assert sum(lane.rows.values()) + lane.unaccounted_ns == lane.wall_ns
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_process_that_has_the_id_of_another_machines_process_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        with recording_process("rewards", tmp_path), span("reward.score"):
            pass
    records = list(read_processes(tmp_path))
    assert [record.file for record in records] == [f"rewards-{os.getpid()}-2.jsonl", f"rewards-{os.getpid()}.jsonl"]
    assert len(with_processes(Recorder().ledger(), records).lanes) == 1 + sum(len(record.lanes()) for record in records)


def test_what_a_killed_worker_wrote_is_kept(tmp_path: Path) -> None:
    with expecting_processes(tmp_path):
        process = worker("hang")
    assert process.stdout is not None
    assert process.stdout.readline() == "scored\n"
    file = tmp_path / f"rewards-{process.pid}.jsonl"
    deadline = time.monotonic() + 60
    while b"reward.score" not in file.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with file.open("ab") as torn:
        torn.write(b'{"lane":"main","na')
    [record] = read_processes(tmp_path)
    assert record.ledger is None
    assert [each.name for each in record.spans] == ["reward.score"]
    [lane] = record.lanes().values()
    assert lane.rows.keys() == {"reward.score"}


def test_a_resumed_run_adds_each_worker_once(tmp_path: Path) -> None:
    with expecting_processes(tmp_path / "spans"):
        worker().communicate()
    for _ in range(2):
        with TraceWriter(tmp_path / "trace.json") as trace:
            for process in read_processes(tmp_path / "spans"):
                trace.write_process(process)
    found = events(tmp_path / "trace.json")
    names = [(event["pid"], event["args"]["name"]) for event in found if event["name"] == "process_name"]
    assert names == [(1, "redline"), (2, "rewards"), (3, "redline (resumed, 3)")]
    assert sum(event["name"] == "reward.score" for event in found) == 1


def test_outside_a_run_a_worker_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SPANS_VARIABLE, raising=False)
    with recording_process("rewards") as recorder, span("reward.score"):
        assert recorder is None


def write_far_away(folder: Path, *, boot: str, ahead_ns: int, here: Clock) -> Path:
    """A worker whose clock is `ahead_ns` ahead of ours, on a machine whose time of day agrees with ours."""
    header = {"process": "far", "os_pid": 7, "boot": boot, "spans_ns": here.spans_ns + ahead_ns, "wall_ns": here.wall_ns}
    row = {
        "lane": "main",
        "name": "reward.score",
        "start_ns": here.spans_ns + ahead_ns + 5,
        "end_ns": here.spans_ns + ahead_ns + 9,
    }
    path = folder / "far-7.jsonl"
    path.write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n")
    return path


def test_a_worker_on_another_machine_is_put_on_our_clock_by_the_time_of_day(tmp_path: Path) -> None:
    here = Clock.here()
    write_far_away(tmp_path, boot="another", ahead_ns=10**15, here=here)
    [process] = read_processes(tmp_path, here)
    assert process.clock.how == "the time of day on both machines"
    assert (process.spans[0].start_ns, process.spans[0].end_ns) == (here.spans_ns + 5, here.spans_ns + 9)


def test_a_measured_offset_goes_before_any_other(tmp_path: Path) -> None:
    here = Clock.here()
    path = write_far_away(tmp_path, boot=here.boot, ahead_ns=1_000, here=here)
    keep_offset(path, ClockOffset(1_000, 20, "measured"))
    [process] = read_processes(tmp_path, here)
    assert process.clock == ClockOffset(1_000, 20, "measured")
    assert process.spans[0].start_ns == here.spans_ns + 5


def test_an_offset_is_measured_within_half_of_the_shortest_round_trip() -> None:
    ahead_ns = 123_456_789_000
    delays = iter([0.02, 0.001, 0.01])

    def ask() -> int:
        time.sleep(next(delays))
        answer = time.perf_counter_ns() + ahead_ns
        time.sleep(0.0005)
        return answer

    offset = measure_offset(ask, times=3)
    assert abs(offset.offset_ns - ahead_ns) <= offset.uncertainty_ns


def test_a_workers_file_keeps_its_beginning_and_its_newest_spans_and_the_sums_of_all(tmp_path: Path) -> None:
    path, recorder = tmp_path / "rewards-7.jsonl", Recorder()
    file = _SpanFile(path, "rewards", recorder, max_bytes=20_000)
    for number in range(2000):
        with recorder.span("reward.score", number=number):
            pass
        if number % 10 == 9:
            file._write_spans()
            assert path.stat().st_size < 21_000
    killed = next(read_processes(tmp_path))
    with file:
        pass
    record = next(read_processes(tmp_path))
    numbers = [each.args["number"] for each in record.spans]
    assert numbers[:20] == list(range(20))
    assert numbers[-20:] == list(range(1980, 2000))
    assert record.left_out == 2000 - len(numbers) > 1000
    assert record.ledger is not None
    assert killed.ledger is not None
    [lane] = record.lanes().values()
    assert lane.rows["reward.score"] > sum(each.end_ns - each.start_ns for each in record.spans)
    assert record.os_pid == os.getpid()


def test_what_does_not_fit_beside_the_run_is_left_out_of_the_trace(tmp_path: Path) -> None:
    spans = [RecordedSpan("main", "reward.score", 10 * i, 10 * i + 5, {"number": i}) for i in range(100)]
    process = ProcessRecord("rewards-7.jsonl", "rewards", 7, ClockOffset(0, 0, ""), spans, None, left_out=5)
    with TraceWriter(tmp_path / "trace.json", 1 << 20) as trace:
        assert trace.worker_bytes == 1 << 18
        trace.write_process(process, max_bytes=4000)
    found = events(tmp_path / "trace.json")
    numbers = [event["args"]["number"] for event in found if event["name"] == "reward.score"]
    assert numbers == list(range(100 - len(numbers), 100))
    assert 15 < len(numbers) < 40
    assert found[1]["args"]["spans_left_out"] == 105 - len(numbers)


def test_a_worker_whose_spans_cannot_be_written_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"rewards-{os.getpid()}.jsonl").mkdir()
    with recording_process("rewards", tmp_path), span("reward.score"):
        scored = True
    assert scored
    assert capfd.readouterr().err == f"rewards-{os.getpid()}.jsonl is written no longer: Is a directory\n"
