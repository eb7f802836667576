"""A run that may begin. Importing this file loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redline.config import Resolved
from redline.launch.placement import Placement
from redline.telemetry import RunFolder

if TYPE_CHECKING:
    from redline.launch.preflight import LoadedTasks


@dataclass(slots=True, frozen=True)
class CheckedRun:
    """A run in which nothing is wrong, as far as can be known without its weights."""

    resolved: Resolved
    placement: Placement
    """What runs where."""
    tasks: LoadedTasks
    folder: RunFolder | None
    """The folder of a run that goes on; None for a new one, which gets its folder when it is trained."""
    given: Path
    """`run.folder` as the recipe has it: what messages call the place of a new run."""
