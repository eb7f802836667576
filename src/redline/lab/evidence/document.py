"""The document every bench ends with: who measured what on which machine, what physics allows, what others reach.

{"case", "identity", "results": [{"name", "value", "unit", "samples", "bound": {"value", "why"}, "fraction_of_bound",
 "peer": {"name", "value", "ratio"}}]}
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.lab.bench.settings import BenchSettings
from redline.lab.evidence.statistics import Comparison
from redline.lab.measure.clocks import read_clocks
from redline.lab.measure.warmup import WarmUp
from redline.telemetry import describe_environment, write_json


@dataclass(slots=True, frozen=True)
class Bound:
    """What no implementation can beat on this machine."""

    value: float
    """0 where nothing bounds the figure."""
    why: str
    """The formula, with its numbers."""

    def rate_of(self, amount: float) -> float:
        """The bound of `amount` per second, of a bound in seconds; where there is none, none."""
        return amount / self.value if self.value else 0.0


@dataclass(slots=True, frozen=True)
class PeerFigure:
    """What somebody else reaches at the same work."""

    name: str
    value: float
    ratio: float
    """More than 1: we are better."""
    comparison: Comparison | None = None
    """Where both were measured in pairs."""
    not_settled: Sequence[str] = ()
    """Sides that were not known to be warm when the pairs began."""

    def as_json(self) -> dict[str, Any]:
        figure: dict[str, Any] = {"name": self.name, "value": self.value, "ratio": self.ratio}
        if self.not_settled:
            figure["not_settled"] = list(self.not_settled)
        if self.comparison is None:
            return figure
        c = self.comparison
        return figure | {"interval_95": _listed(c.interval), "p_value": c.p_value, "pairs": c.pairs}


@dataclass(slots=True, frozen=True)
class Result:
    """One measured figure."""

    name: str
    value: float
    unit: str
    samples: Sequence[Any]
    """Everything the value was computed from."""
    bound: Bound
    peer: PeerFigure | None = None
    larger_is_better: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else is worth keeping: percentiles, an interval."""
    fractions: Sequence[float] = ()
    """What each round reached of the bound of its own work, where the rounds have not the same."""

    @property
    def fraction_of_bound(self) -> float:
        """value / bound, or bound / value where less is better: 1 is perfect, 0 says that there is no bound. The median
        round's, where each has a bound."""
        if self.fractions:
            return statistics.median(self.fractions)
        if not (self.value and self.bound.value):
            return 0.0
        return self.value / self.bound.value if self.larger_is_better else self.bound.value / self.value

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            **self.details,
            "samples": list(self.samples),
            "bound": {"value": self.bound.value, "why": self.bound.why},
            "fraction_of_bound": self.fraction_of_bound,
            **({"fractions_of_bound": list(self.fractions)} if self.fractions else {}),
            "peer": self.peer.as_json() if self.peer else None,
        }


@dataclass(slots=True, frozen=True)
class Measured:
    """What a case found out."""

    settings: BenchSettings
    """What it ran with, nothing left open."""
    results: Sequence[Result]
    peers: Mapping[str, str] = field(default_factory=dict)
    """Name → version of each peer that ran beside us."""
    warm_ups: Mapping[str, WarmUp] = field(default_factory=dict)
    """Side → its runs that do not count."""


@dataclass(slots=True, frozen=True)
class Document:
    case: str
    identity: Mapping[str, Any]
    """Commit and state of the source, machine, driver, clocks, versions, warm-up, and the resolved settings as `config`."""
    results: Sequence[Result]

    @property
    def file_name(self) -> str:
        """CASE.json, or CASE-WORKLOAD.json where a workload was named: W1 and W2 are different benchmarks."""
        workload = self.identity["config"].get("workload")
        return f"{self.case}-{workload.lower()}.json" if workload else f"{self.case}.json"

    @property
    def exit_code(self) -> int:
        """What fails raises."""
        return 0

    @classmethod
    def of(cls, case: str, device: str, measured: Measured) -> Document:
        config = measured.settings.model_dump(mode="json", exclude={"vllm_python", "trl_python"})  # paths of the one machine
        config |= {key: Path(config[key]).name for key in ("recipe", "replay") if config.get(key)}
        warm_ups = {side: warm_up.as_json() for side, warm_up in measured.warm_ups.items()}
        found = {
            "device": device,
            "clocks": read_clocks(),  # the device has just worked
            "peers": dict(measured.peers),
            "warm_up": warm_ups,
            "config": config,
        }
        return cls(case, describe_environment() | found, measured.results)

    def as_json(self) -> dict[str, Any]:
        return {"case": self.case, "identity": dict(self.identity), "results": [result.as_json() for result in self.results]}

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        write_json(path, self.as_json())
        return path


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
