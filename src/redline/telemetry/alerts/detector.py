"""What a detector is: it sees rows, samples and the clock, and says when something is wrong that was not wrong before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redline.config.sections.alerts import AlertKind
from redline.telemetry.stalls.activity import Activity

Row = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Finding:
    """What an alert says."""

    seen: str
    """With the numbers."""
    since: str
    """A step, or a moment in words."""
    look_at: str
    """What to do next."""


class Detector:
    """Sees everything and says nothing; a subclass looks at what it knows about."""

    kind: ClassVar[AlertKind]

    def step(self, row: Row) -> Finding | None:
        """A row of `metrics.jsonl`."""
        return None

    def evaluation(self, row: Row) -> Finding | None:
        """A row of `evaluations.jsonl`."""
        return None

    def sample(self, row: Row) -> Finding | None:
        """A row of `samples.jsonl`."""
        return None

    def tick(self, now: Activity) -> Finding | None:
        """About once a second, whatever the run does."""
        return None

    def end_of_step(self, now: Activity) -> Finding | None:
        """Right after `step`: what the lanes have been at up to here belongs to it."""
        return None


class Episode:
    """Says once that something began, however long it lasts: after `enter` bad sightings in a row, and again only after `leave`
    good ones."""

    def __init__(self, enter: int = 1, leave: int = 3) -> None:
        self._enter = enter
        self._leave = leave
        self._in_a_row = 0
        """Sightings that speak for a change."""
        self.is_on = False
        self.since: Any = None
        """What was given with the first bad sighting."""

    def see(self, bad: bool, at: Any = None) -> bool:
        """True when an episode begins."""
        if bad == self.is_on:
            self._in_a_row = 0
            return False
        if bad and self._in_a_row == 0:
            self.since = at
        self._in_a_row += 1
        if self._in_a_row < (self._enter if bad else self._leave):
            return False
        self.is_on, self._in_a_row = bad, 0
        return bad


def number(row: Row, key: str) -> float | None:
    """A value that can be computed with; None where there is none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None
