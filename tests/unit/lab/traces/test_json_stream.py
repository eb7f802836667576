from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from redline.errors import TraceError
from redline.lab.traces import json_stream
from redline.lab.traces.json_stream import EventStream

EVENTS = [
    {"ph": "X", "name": f"aten::ümläut {i} \u2192 }}, {{", "ts": i + 0.125, "dur": 1, "args": {"Input Dims": [[i, 2], []]}}
    for i in range(300)
]
WHOLE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0}],
    "baseTimeNanoseconds": 17,
    "traceEvents": EVENTS,
    "traceName": "x",
}


def written(folder: Path, text: str, packed: bool = False) -> Path:
    path = folder / "trace.json"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def read(path: Path) -> tuple[list[dict[str, Any]], EventStream]:
    stream = EventStream(path)
    return list(stream.events()), stream


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_events_are_those_of_the_document_wherever_a_piece_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, packed: bool, indent: int | None
) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    found, stream = read(written(tmp_path, json.dumps(WHOLE, indent=indent, ensure_ascii=False), packed))
    assert found == EVENTS
    assert stream.head == {key: value for key, value in WHOLE.items() if key != "traceEvents"}
    assert not stream.is_truncated


def test_a_list_of_events_without_a_document_is_read(tmp_path: Path) -> None:
    found, stream = read(written(tmp_path, json.dumps(EVENTS)))
    assert found == EVENTS
    assert not stream.is_truncated


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_ends_in_an_event_gives_the_events_before_it_and_says_so(tmp_path: Path, packed: bool) -> None:
    text = json.dumps(WHOLE)
    found, stream = read(written(tmp_path, text[: len(text) // 2], packed))
    assert found == EVENTS[: len(found)]
    assert 100 < len(found) < 200
    assert stream.is_truncated


def test_a_gzip_file_that_was_cut_gives_what_is_there_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(WHOLE), packed=True)
    path.write_bytes(path.read_bytes()[:-400])
    found, stream = read(path)
    assert found == EVENTS[: len(found)]
    assert stream.is_truncated


def test_an_event_that_is_no_json_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"ph": "X", "name": f"kernel {i} " + 300 * "x"}) for i in range(600)]
    lines[3] = '{"ph": "X", "name": unquoted}'
    found, stream = read(written(tmp_path, '{"traceEvents": [' + ",\n".join(lines) + "]}"))
    assert [event["name"].split()[1] for event in found] == [str(i) for i in range(600) if i != 3]
    assert stream.num_damaged == 1


@pytest.mark.parametrize("text", ["", "   ", "not json", "3", '{"traceEvents": [1, 2]}', "{1: 2}"])
def test_what_is_no_trace_is_refused_with_a_hint(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="export_chrome_trace"):
        read(written(tmp_path, text))
