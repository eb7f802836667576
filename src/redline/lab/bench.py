"""A case and its settings → a measurement → the document and the table."""

from __future__ import annotations

import torch
from rich.console import Console

from redline.lab.cases import e2e, generate, memory, n_sampling, serialize, trainer
from redline.lab.document import Document, Measured
from redline.lab.machine import device_name
from redline.lab.settings import (
    BenchSettings,
    E2ESettings,
    GenerateSettings,
    MemorySettings,
    NSamplingSettings,
    SerializeSettings,
    TrainerSettings,
    as_recipe,
)
from redline.lab.table import render
from redline.launch import prepare_process

LOG_WIDTH = 160


def bench(case: str, settings: BenchSettings, console: Console | None = None) -> Document:
    """Measure, and show a person the outcome on stderr."""
    console = console or _console()
    prepare_process(as_recipe(settings))
    document = Document.of(case, device_name(torch.device(settings.device)), _measure(settings, console))
    console.print(render(document))
    return document


def _measure(settings: BenchSettings, console: Console) -> Measured:
    if isinstance(settings, GenerateSettings):
        return generate.measure(settings, console)
    if isinstance(settings, NSamplingSettings):
        return n_sampling.measure(settings, console)
    if isinstance(settings, TrainerSettings):
        return trainer.measure(settings, console)
    if isinstance(settings, MemorySettings):
        return memory.measure(settings, console)
    if isinstance(settings, SerializeSettings):
        return serialize.measure(settings, console)
    if isinstance(settings, E2ESettings):
        return e2e.measure(settings, console)
    raise AssertionError(settings)


def _console() -> Console:
    """A log has no width to wrap to; a terminal has its own."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=LOG_WIDTH)
