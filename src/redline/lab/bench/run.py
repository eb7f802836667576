"""A case and its settings → a measurement → the document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from redline.kernels.cpu.compiled import tell_why_none, why_none
from redline.lab.bench import profiled
from redline.lab.bench.cases import (
    e2e,
    e2e_against,
    generate,
    memory,
    n_sampling,
    rollout,
    rollout_switches,
    serialize,
    telemetry,
    trainer,
    transfer,
    weight_sync,
)
from redline.lab.bench.settings import (
    BenchSettings,
    E2ESettings,
    GenerateSettings,
    MemorySettings,
    NSamplingSettings,
    RolloutSettings,
    SerializeSettings,
    TelemetrySettings,
    TrainerSettings,
    TransferSettings,
    WeightSyncSettings,
    as_recipe,
)
from redline.lab.evidence.document import Document, Measured
from redline.lab.measure.machine import device_name
from redline.launch.process import prepare_process


def bench(case: str, settings: BenchSettings, console: Console, profile: Path | None = None) -> Document:
    """Measure a case and return its document; progress goes to `console`. With a folder in `profile`, run once more for a
    profile in there."""
    prepare_process(as_recipe(settings))
    device = torch.device(settings.device)
    document = _with_what_was_missing(Document.of(case, device_name(device), _measure(settings, console)))
    tell_why_none(lambda text: console.print(text, soft_wrap=True))
    if profile is not None:
        folder = profile / "profiles" / Path(document.file_name).stem
        console.print(f"profile: {profiled.profile(_once_more(settings), folder, device)}", soft_wrap=True)
    return document


def _with_what_was_missing(document: Document) -> Document:
    """A figure that was measured without the functions in C says so."""
    why = why_none()
    return replace(document, identity={**document.identity, "without_c": why}) if why else document


def _once_more(settings: BenchSettings) -> Callable[[], object]:
    if isinstance(settings, MemorySettings):
        return lambda: profiled.profile_step_of(settings)
    return lambda: _measure(profiled.one_round(settings), Console(quiet=True))


def _measure(settings: BenchSettings, console: Console) -> Measured:
    if isinstance(settings, GenerateSettings):
        return generate.measure(settings, console)
    if isinstance(settings, NSamplingSettings):
        return n_sampling.measure(settings, console)
    if isinstance(settings, RolloutSettings):
        return rollout_switches.measure(settings, console) if settings.environment else rollout.measure(settings, console)
    if isinstance(settings, TrainerSettings):
        return trainer.measure(settings, console)
    if isinstance(settings, E2ESettings):
        return e2e_against.measure(settings, console) if settings.against else e2e.measure(settings, console)
    if isinstance(settings, WeightSyncSettings):
        return weight_sync.measure(settings, console)
    if isinstance(settings, MemorySettings):
        return memory.measure(settings, console)
    if isinstance(settings, TransferSettings):
        return transfer.measure(settings, console)
    if isinstance(settings, SerializeSettings):
        return serialize.measure(settings, console)
    if isinstance(settings, TelemetrySettings):
        return telemetry.measure(settings, console)
    raise AssertionError(settings)
