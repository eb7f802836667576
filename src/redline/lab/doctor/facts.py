"""A recorded run as figures: read once, then asked by every rule. Nothing here reads a file afterwards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from redline.lab.doctor.finding import Evidence, Gain
from redline.lab.evidence.statistics import hodges_lehmann
from redline.runs.run import Run, rows_of, setting
from redline.telemetry import Ledger
from redline.telemetry.delays import PLAN, TOTAL
from redline.telemetry.files.metrics import first_row_where, rows_from_the_last
from redline.telemetry.ledger import MAIN_LANE
from redline.telemetry.summary.timeline import PREFIX, ROLLOUTS_PREFIX

if TYPE_CHECKING:
    from redline.lab.doctor.guesses import Guesses

Side = Literal["trainer", "rollouts", "both"]
"""Who does the work. In lockstep trainer and rollouts take turns in one thread; with a lag they work at once, and one of them
waits. `both`: what holds up either of them."""
FEWEST = 4
"""Steady steps that a claim needs."""
FIRST = 2
"""Steps that are apart: they compile, load and fill caches."""
MOST_STEPS = 2000
"""Steps that are looked at, the newest: what a run was like hours ago is not what it is like."""
JUMP_S = 60.0
"""Seconds between two steps from which on they may be a clock that was set, or a machine that slept."""
MOST_POINTS = 200
"""Points of a series that evidence carries."""
TRAINER_WAITS = ("wait_for_rollouts", "wait_for_late_groups", "wait")
"""Waits of the main thread for the other side."""
ROLLOUTS_WAITS = ("wait_for_budget", "wait_for_weights", "wait")
"""Waits of the rollouts' thread for the other side."""
Pool = Literal["generation", "training", "rewards", "environments", "tasks", "weights", "ranks", "between", "step"]
"""Time that a finding is about. Two findings that are about the same time cannot both have all of it."""
POOLS: Mapping[Pool, tuple[str, ...]] = {
    "generation": ("generation",),
    "training": ("training",),
    "rewards": ("reward", "wait_for_rewards", "wait_for_reward_model"),
    "environments": ("environment", "wait_for_environments", "generation"),
    "tasks": ("data", "wait_for_task", "wait_for_tasks", "wait_for_calls", "wait_for_requests"),
    "weights": ("weight_sync", "wait_for_engine"),
    "ranks": ("wait_for_ranks", "wait_for_stages"),
}
"""Pool → its phases. `between` is the time between steps, `step` is all."""
BETWEEN, EVALUATION = "run/between_s", "run/evaluation_s"
"""Columns made here: seconds before each step that belong to none, and those of them in which the policy was evaluated."""


class Parts(NamedTuple):
    """Parts of some lost time that a change takes away."""

    low: float
    likely: float
    high: float


@dataclass(slots=True, frozen=True)
class Facts:
    """What one run recorded."""

    config: Mapping[str, Any]
    steps: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Metric → its value in each steady step; nan where a step has none. The first steps are apart."""
    first: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The same of the first steps, which compile, load and fill caches."""
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Figure of rank 0's machine → its value in each sample while steps were taken."""
    hosts: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    """The same of every other machine, by its name."""
    ledger: Ledger | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    ledger_steps: int = 0
    """Steps that the ledger is about; 0: as many as there are here."""
    slept: Mapping[str, float] = field(default_factory=dict)
    """Span → seconds of the ledger that it slept in steps that are left out."""
    num_delayed: int = 0
    """Steps that are left out, since they were delayed on purpose."""
    guesses: Guesses | None = None
    """What guesses would have saved; None where nobody has looked."""

    @classmethod
    def of(cls, run: Run, *, with_delays: bool = False) -> Facts:
        """Read the newest steps of the run's last process. Blocks for as long as that takes: a second or two, however long the
        run is. Steps that were delayed on purpose are left out, unless somebody asks for them."""
        rows = _newest_rows(run)
        is_beginning = len(rows) < MOST_STEPS
        before = dict[str, Any]() if is_beginning else rows.pop(0)
        _add_time_between(rows, before, run)
        delayed = [row for row in rows if not with_delays and PLAN in row]
        process_steps = len(rows) if is_beginning else _steps_since_its_first(run, rows[-1])
        rows = [row for row in rows if with_delays or PLAN not in row]
        apart = min(FIRST, max(0, len(rows) - FEWEST)) if is_beginning else 0
        begun, ended = (rows[apart].get("run/time_s"), rows[-1].get("run/time_s")) if rows else (None, None)
        return cls(
            config=run.config,
            steps=_columns(rows[apart:]),
            first=_columns(rows[:apart]),
            samples=_columns(_samples_between(run.folder.samples, begun, ended)),
            hosts={name: _columns(_samples_between(path, begun, ended)) for name, path in run.hosts().items()},
            ledger=run.ledger,
            environment=run.environment,
            ledger_steps=process_steps,
            slept=_slept(delayed),
            num_delayed=len(delayed),
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
        """Seconds of all steady steps, and of what lies between them: evaluations, checkpoints, logs."""
        return self.total("run/step_s") + self.total(BETWEEN)

    @property
    def period_s(self) -> float:
        """Seconds from one steady step to the next: wall_s / num_steps."""
        return self.wall_s / max(1, self.num_steps)

    def column(self, metric: str) -> np.ndarray:
        """A metric in each steady step; 0 where a step has none."""
        return np.nan_to_num(self.steps.get(metric, np.zeros(self.num_steps)))

    def mean(self, metric: str) -> float | None:
        """The mean over the steady steps; None where none has a value. A step without a phase spent no time in it; of other
        metrics, steps without a value are left out."""
        if metric.startswith((PREFIX, ROLLOUTS_PREFIX)) and metric in self.steps:
            return self.total(metric) / self.num_steps if self.num_steps else None
        return _mean(self.steps.get(metric))

    def total(self, metric: str) -> float:
        """The sum over the steady steps; 0 where nothing was recorded."""
        values = self.steps.get(metric)
        return 0.0 if values is None else float(np.nansum(values))

    def sampled(self, figure: str) -> float | None:
        """The mean over the samples of rank 0's machine; None where there is none."""
        return _mean(self.samples.get(figure))

    @property
    def how_to_sample(self) -> str:
        """What would give a run without samples of its machine some."""
        every: float = self.setting("telemetry.sample_every_s", 0.0)
        return f"steady steps that take longer than {every:g} s have samples" if every else "telemetry.sample_every_s=1 does"

    def elsewhere(self) -> Iterator[tuple[str, Facts]]:
        """Every other machine that was sampled, with the same facts but its samples in the place of those of rank 0's."""
        for name, samples in self.hosts.items():
            if samples:
                yield name, replace(self, samples=samples, hosts={})

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
        steps = self.ledger_steps or self.num_steps + len(self.first.get("run/step_s", ()))
        seconds = sum(lane.rows.get(name, 0) / 1e9 - self.slept.get(name, 0.0) for name in names) if lane else 0.0
        return np.full(self.num_steps, max(0.0, seconds) / max(1, steps))

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

    def saved(self, side: Side, seconds: np.ndarray, pool: Pool, parts: Parts, assumption: str) -> Gain:
        """What is gained where a side loses `seconds` in each step, of which a change takes away the given parts. Beside a lag
        that is at most what the other side waits, and nothing on the side that waits itself."""
        total_s, name = self._pool_s(pool), str(pool)
        if not self.is_lockstep and side != "both":
            if side != self.bounding:
                return Gain(0.0, 0.0, 0.0, f"the {self.bounding} side bounds the run; {assumption}", name, total_s)
            waits = self.trainer_waits if side == "rollouts" else self.rollouts_wait
            seconds, total_s, name = np.minimum(seconds, waits), float(waits.sum()), f"waits for {side}"
        interval = hodges_lehmann(seconds.tolist()[:MOST_POINTS]).interval if len(seconds) else None
        mean, count = float(seconds.mean()) if len(seconds) else 0.0, len(seconds)
        least, most = (max(0.0, min(interval[0], mean)), max(interval[1], mean)) if interval else (mean, mean)
        least, mean, most = np.minimum([least, mean, most], self.period_s)  # of a step, no more than all can be lost
        found = np.maximum.accumulate([least * parts.low, mean * parts.likely, most * parts.high])
        low, likely, high = (float(value) * count for value in found)
        return Gain(low, likely, high, assumption, name, max(total_s, likely))

    def _pool_s(self, pool: Pool) -> float:
        """Seconds of all steady steps that findings about a pool can share."""
        if pool == "step":
            return self.wall_s
        if pool == "between":
            return self.total(BETWEEN)
        return float(sum(self.phases(POOLS[pool], side).sum() for side in ("trainer", "rollouts"))) / (
            2 if self.is_lockstep else 1
        )


def _newest_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the run's last process in order, the newest `MOST_STEPS` of them."""
    found = rows_from_the_last(run.folder.metrics)
    newest = next(found, None)
    if newest is None:
        return []
    same = itertools.takewhile(lambda row: row.get("run/began_s") == newest.get("run/began_s"), found)
    return [newest, *itertools.islice(same, MOST_STEPS - 1)][::-1]


def _steps_since_its_first(run: Run, newest: Mapping[str, Any]) -> int:
    """Steps that the last process has taken, up to its newest row. A resumed one did not begin with the first of the run."""
    began = newest.get("run/began_s")
    first = first_row_where(run.folder.metrics, lambda row: row.get("run/began_s") == began) or newest
    steps = _number(newest.get("step")) - _number(first.get("step")) + 1
    return int(steps) if math.isfinite(steps) else MOST_STEPS


def _add_time_between(rows: list[dict[str, Any]], before: Mapping[str, Any], run: Run) -> None:
    """Give each row the seconds between the step before it and its own; 0 for the first of a process."""
    evaluated = {_number(row.get("step")): row.get("evaluation/seconds") for row in rows_of(run.folder.evaluations)}
    for last, row in zip([before, *rows], rows, strict=False):
        passed = _number(row.get("run/time_s")) - _number(last.get("run/time_s")) - _number(row.get("run/step_s"))
        between = max(0.0, passed) if math.isfinite(passed) else 0.0
        row[BETWEEN] = between
        seconds = evaluated.get(_number(last.get("step")))
        row[EVALUATION] = min(between, _number(seconds)) if isinstance(seconds, int | float) else 0.0
    _leave_out_a_jump(rows, setting(run.config, "run", "checkpoint_every", 0))


def _leave_out_a_jump(rows: list[dict[str, Any]], checkpoint_every: int) -> None:
    """A time between steps that is longer than all others together, and follows neither a checkpoint nor an evaluation, is a
    clock that was set or a machine that slept: it counts as the usual one."""
    if len(rows) < FEWEST:
        return
    longest = max(rows, key=lambda row: row[BETWEEN])
    others = [row[BETWEEN] for row in rows if row is not longest]
    before = _number(longest.get("step")) - 1
    has_reason = longest[EVALUATION] or (checkpoint_every and before % checkpoint_every == 0)
    if longest[BETWEEN] > max(JUMP_S, sum(others)) and not has_reason:
        longest[BETWEEN] = float(np.median(others))


def _slept(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Span → seconds that it slept in the steps of these rows."""
    names = {key for row in rows for key in row if key.startswith("delays/") and key.endswith("_s") and key != TOTAL}
    return {key.removeprefix("delays/").removesuffix("_s"): sum(_number(row.get(key, 0)) for row in rows) for key in names}


def _samples_between(path: Path, begun: Any, ended: Any) -> list[dict[str, Any]]:
    """Samples of a machine while the steps were taken, at most as many as there may be steps."""
    found = itertools.takewhile(
        lambda row: not isinstance(begun, int | float) or (_number(row.get("time")) >= begun),
        rows_from_the_last(path),
    )
    newest = itertools.islice(found, 10 * MOST_STEPS)
    return [row for row in newest if _is_between(row.get("time"), begun, ended)][::-1]


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
