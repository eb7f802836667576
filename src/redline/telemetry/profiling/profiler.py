"""Profiles steps: those that the recipe names, and those that a running job is asked for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.config.schema import Config
from redline.errors import boundary
from redline.ports import Trainer
from redline.telemetry.files.durable import replace_file, write_json
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.processes import FLUSH_S, read_processes
from redline.telemetry.profiling.flame import FlameGraph
from redline.telemetry.profiling.request import ProfileRequest, step_folder, take
from redline.telemetry.profiling.summary import Stages, device_operators, host_operators
from redline.telemetry.profiling.timeline import (
    CLOCK_MARK,
    PROFILE_SPAN,
    Event,
    Mark,
    Window,
    merge,
    owners_by_lane,
    read_spans,
    torch_offset_us,
    worker_events,
)
from redline.telemetry.spans import Recorder
from redline.types import StepReport, TrainBatch, WeightSet

if TYPE_CHECKING:
    import torch

NUM_MARKS = 8
"""The first of them pay for what torch does once."""
MEMORY_EVENTS = 200_000
"""Allocations that a memory snapshot remembers."""


@dataclass(slots=True)
class _Profile:
    """A step that is being profiled."""

    step: int
    request: ProfileRequest
    folder: Path
    flame: FlameGraph
    tie_ns: int
    """Start of the span that ties the clock of `trace.json` to that of the spans."""
    trace_from_byte: int
    torch: torch.profiler.profile | None = None
    marks: list[Mark] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0
    notes: list[str] = field(default_factory=list)


class StepProfiler:
    """Told by the watch when a step begins and ends, and by the trainer when it works."""

    def __init__(
        self, folder: RunFolder, config: Config, recorder: Recorder, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self._folder = folder
        self._recorder = recorder
        self._tell = tell
        self._trace = config.telemetry.trace
        self._on_cuda = config.run.device == "cuda"
        self._beside = config.buffer.max_lag > 0
        """Rollouts run beside the trainer, in threads of their own."""
        settings = config.telemetry
        self._planned: dict[int, ProfileRequest] = {}
        if what := settings.profile.what:
            for step in settings.profile.steps:
                self._planned[step] = ProfileRequest(what, 1, "recipe")
        self._always_nvtx = self._on_cuda and (settings.nvtx == "on" or (settings.nvtx == "auto" and _under_nsight()))
        self._nvtx = settings.nvtx != "off" and self._on_cuda
        self._now: _Profile | None = None
        self._show_ranges(self._always_nvtx)

    # ── told what happens ──────────────────────────────────────────────────────────────────────────────────────────────

    def step_begins(self, step: int) -> None:
        with boundary() as caught:  # the request cannot be taken away where nothing can be written
            if asked := take(self._folder):
                self._planned |= {step + i: asked for i in range(asked.steps)}
        if request := self._planned.pop(step, None):
            with boundary() as caught:
                self._begin(step, request)
            if caught.error is not None:
                self._give_up(caught.error)

    def trainer_begins(self) -> None:
        if self._now and self._now.request.what == "trainer":
            self._start_torch(self._now)
        elif self._now and self._now.request.what == "rollout" and not self._beside:
            self._stop_torch(self._now)

    def trainer_ends(self) -> None:
        if self._now and self._now.request.what == "trainer":
            self._stop_torch(self._now)

    def step_ends(self) -> None:
        """Call it when the spans of the step are in `trace.json`."""
        self._finish()

    def close(self) -> None:
        self._finish()
        self._show_ranges(False)

    def around(self, trainer: Trainer) -> ProfiledTrainer:
        """The trainer as the loop may use it."""
        return ProfiledTrainer(trainer, self)

    # ── one profile ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, step: int, request: ProfileRequest) -> None:
        folder = step_folder(self._folder, step)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "request.json", request.as_json())
        self._tell(f"profiling step {step} ({request.what}) into {folder}")
        mark = self._recorder.span(PROFILE_SPAN, step=step)
        trace = self._folder.trace
        with mark:
            flame = FlameGraph(folder / "flame.svg")
            self._now = profile = _Profile(
                step, request, folder, flame, mark.start_ns, trace.stat().st_size if trace.exists() else 0
            )
            self._show_ranges(self._nvtx)
            if self._on_cuda:
                _record_memory(MEMORY_EVENTS)
            flame.start()
            if request.what != "trainer":
                self._start_torch(profile)

    def _start_torch(self, profile: _Profile) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it has no other way to be quiet
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        every_thread = self._beside and profile.request.what != "trainer"
        profile.torch = torch.profiler.profile(
            activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=every_thread)
        )
        profile.torch.start()
        profile.start_ns = time.perf_counter_ns()
        for _ in range(NUM_MARKS):
            before_ns = time.perf_counter_ns()
            with torch.profiler.record_function(CLOCK_MARK):
                pass
            profile.marks.append(Mark(before_ns, time.perf_counter_ns()))

    def _stop_torch(self, profile: _Profile) -> None:
        if profile.torch is None or profile.end_ns:
            return
        if self._on_cuda:
            import torch

            torch.cuda.synchronize()  # kernels that are still to run belong to what launched them
        profile.end_ns = time.perf_counter_ns()
        profile.torch.stop()

    def _finish(self) -> None:
        profile, self._now = self._now, None
        if profile is None:
            return
        self._show_ranges(self._always_nvtx)
        with self._recorder.span("telemetry.write_profile", step=profile.step), boundary() as caught:
            profile.flame.stop()
            self._stop_torch(profile)
            self._write(profile)
        if caught.error is not None:
            self._tell(f"the profile of step {profile.step} failed: {type(caught.error).__name__}: {caught.error}")
        else:
            self._tell(f"profiled step {profile.step}: {profile.folder}/timeline.json opens in ui.perfetto.dev")

    def _give_up(self, error: Exception) -> None:
        step = self._now.step if self._now else 0
        if self._now:
            self._now.flame.stop()
        self._now = None
        self._show_ranges(self._always_nvtx)
        self._tell(f"step {step} is not profiled: {type(error).__name__}: {error}")

    def _write(self, profile: _Profile) -> None:
        if self._on_cuda:
            _write_memory(profile.folder / "memory.pickle")
        window = Window(profile.start_ns or profile.tie_ns, profile.end_ns or time.perf_counter_ns(), profile.trace_from_byte)
        names, spans = self._spans(profile, window)
        others = self._worker_events(window)
        events, clock = self._torch_events(profile)
        replace_file(profile.folder / "timeline.json", json.dumps(merge(names, [*spans, *others], events, window)).encode())
        if profile.flame.note:
            profile.notes.append(profile.flame.note)
        stages = Stages(owners_by_lane(names, spans), self._lanes())
        host, device = host_operators(events, stages), device_operators(events, stages)
        document = {
            "step": profile.step,
            "what": profile.request.what,
            "seconds": (window.end_ns - window.start_ns) / 1e9,
            "clock_error_us": clock,
            "operators": host.largest(),
            "kernels": device.largest(),
            "by_stage": host.by_stage(),
            "kernels_by_stage": device.by_stage(),
            "files": sorted(path.name for path in profile.folder.iterdir() if path.name != "summary.json"),
            "notes": profile.notes,
        }
        write_json(profile.folder / "summary.json", document)

    def _spans(self, profile: _Profile, window: Window) -> tuple[list[Event], list[Event]]:
        if not self._trace:
            profile.notes.append("no spans in timeline.json: telemetry.trace_max_bytes is 0")
            return [], []
        names, spans = read_spans(self._folder.trace, window, ("step", profile.step, profile.tie_ns))
        if not spans:
            profile.notes.append("no spans in timeline.json: trace.json has none of this step")
        return names, spans

    def _worker_events(self, window: Window) -> list[Event]:
        if not self._folder.spans.is_dir():
            return []
        time.sleep(1.2 * FLUSH_S)  # workers write down what they did once a second
        return worker_events(read_processes(self._folder.spans), window)

    def _torch_events(self, profile: _Profile) -> tuple[list[Event], float | None]:
        """On the clock of the spans, and how far off that may be."""
        if profile.torch is None:
            profile.notes.append("no trace of torch: the step had nothing of what was asked for")
            return [], None
        path = profile.folder / "torch.json"
        profile.torch.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
        tied = torch_offset_us(trace, profile.marks)
        if tied is None:
            profile.notes.append("torch's events are not in timeline.json: its clock could not be tied to ours")
            return [], None
        offset_us, error_us = tied
        events = trace["traceEvents"]
        if profile.request.what == "rollout" and self._beside:
            beside = {thread for thread, lane in self._lanes().items() if lane != "main"}
            events = [event for event in events if event.get("cat") != "cpu_op" or event["tid"] in beside]
        return [{**event, "ts": event["ts"] + offset_us} if "ts" in event else event for event in events], error_us

    def _lanes(self) -> dict[int, str]:
        """The kernel's number of a thread → its lane."""
        return {lane.native_id: lane.name for lane in self._recorder.lane_states() if lane.native_id is not None}

    def _show_ranges(self, on: bool) -> None:
        if self._nvtx:
            from redline.telemetry.profiling.nvtx import show_spans

            show_spans(on)


class ProfiledTrainer:
    """Says when a step of the trainer begins and ends. Implements `ports.Trainer`."""

    def __init__(self, trainer: Trainer, profiler: StepProfiler) -> None:
        self._trainer = trainer
        self._profiler = profiler

    @property
    def version(self) -> int:
        return self._trainer.version

    def step(self, batch: TrainBatch) -> StepReport:
        self._profiler.trainer_begins()
        report = self._trainer.step(batch)
        self._profiler.trainer_ends()
        return report

    def weights(self) -> WeightSet:
        return self._trainer.weights()

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def load(self, folder: Path) -> None:
        self._trainer.load(folder)

    def flush(self) -> None:
        self._trainer.flush()


def _under_nsight() -> bool:
    from redline.telemetry.profiling.nvtx import started_by_nsight

    return started_by_nsight()


def _record_memory(max_entries: int) -> None:
    import torch

    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def _write_memory(path: Path) -> None:
    """And stop recording."""
    import torch

    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
