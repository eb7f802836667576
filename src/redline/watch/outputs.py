"""Where a run writes, and whom it tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from redline.telemetry import Progress, Recorder, RunFolder
from redline.telemetry.listeners import Listeners


@dataclass(slots=True, frozen=True)
class Outputs:
    """What every part of a watch writes to. `launch` opens these and closes them again."""

    folder: RunFolder
    recorder: Recorder
    """Keeps the time of every lane."""
    progress: Progress
    """The console."""
    listeners: Listeners = field(default_factory=Listeners)
    """Sinks and alerts: they hear of every row."""
