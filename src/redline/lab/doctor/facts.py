"""A recorded run as figures: read once, then asked by every rule. Nothing here reads a file afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from redline.lab.doctor.finding import Evidence, Gain
from redline.lab.evidence.statistics import hodges_lehmann
from redline.runs.run import Run, rows_of
from redline.telemetry import Ledger
from redline.telemetry.ledger import MAIN_LANE
from redline.telemetry.summary.timeline import PREFIX, ROLLOUTS_PREFIX

Side = Literal["trainer", "rollouts"]
"""Who does the work. In lockstep both take turns in one thread; with a lag they work at once, and one of them waits."""
FEWEST = 4
"""Steady steps that a claim needs."""
MOST_POINTS = 200
"""Of a series that evidence carries."""
TRAINER_WAITS = ("wait_for_rollouts", "wait_for_late_groups", "wait")
"""Waits of the main thread for the other side."""
ROLLOUTS_WAITS = ("wait_for_budget", "wait_for_weights", "wait")
"""Waits of the rollouts' thread for the other side."""


@dataclass(slots=True, frozen=True)
class Facts:
    """What one run recorded."""

    config: Mapping[str, Any]
    steps: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Metric → its value in each steady step; nan where a step has none. The first steps are apart."""
    first: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The same of the first steps, which compile, load and fill caches."""
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Figure of the machine → its value in each sample while steps were taken."""
    ledger: Ledger | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Facts:
        """Read a run. Blocks for as long as its logs take to read."""
        rows = list(rows_of(run.folder.metrics))
        apart = min(2, max(0, len(rows) - FEWEST))
        begun, ended = (rows[apart].get("run/time_s"), rows[-1].get("run/time_s")) if rows else (None, None)
        samples = [row for row in rows_of(run.folder.samples) if _is_between(row.get("time"), begun, ended)]
        return cls(
            config=run.config,
            steps=_columns(rows[apart:]),
            first=_columns(rows[:apart]),
            samples=_columns(samples),
            ledger=run.ledger,
            environment=run.environment,
        )

    # ── figures ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_steps(self) -> int:
        """How many steady steps there are."""
        return len(self.steps.get("run/step_s", ()))

    @property
    def step_s(self) -> float:
        """Seconds of a steady step: the mean, since means add up."""
        return self.mean("run/step_s") or 0.0

    @property
    def wall_s(self) -> float:
        """Seconds of all steady steps."""
        return self.total("run/step_s")

    def mean(self, metric: str) -> float | None:
        """The mean over the steady steps, those without a value left out; None where there is none."""
        return _mean(self.steps.get(metric))

    def total(self, metric: str) -> float:
        """The sum over the steady steps; 0 where nothing was recorded."""
        values = self.steps.get(metric)
        return 0.0 if values is None else float(np.nansum(values))

    def sampled(self, figure: str) -> float | None:
        """The mean over the samples of the machine; None where there is none."""
        return _mean(self.samples.get(figure))

    def phase(self, name: str, side: Side = "trainer") -> np.ndarray:
        """Seconds of a phase in each steady step: in the main thread, or in that of the rollouts where they have one."""
        prefix = ROLLOUTS_PREFIX if side == "rollouts" and not self.is_lockstep else PREFIX
        values = self.steps.get(f"{prefix}{name}_s")
        return np.zeros(self.num_steps) if values is None else np.nan_to_num(values)

    def phases(self, names: Iterable[str], side: Side = "trainer") -> np.ndarray:
        """The sum of several phases in each steady step."""
        return np.sum([self.phase(name, side) for name in names], axis=0)

    def spans(self, *names: str) -> np.ndarray:
        """Seconds of spans in the main thread in each steady step; only their sum over the run is known, so they are all alike.
        Zeros until the run has ended."""
        lane = self.ledger.lanes.get(MAIN_LANE) if self.ledger else None
        steps = self.num_steps + len(self.first.get("run/step_s", ()))
        seconds = sum(lane.rows.get(name, 0) for name in names) / 1e9 if lane else 0.0
        return np.full(self.num_steps, seconds / max(1, steps))

    def setting(self, key: str, default: Any = None) -> Any:
        """The recipe's value under a dotted key, such as `trainer.lora.rank`."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        kind = (int, float) if isinstance(default, float) else type(default)
        is_odd = default is not None and not isinstance(found, kind)  # another version, or another program, wrote it
        return default if found is None or is_odd else found

    def series(self, metric: str) -> tuple[float, ...]:
        """A metric step by step, thinned where it is long; what is not a number is left out."""
        values = self.steps.get(metric, np.empty(0))
        values = values[np.isfinite(values)]  # JSON has no other numbers
        return tuple(values[:: max(1, math.ceil(len(values) / MOST_POINTS))].tolist())

    def evidence(self, metric: str, says: str) -> Evidence:
        """A metric's mean over the steady steps, with its course."""
        mean = self.mean(metric)
        return Evidence(metric, "none" if mean is None else mean, says, self.series(metric))

    # ── who bounds whom ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_lockstep(self) -> bool:
        return not self.setting("buffer.max_lag", 0)

    @property
    def trainer_waits(self) -> np.ndarray:
        """Seconds in each steady step that the trainer waited for rollouts."""
        return self.phases(TRAINER_WAITS)

    @property
    def rollouts_wait(self) -> np.ndarray:
        """The same of rollouts for the trainer; none in lockstep, where nobody waits and both stand still."""
        return np.zeros(self.num_steps) if self.is_lockstep else self.phases(ROLLOUTS_WAITS, "rollouts")

    @property
    def bounding(self) -> Side | None:
        """The side for which the other waits; None in lockstep, where both count."""
        if self.is_lockstep:
            return None
        return "rollouts" if self.trainer_waits.sum() >= self.rollouts_wait.sum() else "trainer"

    def saved(self, side: Side, seconds: np.ndarray, low: float, likely: float, high: float, assumption: str) -> Gain:
        """What is gained where a side loses `seconds` in each step, of which a change takes away the given parts. Beside a lag
        that is at most what the other side waits, and nothing on the side that waits itself."""
        if not self.is_lockstep:
            if side != self.bounding:
                return Gain(0.0, 0.0, 0.0, f"the {self.bounding} side bounds the run; {assumption}")
            seconds = np.minimum(seconds, self.trainer_waits if side == "rollouts" else self.rollouts_wait)
        interval = hodges_lehmann(seconds.tolist()[:MOST_POINTS]).interval if len(seconds) else None
        mean, count = float(seconds.mean()) if len(seconds) else 0.0, len(seconds)
        least, most = (max(0.0, min(interval[0], mean)), max(interval[1], mean)) if interval else (mean, mean)
        parts = np.maximum.accumulate(np.minimum([least * low, mean * likely, most * high], self.step_s)) * count
        return Gain(float(parts[0]), float(parts[1]), float(parts[2]), assumption)


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, int | float))
    return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _mean(values: np.ndarray | None) -> float | None:
    if values is None or not np.isfinite(values).any():
        return None
    return float(np.mean(values[np.isfinite(values)]))


def _is_between(time: Any, begun: Any, ended: Any) -> bool:
    return all(isinstance(value, int | float) for value in (time, begun, ended)) and begun <= time <= ended
