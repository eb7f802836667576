"""Our spans and torch's events on one clock.

Three clocks are involved: that of the spans (`perf_counter`), that of `trace.json` (microseconds from its epoch), and torch's
(microseconds from its base time, by the processor's counter). Two marks tie them together: a span whose start is known on the
first is looked up in the second, and short records whose beginning and end are known on the first are looked up in the third.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.telemetry.ledger import UNACCOUNTED
from redline.telemetry.processes import ProcessRecord, RecordedSpan

CLOCK_MARK = "redline.clock"
"""Records that tie torch's clock to ours."""
PROFILE_SPAN = "telemetry.profile"
SPANS_PID = "redline spans"
Event = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Mark:
    """Around one record of torch's, on the clock of the spans."""

    before_ns: int
    after_ns: int


@dataclass(slots=True, frozen=True)
class Window:
    """What was profiled, on the clock of the spans."""

    start_ns: int
    end_ns: int
    trace_from_byte: int
    """Where `trace.json` ended when it began."""


def torch_offset_us(trace: Mapping[str, Any], marks: Sequence[Mark]) -> tuple[float, float] | None:
    """Microseconds to add to a torch event to be on the clock of the spans, and how far off that may be: the tightest mark
    decides."""
    found = sorted((e for e in trace["traceEvents"] if e.get("name") == CLOCK_MARK and "dur" in e), key=lambda e: e["ts"])
    if len(found) != len(marks) or not marks:
        return None
    mark, event = min(zip(marks, found, strict=True), key=lambda pair: pair[0].after_ns - pair[0].before_ns)
    middle_us = (mark.before_ns + mark.after_ns) / 2000
    return middle_us - (event["ts"] + event["dur"] / 2), (mark.after_ns - mark.before_ns) / 2000


def read_spans(path: Path, window: Window, tie: tuple[str, int, int]) -> tuple[list[Event], list[Event]]:
    """Read `trace.json`: names of processes and lanes, and the spans that ended in the window, on the clock of the spans.

    `tie` is (argument, value, start in ns) of the span of ours that ties the clocks.
    """
    names: list[Event] = []
    events: list[Event] = []
    with path.open("rb") as file:
        for line in file:
            if b'"ph":"M"' in line[:40]:
                names.append(json.loads(line.rstrip().rstrip(b",")))
            elif file.tell() > window.trace_from_byte and line.startswith(b"{"):
                events.append(json.loads(line.rstrip().rstrip(b",")))
    key, value, start_ns = tie
    tied = [e for e in events if e["name"] == PROFILE_SPAN and e.get("args", {}).get(key) == value]
    if not tied:
        return names, []
    offset_us = start_ns / 1000 - tied[0]["ts"]
    shifted = [{**event, "ts": event["ts"] + offset_us} for event in events if "ts" in event]
    return names, [e for e in shifted if e["ts"] + e.get("dur", 0.0) >= window.start_ns / 1000]


def worker_events(processes: Iterable[ProcessRecord], window: Window) -> list[Event]:
    """Names and spans of the run's other processes, those that reach into the window."""
    events: list[Event] = []
    for process in processes:
        pid = process.label
        spans = [span for span in process.spans if span.end_ns >= window.start_ns and span.start_ns <= window.end_ns]
        tids = {lane: number for number, lane in enumerate(dict.fromkeys(span.lane for span in spans), 1)}
        events += [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": pid}}] if spans else []
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}} for lane, tid in tids.items()
        ]
        events += [_complete(span, pid, tids[span.lane]) for span in spans]
    return events


def _complete(span: RecordedSpan, pid: str, tid: int) -> Event:
    ts, dur = span.start_ns / 1000, (span.end_ns - span.start_ns) / 1000
    return {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": dict(span.args)}


def merge(names: Iterable[Event], spans: Iterable[Event], torch_events: Iterable[Event], window: Window) -> dict[str, Any]:
    """One document for ui.perfetto.dev, whose clock begins with the window. Our processes keep to themselves: a lane and a
    torch thread are the same thread twice, and a viewer that found them in one row would refuse spans that do not nest."""
    zero_us = window.start_ns / 1000
    events: list[Event] = [
        {**event, "pid": f"{SPANS_PID} {event['pid']}", **({"ts": event["ts"] - zero_us} if "ts" in event else {})}
        for event in (*names, *spans)
    ]
    events += [{**event, "ts": event["ts"] - zero_us} if "ts" in event else event for event in torch_events]
    return {"displayTimeUnit": "ms", "traceEvents": events}


class Owners:
    """The span that has the clock in a lane at a moment: the innermost one."""

    def __init__(self, spans: Iterable[Event]) -> None:
        """The spans of one lane, properly nested."""
        self._starts: list[float] = []
        self._names: list[str] = []
        for start, name in _boundaries(sorted(spans, key=lambda e: (e["ts"], -e["dur"]))):
            self._starts.append(start)
            self._names.append(name)

    def at(self, us: float) -> str:
        index = bisect_right(self._starts, us) - 1
        return self._names[index] if index >= 0 else UNACCOUNTED


def owners_by_lane(names: Iterable[Event], spans: Iterable[Event]) -> dict[str, Owners]:
    """Lane → its owners."""
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    grouped: defaultdict[str, list[Event]] = defaultdict(list)
    for event in spans:
        if event["ph"] == "X":
            grouped[lanes.get((event["pid"], event["tid"]), "")].append(event)
    return {lane: Owners(events) for lane, events in grouped.items()}


def _boundaries(spans: Sequence[Event]) -> Iterator[tuple[float, str]]:
    """(moment, who has the clock from then on), in order."""
    stack: list[tuple[float, str]] = []
    for span in spans:
        while stack and stack[-1][0] <= span["ts"]:
            end, _ = stack.pop()
            yield end, stack[-1][1] if stack else UNACCOUNTED
        yield span["ts"], span["name"]
        stack.append((span["ts"] + span["dur"], span["name"]))
    while stack:
        end, _ = stack.pop()
        yield end, stack[-1][1] if stack else UNACCOUNTED
