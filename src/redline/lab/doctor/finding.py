"""What the doctor says: findings with their evidence, what each would gain, and what it cannot tell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from redline.lab.compare.left_out import is_between_steps


@dataclass(slots=True, frozen=True)
class Evidence:
    """One figure that a finding rests on."""

    name: str
    """The metric, span or key as the run's files have it, such as `timeline/reward_s`."""
    value: float | int | str | bool
    says: str
    """What it means here, in a few words."""
    series: tuple[float, ...] = ()
    """The figure step by step, where there is one: what a page draws."""


@dataclass(slots=True, frozen=True)
class Gain:
    """Seconds that a change would save over the steps that were recorded."""

    low_s: float
    likely_s: float
    high_s: float
    assumption: str
    """What must hold for that."""
    of: str
    """The time that it is a part of, such as `generation`: what another finding saves of the same is gone."""
    of_s: float
    """Seconds of that time in all."""

    def scaled(self, factor: float) -> Gain:
        """The same gain, of a part of the time."""
        return replace(self, low_s=self.low_s * factor, likely_s=self.likely_s * factor, high_s=self.high_s * factor)


@dataclass(slots=True, frozen=True)
class Finding:
    """A cause of lost time and its remedy."""

    cause: str
    """A name of `doctor.RULES`."""
    title: str
    """The finding in one sentence."""
    why: str
    """How the time is lost."""
    evidence: tuple[Evidence, ...]
    gain: Gain
    change: Mapping[str, Any]
    """Recipe key → the value to try; empty where the remedy is not a key."""
    advice: str = ""
    """What else to do, or where the remedy is not a key."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The changes as they are written on the command line."""
        return tuple(f"{key}={_written(value)}" for key, value in self.change.items())

    def proof(self, run: str) -> str:
        """The command that measures the change against the run's own recipe; empty where no key of a step is changed."""
        if not self.change or any(map(is_between_steps, self.change)):
            return ""
        side = shlex.quote(run)
        return f"redline compare {side} {side} " + " ".join(f"--b {shlex.quote(override)}" for override in self.overrides)


@dataclass(slots=True, frozen=True)
class Abstention:
    """A cause that the recording can neither show nor exclude."""

    cause: str
    why: str
    """What is missing, and how to record it."""


Answer = Finding | Abstention | None
"""What a rule returns: None where it looked and nothing is lost."""


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
