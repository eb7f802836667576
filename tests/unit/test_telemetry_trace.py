from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.telemetry import Recorder, TraceWriter
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
