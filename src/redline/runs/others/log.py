"""A log as its file has it: rows under the names of the framework that wrote it, before anything is translated."""

from __future__ import annotations

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
