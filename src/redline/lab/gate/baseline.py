"""What was measured when the baseline was last set, and whether something got worse since.

benchmarks/baselines/cpu.json     one file per class of device, in the words of a bench document, with why it was changed
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from redline.errors import CompareError
from redline.telemetry import write_json

COUNT, RATIO = "count", "ratio"
TOLERANCES = {"python_calls": 0.03, "operators": 0.005, "copies": 0.005, "allocated_bytes": 0.01, "flops": 0.001, RATIO: 0.25}
"""How much more is no change. Counts of torch are exact; of Python's calls some depend on the clock (how many steps the engine
remembers of the last second). A ratio has to be worse beyond its interval and this."""
SAMPLED = 0.05
"""On top of it where the work is what a policy samples: another processor rounds otherwise, and another token comes first."""
OTHER_VERSIONS = 0.05
"""On top of it for counts under another Python or torch, which may do the same in more calls."""

State = Literal["same", "worse", "better", "not comparable"]


@dataclass(slots=True, frozen=True)
class Figure:
    """One number of the gate; less is better."""

    name: str
    """`trainer step: operators`."""
    kind: str
    """A field of `Counts`, or `ratio`."""
    value: float
    samples: Sequence[float]
    interval: tuple[float, float] | None = None
    """At 95%; None for a count."""
    is_sampled: bool = False
    """Whether the work depends on what a policy samples."""

    def as_json(self) -> dict[str, Any]:
        unit = "bytes" if self.kind.endswith("bytes") else "× reference" if self.kind == RATIO else ""
        interval = None if self.interval is None else list(self.interval)
        return {
            "name": self.name,
            "kind": self.kind,
            "value": self.value,
            "unit": unit,
            "interval_95": interval,
            "is_sampled": self.is_sampled,
            "samples": list(self.samples),
            "bound": None,
            "fraction_of_bound": None,
            "peer": None,
        }

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Figure:
        interval = result["interval_95"]
        interval = interval and (interval[0], interval[1])
        return cls(result["name"], result["kind"], result["value"], result["samples"], interval, result["is_sampled"])


@dataclass(slots=True, frozen=True)
class Check:
    """A figure beside what it was."""

    figure: Figure
    before: Figure | None
    state: State
    allowed: float

    @property
    def change(self) -> float | None:
        return None if self.before is None or not self.before.value else self.figure.value / self.before.value - 1


@dataclass(slots=True, frozen=True)
class Baseline:
    identity: Mapping[str, Any]
    figures: Sequence[Figure]
    changes: Sequence[Mapping[str, str]]
    """Date, commit and reason, the newest last."""

    @classmethod
    def read(cls, path: Path) -> Baseline | None:
        if not path.is_file():
            return None
        try:
            document = json.loads(path.read_text())
            figures = [Figure.of(result) for result in document["results"]]
            return cls(document["identity"], figures, document["changes"])
        except (ValueError, KeyError, TypeError) as error:
            raise CompareError(f"{path}: not a baseline: {error}", "take it from git, or set it anew with --update") from error

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = [figure.as_json() for figure in self.figures]
        changes = [dict(change) for change in self.changes]
        write_json(path, {"case": "perf", "identity": dict(self.identity), "changes": changes, "results": results})

    def updated(self, identity: Mapping[str, Any], figures: Sequence[Figure], reason: str) -> Baseline:
        commit = (identity.get("source") or {}).get("commit") or "unknown"
        change = {"date": datetime.now(UTC).date().isoformat(), "commit": commit, "reason": reason}
        return Baseline(identity, figures, [*self.changes, change])

    def check(self, identity: Mapping[str, Any], figures: Sequence[Figure]) -> list[Check]:
        before = {figure.name: figure for figure in self.figures}
        return [_check(figure, before.get(figure.name), self.identity, identity) for figure in figures]


def device_class(device_name: str) -> str:
    """`cpu`, `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _check(figure: Figure, before: Figure | None, then: Mapping[str, Any], now: Mapping[str, Any]) -> Check:
    if figure.kind == RATIO:
        allowed = TOLERANCES[RATIO]
        comparable = all(then.get(key) == now.get(key) for key in ("machine", "reference", "libraries"))
    else:
        same = then.get("libraries") == now.get("libraries")
        allowed, comparable = TOLERANCES[figure.kind] + figure.is_sampled * SAMPLED + (not same) * OTHER_VERSIONS, True
    if then.get("in_c") != now.get("in_c"):  # torch counts nothing of what is C: with and without are two things
        comparable = False
    if before is None or not comparable:
        return Check(figure, before, "not comparable", allowed)
    # An interval is worse when all of it is; so is a number, which is its own interval.
    low, high = figure.interval or (figure.value, figure.value)
    then_low, then_high = before.interval or (before.value, before.value)
    if low > then_high * (1 + allowed):
        return Check(figure, before, "worse", allowed)
    return Check(figure, before, "better" if high < then_low * (1 - allowed) else "same", allowed)
