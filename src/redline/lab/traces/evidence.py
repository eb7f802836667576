"""Cuts the timeline to the evidence of a cause: one typical stall, with what every rank's device and CPU did around it."""

from __future__ import annotations

from typing import Any

import numpy as np

from redline.lab.traces.causes import Cause
from redline.lab.traces.diagnosis import ADVICE, Diagnosis, EngineFindings
from redline.lab.traces.names import is_collective
from redline.lab.traces.stalls import Stall
from redline.lab.traces.text import growth_of, title_of, walk_of
from redline.lab.traces.timeline import Kind, Timeline, Work

AROUND = 0.35
"""Share of the stall that is shown before and after it."""
MOST_LANES = 8
MOST_PIECES = 400
"""Pieces of a lane that a page holds; the longest are kept."""
DEEPEST = 6
CAUSES_DRAWN = 4


def document_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return everything that the page of a capture shows."""
    found = diagnosis.as_json()
    for engine, shown in zip(diagnosis.engines, found["engines"], strict=True):
        for place, (cause, drawn) in enumerate(zip(engine.causes, shown["causes"], strict=True)):
            drawn["title"], drawn["walk"] = title_of(diagnosis, cause), walk_of(diagnosis, cause)
            drawn["grows"] = growth_of(cause) if cause.growth else ""
            drawn["advice"] = ADVICE[cause.kind]
            if place < CAUSES_DRAWN:
                drawn["timeline"] = cut(diagnosis, engine, cause)
    return {"kind": "trace", **found}


def cut(diagnosis: Diagnosis, engine: EngineFindings, cause: Cause) -> dict[str, Any]:
    """Return the timeline around a stall of this cause that is as long as most."""
    stall = sorted(cause.stalls, key=lambda one: one.length)[len(cause.stalls) // 2]
    margin = int(AROUND * stall.length)
    start, end = max(0, stall.start - margin), stall.end + margin
    lanes: list[dict[str, Any]] = []
    for process in shown_processes(engine, cause, stall):
        name = diagnosis.label(process)
        if device := _device(diagnosis.timeline, process, start, end):
            lanes.append({"name": name, "what": "device", **device})
        thread = _thread(diagnosis.timeline, process, stall, start, end)
        if thread >= 0:
            lanes.append({"name": name, "what": "CPU", **_calls(diagnosis.timeline, thread, start, end, cause)})
    return {"start_s": start / 1e9, "end_s": end / 1e9, "stall": [stall.start / 1e9, stall.end / 1e9], "lanes": lanes}


def shown_processes(engine: EngineFindings, cause: Cause, stall: Stall) -> list[int]:
    """Return the processes that are drawn: the late one and the one of the call first, then others of the engine."""
    first = [stall.process, cause.process]
    return sorted(list(dict.fromkeys([*first, *engine.lost.engine.processes]))[:MOST_LANES])


def _device(timeline: Timeline, process: int, start: int, end: int) -> dict[str, Any] | None:
    work = timeline.work
    if not len(work):
        return None
    rows = np.flatnonzero((timeline.work_process == process) & (work.start < end) & (work.end > start))
    if not (timeline.work_process == process).any():
        return None
    kept, left_out = _longest(rows, work.end - work.start)
    pieces = []
    for row in kept:
        name = timeline.names[work.name[row]]
        kind = "collective" if is_collective(name) else "copy" if work.kind[row] == Work.COPY else "kernel"
        pieces.append([*_clipped(work.start[row], work.end[row], start, end), 0, kind, name])
    return {"pieces": pieces, "left_out": left_out, "depth": 1}


def _thread(timeline: Timeline, process: int, stall: Stall, start: int, end: int) -> int:
    """Return the thread of a process that is drawn: the late one, or the one that does most in this stretch."""
    if process == stall.process and stall.thread >= 0:
        return stall.thread
    ranges = timeline.ranges
    rows = np.flatnonzero((timeline.range_process == process) & (ranges.start < end) & (ranges.end > start))
    if not len(rows):
        return -1
    threads, counts = np.unique(ranges.thread[rows], return_counts=True)
    return int(threads[np.argmax(counts)])


def _calls(timeline: Timeline, thread: int, start: int, end: int, cause: Cause) -> dict[str, Any]:
    """Return the ranges of a thread, each with how deep it is."""
    ranges = timeline.ranges
    rows = np.flatnonzero((ranges.thread == thread) & (ranges.start < end) & (ranges.end > start))
    depths, stack = {}, list[int]()
    for row in rows.tolist():
        while stack and ranges.end[stack[-1]] <= ranges.start[row]:
            stack.pop()
        depths[row] = len(stack)
        stack.append(row)
    rows = np.array([row for row in rows.tolist() if depths[row] < DEEPEST], int)
    kept, left_out = _longest(rows, ranges.end - ranges.start)
    is_cause = timeline.threads[thread].process == cause.process
    pieces = []
    for row in kept:
        name = timeline.names[ranges.name[row]]
        kind = "cause" if is_cause and name == cause.call else "launch" if ranges.kind[row] == Kind.RUNTIME else "call"
        pieces.append([*_clipped(ranges.start[row], ranges.end[row], start, end), depths[row], kind, name])
    return {"pieces": pieces, "left_out": left_out, "depth": 1 + max((piece[2] for piece in pieces), default=0)}


def _longest(rows: np.ndarray, length: np.ndarray) -> tuple[list[int], int]:
    """Return the longest rows in their order, and how many are left out."""
    kept = np.sort(rows[np.argsort(-length[rows], kind="stable")][:MOST_PIECES])
    return kept.tolist(), len(rows) - len(kept)


def _clipped(start: int, end: int, low: int, high: int) -> tuple[float, float]:
    return max(int(start), low) / 1e9, min(int(end), high) / 1e9
