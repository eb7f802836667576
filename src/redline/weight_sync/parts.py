"""The parts of an update, by the names of their spans: what each took is in the row of the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redline.telemetry import span

PARTS = ("gather", "convert", "serialise", "transfer", "load", "verify", "resume")
"""In the order in which they happen. `gather` puts tensors together that several ranks hold; `convert` makes names, types and
layout those of the engine; `serialise` packs them; `load` and `verify` of engines in other processes are those of the slowest
one, and lie within the trainer's `transfer`; `resume` is the exchange, with the probe. A transport leaves out those that it
does not have."""


@contextmanager
def timed(part: str, parts: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to a part of an update, and record its span."""
    assert part in PARTS
    began = time.perf_counter()
    with span(f"weight_sync.{part}"):
        yield
    parts[part] = parts.get(part, 0.0) + time.perf_counter() - began
