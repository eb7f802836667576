"""Captures of a few events, each with one thing that is easily mistaken for another."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from redline.errors import TraceError
from redline.lab.traces.builder import Builder
from redline.lab.traces.causes import Cause
from redline.lab.traces.diagnosis import Diagnosis, diagnose
from redline.lab.traces.names import class_of, sends, waits
from redline.lab.traces.text import lines_of
from redline.lab.traces.timeline import Kind

STEPS, STEP = 20, 10_000
"""Steps of a capture, and microseconds of each."""
ALL_REDUCE = "ncclDevKernel_AllReduce"
Event = dict[str, Any]


def call(name: str, start: float, length: float, *, kind: str = "user_annotation", pid: Any = 1, tid: int = 1) -> Event:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "pid": pid, "tid": tid, "args": {}}


def launch(start: float, number: int, length: float = 5, pid: Any = 1) -> Event:
    return call("cudaLaunchKernel", start, length, kind="cuda_runtime", pid=pid) | {"args": {"correlation": number}}


def kernel(name: str, start: float, length: float, number: int, *, stream: int = 7, device: int = 0, pid: Any = 0) -> Event:
    arguments = {"device": device, "stream": stream, "correlation": number}
    return call(name, start, length, kind="kernel", pid=pid, tid=stream) | {"args": arguments}


def write(path: Path, events: list[Event], **head: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **head, "traceEvents": events}))
    return path


def held_up(name: str, *, kind: str = "user_annotation") -> list[Event]:
    """A device that works for 1.9 ms of each step, and waits while its thread is in a call of this name."""
    found = []
    for step in range(STEPS):
        at = step * STEP
        found += [call(name, at, 8000, kind=kind), launch(at + 8010, step + 1), kernel("gemm", at + 8020, 1900, step + 1)]
    return found


def late_rank(late: int, *, pid: Any = 1, device_pid: Any = 0, device: int = 0, first: int = 1, at: float = 0) -> list[Event]:
    """A rank that meets others in an all-reduce, and comes so much later than they do."""
    found = []
    jitter = random.Random(str(at))
    for step in range(STEPS):
        at += STEP + jitter.gauss(0, 5)
        found += [
            call("pickle.dumps" if late else "prepare", at, 300 + late, pid=pid),
            launch(at + 400 + late, step + first, pid=pid),
            kernel(ALL_REDUCE, at + 420 + late, 9080 - late, step + first, device=device, pid=device_pid),
        ]
    return found


def first_cause(diagnosis: Diagnosis, engine: int = 0) -> Cause:
    return diagnosis.engines[engine].causes[0]


def test_two_engines_of_one_file_stay_two_and_no_clock_is_moved(tmp_path: Path) -> None:
    events = []
    for engine, at in (("DP00", 0), ("DP01", 3333)):
        for rank in ("TP00", "TP01"):
            name = f"{engine}-{rank}"
            late = 8000 if name == "DP01-TP00" else 0
            events += late_rank(late, pid=f"[{name}] 100", device_pid=f"[{name}] 0", at=at)
    found = diagnose([write(tmp_path / "merged.json", events)])
    groups = [[found.timeline.processes[p].name for p in one.lost.engine.processes] for one in found.engines]
    assert groups == [["DP00-TP00", "DP00-TP01"], ["DP01-TP00", "DP01-TP01"]]
    assert not [sentence for sentence in found.lacks if "clock" in sentence]
    cause = first_cause(found, engine=1)
    assert (cause.call, found.timeline.processes[cause.process].name) == ("pickle.dumps", "DP01-TP00")


@pytest.mark.parametrize(
    "name", ["aten::select", "aten::broadcast_to", "aten::set_", "<built-in method select of Tensor object at 0x7f>"]
)
def test_an_operation_on_tensors_is_no_message(name: str) -> None:
    assert (class_of(name), waits(name), sends(name)) == (None, False, False)


@pytest.mark.parametrize("name", ["verify_and_accept_tokens", "acquire_kv_blocks", "lock.acquire", "aten::select"])
def test_a_process_that_sends_something_else_is_not_blamed(name: str, tmp_path: Path) -> None:
    helper = []
    for step in range(STEPS):
        at = step * STEP
        helper += [call("make_report", at, 7500, pid=9), call("send_metrics", at + 7500, 400, pid=9)]
    paths = [write(tmp_path / "rank0.json", held_up(name)), write(tmp_path / "helper.json", helper)]
    cause = first_cause(diagnose(paths))
    assert (cause.call, cause.process, cause.hops) == (name, 0, 0)


def test_collectives_on_cpus_that_overlap_count_once(tmp_path: Path) -> None:
    paths = []
    for rank in (0, 1):
        events = []
        for step in range(STEPS):
            for index in range(4):
                ended = step * STEP + 8100 + index * 10
                began = step * STEP + index * 10 + 8000 * rank
                events.append(call("c10d::allreduce_", began, 5, kind="cpu_op"))
                events.append(call("gloo:all_reduce", began, ended - began, tid=2))
        info = {"rank": rank, "world_size": 2}
        paths.append(write(tmp_path / f"rank{rank}.json", events, distributedInfo=info))
    lost = diagnose(paths).engines[0].lost
    assert lost.total == pytest.approx((STEPS - 1) * 8_000_000, rel=0.01)
    assert lost.ranks[0].waiting == pytest.approx((STEPS - 1) * 8_030_000, rel=0.01)
    assert lost.total + lost.short <= lost.window


def test_a_device_that_computes_beside_a_collective_does_not_wait(tmp_path: Path) -> None:
    computes, late = [], []
    for step in range(STEPS):
        at, number = step * STEP, 2 * step + 1
        computes += [launch(at, number), kernel("gemm", at + 10, 9500, number)]
        computes += [launch(at + 6, number + 1), kernel(ALL_REDUCE, at + 20, 9480, number + 1, stream=20)]
        late += [call("load_batch", at, 8900), launch(at + 8950, number), kernel(ALL_REDUCE, at + 9000, 500, number)]
    paths = [write(tmp_path / f"rank{rank}.json", events) for rank, events in enumerate((computes, late))]
    [engine] = diagnose(paths).engines
    assert engine.lost.ranks[0].waiting == 0
    assert engine.lost.total == (STEPS - 1) * 500_000


def test_a_launch_that_takes_long_is_the_cause_itself(tmp_path: Path) -> None:
    events = []
    for step in range(STEPS):
        at = step * STEP
        events += [call("aten::mm", at, 9100, kind="cpu_op"), launch(at + 5, step + 1, 9000)]
        events.append(kernel("gemm", at + 9000, 1000, step + 1))
    cause = first_cause(diagnose([write(tmp_path / "rank0.json", events)]))
    assert cause.call == "cudaLaunchKernel"
    assert cause.lost == pytest.approx((STEPS - 1) * 8_995_000, rel=0.01)


def test_each_device_of_a_process_has_its_own_idle_time(tmp_path: Path) -> None:
    events = []
    for step in range(STEPS):
        at, number = step * STEP, 2 * step + 1
        events += [launch(at, number), kernel("gemm", at + 10, 9980, number)]
        events += [launch(at + 5, number + 1), kernel("gemm", at + 20, 100, number + 1, device=1, pid=1)]
    found = diagnose([write(tmp_path / "two.json", events)])
    busy, idle = found.engines[0].lost.ranks
    assert (busy.device, idle.device) == (0, 1)
    assert idle.idle > 50 * busy.idle
    assert [line for line in lines_of(found) if "on GPU 1: device idle 99%" in line]


def test_an_empty_file_in_a_folder_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", late_rank(8000 if rank == 1 else 0))
    (tmp_path / "rank3.json.gz").write_bytes(b"")
    (tmp_path / "metrics.json").write_text('{"loss": 1}')
    found = diagnose([tmp_path])
    assert [sentence for sentence in found.lacks if "left out" in sentence] == [
        "rank3.json.gz: it is empty or damaged, and was left out."
    ]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "rank0.json.gz").write_bytes(b"")
    with pytest.raises(TraceError, match=r"rank0\.json\.gz cannot be read"):
        diagnose([tmp_path / "only"])


def test_processes_that_were_merged_by_their_ids_are_told_apart(tmp_path: Path) -> None:
    events = late_rank(0, pid=100) + late_rank(8000, pid=200, device=1, device_pid=1, first=1000)
    found = diagnose([write(tmp_path / "merged.json", events)])
    cause = first_cause(found)
    assert [process.pid for process in found.timeline.processes] == [100, 200]
    assert found.engines[0].lost.engine.processes == (0, 1)
    assert (cause.call, cause.process) == ("pickle.dumps", 1)


def test_a_file_that_is_given_by_two_names_is_read_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", late_rank(8000 * rank))
    (tmp_path / "folder").mkdir()
    found = diagnose([tmp_path, tmp_path / "folder" / ".." / "rank1.json"])
    assert len(found.timeline.processes) == 2


def test_numbers_of_thousands_of_digits_and_endless_lists_are_damage(tmp_path: Path) -> None:
    text = json.dumps({"schemaVersion": 1, "traceEvents": held_up("sample")})
    long, deep = tmp_path / "long.json", tmp_path / "deep.json"
    long.write_text(text.replace('"ts": 10000,', f'"ts": {"1" * 5000},', 1))
    deep.write_text(text[:-2] + ', {"ph": "X", "args": ' + "[" * 200_000 + "]" * 200_000 + "}]}")
    for path in (long, deep):
        found = diagnose([path])
        assert f"{path.name}: 1 events are no JSON, and were left out." in found.lacks
        assert first_cause(found).call == "sample"


def test_a_job_of_millions_of_ranks_names_a_few_of_the_missing(tmp_path: Path) -> None:
    info = {"rank": 0, "world_size": 60_000_000}
    found = diagnose([write(tmp_path / "rank0.json", held_up("sample"), distributedInfo=info)])
    [sentence] = [sentence for sentence in found.lacks if "missing" in sentence]
    assert sentence.startswith("Ranks are missing: 1, 2, 3,")
    assert "32 and more." in sentence


def test_characters_that_a_terminal_would_obey_are_escaped(tmp_path: Path) -> None:
    text = "\n".join(lines_of(diagnose([write(tmp_path / "rank0.json", held_up("evil\x1b[31m\u202e"))])))
    assert "\x1b" not in text
    assert "`evil\\x1b[31m\\u202e`" in text


NSYS = """
CREATE TABLE StringIds(id, value); CREATE TABLE ThreadNames(nameId, globalTid); CREATE TABLE PROCESSES(globalPid, name);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME(start, end, globalTid, nameId, correlationId);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, deviceId, streamId, correlationId, shortName, globalPid);
CREATE TABLE NVTX_EVENTS(start, end, globalTid, text, eventType); CREATE TABLE DIAGNOSTIC_EVENT(severity, text);
CREATE TABLE TARGET_INFO_SESSION_START_TIME(utcEpochNs);
"""


@pytest.mark.parametrize("odd", ["text", b"bytes", None, 1.5, -(2**63), 2**63 - 1])
def test_rows_of_other_types_are_left_out_of_an_export(odd: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    process = 5 << 24
    with sqlite3.connect(path) as database:
        database.executescript(NSYS)
        database.execute("INSERT INTO StringIds VALUES (1, ?)", (b"cudaLaunchKernel",))
        for step in range(10):
            at = step * 10_000_000
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, 1, ?)", (at, at + 5000, process + 7, step)
            )
            row = (at + 9_000_000, at + 9_900_000, step, process)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, 1, ?)", row)
        for table in ("StringIds", "ThreadNames", "PROCESSES", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL",
                      "NVTX_EVENTS", "DIAGNOSTIC_EVENT", "TARGET_INFO_SESSION_START_TIME"):  # fmt: skip
            columns = len(database.execute(f"PRAGMA table_info({table})").fetchall())
            for place in range(columns):  # every column by itself, then all
                row = [0 if other != place else odd for other in range(columns)]
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", row)
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", [odd] * columns)
    database.close()
    found = diagnose([path])
    assert list(lines_of(found))
    assert [sentence for sentence in found.lacks if "were left out" in sentence]


def test_where_short_launches_were_left_out_the_thread_that_makes_them_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations of 20 µs are most of a capture: calls of 5 µs go first when memory is bounded."""
    events = held_up("pickle.dumps")
    for step in range(STEPS):
        events += [call(f"aten::op{place}", step * STEP + 8100 + 25 * place, 20, kind="cpu_op") for place in range(40)]
    events.sort(key=lambda event: event["ts"])
    path = write(tmp_path / "rank0.json", events)
    monkeypatch.setattr("redline.lab.traces.read.Builder", lambda: Builder(most_ranges=300))
    bounded = diagnose([path])
    assert any("were left out, to bound memory" in sentence for sentence in bounded.lacks)
    assert not (bounded.timeline.ranges.kind == Kind.RUNTIME).any()
    assert first_cause(bounded).call == "pickle.dumps"
    assert first_cause(bounded).lost == pytest.approx((STEPS - 1) * 8_000_000, rel=0.02)
