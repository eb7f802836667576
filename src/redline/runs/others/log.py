"""A log as its file has it: rows under the names of the framework that wrote it, before anything is translated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Kind = Literal["W&B", "TensorBoard", "JSON", "console"]


@dataclass(slots=True, frozen=True)
class Row:
    """Figures that were logged together."""

    values: Mapping[str, float]
    """Name → value, both as the framework has them."""
    step: int | None = None
    """The step that the file gives it; None where it gives none."""
    time: float | None = None
    """When it was logged, in seconds since 1970."""


def is_number(value: Any) -> bool:
    """Whether a value of a log is a figure: a finite number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def from_json(text: str | bytes) -> Any:
    """Return what a text says in JSON; None where it says nothing, or is nested deeper than anybody's log."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Log:
    """One log, read to its end."""

    path: Path
    kind: Kind
    rows: tuple[Row, ...] = ()
    """In the order in which they were written."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run, where the log holds them."""
    samples: tuple[Mapping[str, float], ...] = ()
    """What the machine was doing, by our names, each with its `time`."""
    damage: str = ""
    """What of the file could not be read, in a sentence; empty where all could."""

    @cached_property
    def names(self) -> set[str]:
        """Every name that has a value somewhere."""
        return {name for row in self.rows for name in row.values}
