"""Where a step spends its time and its memory, read at the spans that it opens and closes anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from redline.lab.measure.machine import MemoryMeter, moment, seconds_between, take_peak
from redline.telemetry import Recorder, recording

R = TypeVar("R")
T = TypeVar("T")

PHASES = {
    "trainer.pack": "data",
    "trainer.forward": "forward",
    "trainer.backward": "backward",
    "trainer.optimizer": "optimizer",
    "trainer.other": "other",
}
"""Span → phase."""
OTHER = "other"
"""What a step does between its phases."""


@dataclass(slots=True, frozen=True)
class _Stretch(Generic[R]):
    phase: str
    start: R
    end: R


class _Marks(Generic[R]):
    """A clock for spans whose times are numbers of readings. On CUDA the time of an event is known only once the device is
    there, so that a span can hold no more than which event it was."""

    def __init__(self, read: Callable[[], R]) -> None:
        self._read = read
        self.readings: list[R] = []

    def __call__(self) -> int:
        self.readings.append(self._read())
        return len(self.readings) - 1


def phase_seconds(work: Callable[[], T], device: torch.device) -> tuple[T, dict[str, float]]:
    """What `work` gives, and seconds by phase; by device events on CUDA, where the host only launches."""
    result, stretches = _watched(work, lambda: moment(device))
    seconds = dict.fromkeys(PHASES.values(), 0.0)
    for stretch in stretches:
        seconds[stretch.phase] = seconds.get(stretch.phase, 0.0) + seconds_between(stretch.start, stretch.end)
    return result, seconds


def _watched(work: Callable[[], T], read: Callable[[], R]) -> tuple[T, list[_Stretch[R]]]:
    """The stretches between one reading and the next, each with the phase of the innermost span around it."""
    marks = _Marks(read)
    with recording(Recorder(clock=marks)) as recorder:
        result = work()
        marks()
    owners = [OTHER] * (len(marks.readings) - 1)
    for span in sorted(recorder.drain(), key=lambda span: span.start_ns):  # an inner span starts later and takes over
        phase = PHASES.get(span.name, span.name.removeprefix("trainer."))
        owners[span.start_ns : span.end_ns] = [phase] * (span.end_ns - span.start_ns)
    edges = zip(owners, marks.readings[:-1], marks.readings[1:], strict=True)
    return result, [_Stretch(owner, start, end) for owner, start, end in edges]


def phase_differences(work: Callable[[], object], read: Callable[[], float]) -> dict[str, float]:
    """How far `read` moved on in each phase of `work`."""
    _, stretches = _watched(work, read)
    moved: dict[str, float] = {}
    for stretch in stretches:
        moved[stretch.phase] = moved.get(stretch.phase, 0.0) + stretch.end - stretch.start
    return moved


def phase_peaks(work: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Most bytes at once in each phase of `work`."""
    _, stretches = _watched(work, lambda: take_peak(device))
    peaks: dict[str, int] = {}
    for stretch in stretches:
        peaks[stretch.phase] = max(peaks.get(stretch.phase, 0), stretch.end)
    return peaks


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes at the peak of a step, by kind."""

    weights: int
    """In the compute dtype."""
    optimizer: int
    """Master weights and moments, and whatever else stays from step to step."""
    gradients: int
    """What is held when the optimizer starts, when no activation is left."""
    activations: int
    """The rest of the peak."""

    @property
    def peak(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations

    def as_json(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "optimizer states": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
        }


def memory_by_kind(work: Callable[[], object], meter: MemoryMeter, weights: int, gradients: int = 0) -> Memory:
    """Memory of one step, not the first: the optimizer's states have to be there, and the `gradients` whose memory is kept
    between steps. The meter was made before the weights were."""
    meter.begin_run()
    _, stretches = _watched(work, meter.taken_bytes)
    peak, held = max(meter.peak_bytes(), weights), meter.held_bytes  # small ones may lie in pages that were resident before
    at_optimizer = next(stretch.start for stretch in stretches if stretch.phase == PHASES["trainer.optimizer"])
    optimizer = min(max(0, held - weights - gradients), peak - weights)
    gradients = min(max(0, at_optimizer - held) + gradients, peak - weights - optimizer)
    return Memory(weights, optimizer, gradients, peak - weights - optimizer - gradients)
