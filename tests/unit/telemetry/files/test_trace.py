from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from redline.telemetry import Recorder, TraceWriter
from redline.telemetry.files.trace import LeftOut, left_out_of
from redline.telemetry.spans import Span


def some_spans() -> list[Span]:
    recorder = Recorder()
    for version in range(3):
        with recorder.span("trainer.step", version=version), recorder.span("trainer.backward"):
            pass
    return recorder.drain()


def lenient_events(content: bytes) -> list[dict[str, Any]]:
    """As trace viewers read: the closing bracket may be missing, and so may the end of the last event."""
    whole = content.rstrip().removesuffix(b"]").rstrip().removesuffix(b",")
    try:
        return json.loads(whole + b"]")
    except ValueError:
        return json.loads(whole[: whole.rindex(b",\n")] + b"]")


def test_a_closed_trace_is_strict_json(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as writer:
        writer.write(some_spans())
        writer.write(some_spans())
    events = json.loads((tmp_path / "trace.json").read_bytes())
    assert [event["ph"] for event in events] == ["M", "M"] + ["X"] * 12
    assert events[1]["args"] == {"name": "main"}
    assert events[3] | {"ts": 0, "dur": 0} == {
        "ph": "X",
        "name": "trainer.step",
        "cat": "trainer",
        "pid": 1,
        "tid": 1,
        "ts": 0,
        "dur": 0,
        "args": {"version": 0},
    }


def test_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    spans = some_spans()
    with TraceWriter(tmp_path / "trace.json") as writer:
        writer.write(spans)
    events = [event for event in json.loads((tmp_path / "trace.json").read_bytes()) if event["ph"] == "X"]
    written = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in events]
    origin = spans[0].start_ns - written[0][0]
    assert written == [(span.start_ns - origin, span.end_ns - span.start_ns) for span in spans]
    assert written[0][0] >= 0


def test_what_was_written_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.write(some_spans())
    assert len(lenient_events((tmp_path / "trace.json").read_bytes())) == 8
    writer.close()


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_a_resumed_run_is_another_process_of_the_same_trace(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "trace.json"
    first = TraceWriter(path)
    first.write(some_spans())
    if ending == "closed":
        first.close()
    with TraceWriter(path) as second:
        second.write(some_spans())
    events = json.loads(path.read_bytes())
    assert [event["pid"] for event in events] == [1] * 8 + [2] * 8
    times = [event["ts"] for event in events if event["ph"] == "X" and event["name"] == "trainer.step"]
    assert times == sorted(times)
    assert len({event["args"]["epoch_ns"] for event in events if event["name"] == "process_name"}) == 1


def test_a_trace_cut_at_any_byte_still_loads_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.write(some_spans())
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with TraceWriter(path) as writer:
            writer.write(some_spans())
        events = json.loads(path.read_bytes())
        survived = len(events) - 8
        assert 0 <= survived <= 8
        assert events[:survived] == json.loads(content)[:survived]
        if survived:
            assert lenient_events(content[:length])[:survived] == events[:survived]


# ── a bound ────────────────────────────────────────────────────────────────────────────────────────────────────────────

BOUND = 40_000


def step_spans(recorder: Recorder, step: int) -> list[Span]:
    for _ in range(9):
        with recorder.span("engine.decode"):
            pass
    with recorder.span("trainer.step", version=step):
        pass
    return recorder.drain()


def write_steps(path: Path, steps: range, recorder: Recorder | None = None) -> None:
    recorder = recorder or Recorder()
    with TraceWriter(path, BOUND) as writer:
        for step in steps:
            writer.write(step_spans(recorder, step))
            writer.bound()
            assert path.stat().st_size <= BOUND


def versions(events: list[dict[str, Any]]) -> list[int]:
    return [event["args"]["version"] for event in events if event["name"] == "trainer.step"]


def test_a_long_trace_keeps_its_beginning_and_its_newest_stretch_and_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_steps(path, range(1000))
    assert path.stat().st_size <= BOUND
    events = json.loads(path.read_bytes())
    kept = versions(events)
    gap = next(i for i in range(1, len(kept)) if kept[i] > kept[i - 1] + 1)
    assert kept == [*range(gap), *range(kept[gap], 1000)]
    assert gap >= 5
    assert 1000 - kept[gap] >= 5
    [bar] = [event for event in events if event["name"] == "left out" and event["ph"] == "X"]
    spans = [event for event in events if event["ph"] == "X" and event["name"] != "left out"]
    assert bar["args"] == {"spans": 10_000 - len(spans), "why": f"telemetry.trace_max_bytes = {BOUND}"}
    missing = [event["ts"] for event in spans if bar["ts"] < event["ts"] < bar["ts"] + bar["dur"]]
    assert missing == []
    assert left_out_of(path) == LeftOut(bar["args"]["spans"], bar["ts"], bar["ts"] + bar["dur"])
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(1, 1): "main", (1, 1_000_000): "left out"}


def test_names_of_lanes_and_processes_that_came_in_the_middle_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for begin in range(0, 1200, 100):
        write_steps(path, range(begin, begin + 100))
    events = json.loads(path.read_bytes())
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["redline", *(f"redline (resumed, {pid})" for pid in range(2, 13))]
    lanes = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= lanes
    assert len({event["args"]["epoch_ns"] for event in events if event["name"] == "process_name"}) == 1
    assert versions(events)[-1] == 1199


def test_a_trace_that_was_bounded_and_then_killed_at_any_byte_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_steps(path, range(300))
    content = path.read_bytes()
    for length in range(len(content) - 300, len(content)):
        path.write_bytes(content[:length])
        write_steps(path, range(300, 302))
        events = json.loads(path.read_bytes())
        assert versions(events)[-2:] == [300, 301]
        assert left_out_of(path) is not None


def test_a_short_trace_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_steps(path, range(10))
    assert versions(json.loads(path.read_bytes())) == list(range(10))
    assert left_out_of(path) is None


def test_a_long_trace_is_continued_without_reading_it(tmp_path: Path) -> None:
    """A hole of 4 GiB, which nobody could read in a moment, between the beginning and the newest event."""
    path = tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        writer.write(some_spans())
    content = path.read_bytes()
    whole = content.removesuffix(b"\n]\n")
    beginning, newest = whole.rsplit(b",\n", 1)
    with path.open("wb") as file:
        file.write(beginning + b",\n")
        file.seek(1 << 32, os.SEEK_CUR)
        file.write(b"\n" + newest)
    before = psutil.Process().io_counters().read_chars
    TraceWriter(path).write(some_spans())
    assert psutil.Process().io_counters().read_chars - before < 1 << 28
    with path.open("rb") as file:
        file.seek(-1500, os.SEEK_END)
        assert b"redline (resumed, 2)" in file.read()


# ── a disk that takes no more ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file of this process may become larger: the kernel refuses, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield 3000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_trace_that_cannot_be_written_is_said_once_and_ends_with_a_whole_event(tmp_path: Path, small_files: int) -> None:
    path, told = tmp_path / "trace.json", list[str]()
    writer = TraceWriter(path, tell=told.append)
    for _ in range(20):
        writer.write(some_spans())
        writer.bound()
    writer.close()
    assert told == ["trace.json is written no longer: File too large; the run goes on"]
    assert 2000 < path.stat().st_size <= small_files
    assert versions(lenient_events(path.read_bytes()))[:3] == [0, 1, 2]
    assert path.read_bytes().endswith(b"}")


def test_a_trace_that_cannot_be_opened_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    told: list[str] = []
    with TraceWriter(tmp_path / "trace.json", BOUND, tell=told.append) as writer:
        writer.write(some_spans())
        writer.bound()
    assert told == ["trace.json is written no longer: Is a directory; the run goes on"]
