"""`redline bench CASE --profile`: what torch did in one more round of a case.

profiles/CASE/
  summary.json   the largest operators and kernels, by the span that called them
  torch.json     torch's own trace, for ui.perfetto.dev

Profiling costs time, so the round comes after the measurement and counts for nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from redline.lab.bench.settings import BenchSettings, MemorySettings, PairedSettings
from redline.telemetry import Recorder, recording, write_json
from redline.telemetry.profiling.summary import Stages, device_operators, host_operators
from redline.telemetry.profiling.timeline import CLOCK_MARK, Event, Mark, Owners, torch_offset_us

NUM_MARKS = 8
"""The first of them pay for what torch does once."""


def one_round(settings: BenchSettings) -> BenchSettings:
    """The same work, once, and warm already."""
    return settings.model_copy(update={"pairs": 1, "warmup_s": 0.0} if isinstance(settings, PairedSettings) else {})


def profile_step_of(settings: MemorySettings) -> None:
    """Tries are processes of their own, which this one cannot look into; here is the first of them."""
    from redline.lab.bench.memory_probe import train

    train(settings, "redline", max(1, settings.first_tokens // settings.tokens))


def profile(work: Callable[[], object], folder: Path, device: torch.device) -> Path:
    """Profile `work` into the folder, which is made. What `work` returns is dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it has no other way to be quiet
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    recorder, marks = Recorder(), list[Mark]()
    config = _ExperimentalConfig(profile_all_threads=True)  # rollouts may have a thread of their own
    started = time.perf_counter()
    with torch.profiler.profile(activities=activities, experimental_config=config) as profiler, recording(recorder):
        for _ in range(NUM_MARKS):
            before_ns = time.perf_counter_ns()
            with torch.profiler.record_function(CLOCK_MARK):
                pass
            marks.append(Mark(before_ns, time.perf_counter_ns()))
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # kernels that are still to run belong to what launched them
    seconds = time.perf_counter() - started
    path = folder / "torch.json"
    profiler.export_chrome_trace(str(path))
    write_json(folder / "summary.json", {"seconds": seconds, **_summary(json.loads(path.read_text()), recorder, marks)})
    return folder


def _summary(trace: dict[str, Any], recorder: Recorder, marks: list[Mark]) -> dict[str, Any]:
    """A case that keeps a recorder of its own tells this one nothing, and its operators belong to no stage."""
    tied = torch_offset_us(trace, marks)
    spans: dict[str, list[Event]] = {}
    for span in recorder.drain():
        at = {"ts": span.start_ns / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3, "name": span.name}
        spans.setdefault(span.lane, []).append(at)
    lanes = {lane.native_id: lane.name for lane in recorder.lane_states() if lane.native_id is not None}
    stages = Stages({lane: Owners(events) for lane, events in spans.items()} if tied else {}, lanes)
    offset_us = tied[0] if tied else 0.0
    events = [{**event, "ts": event["ts"] + offset_us} if "ts" in event else event for event in trace["traceEvents"]]
    host, device = host_operators(events, stages), device_operators(events, stages)
    return {
        "operators": host.largest(),
        "kernels": device.largest(),
        "by_stage": host.by_stage(),
        "kernels_by_stage": device.by_stage(),
    }
