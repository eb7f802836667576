"""What is known of a framework's logs, and how they become rows of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from redline.runs.others.log import Log, Row

Metrics = Mapping[str, tuple[str, float]]
"""Their name → ours, and what to multiply their value with to have our unit."""
Figures = dict[str, Any]
"""A row of metrics in the making, by our names."""
LAST_STEP = 10**12
"""No run takes more steps: a row that says so is damaged."""
LARGEST = 1e60
"""No figure of a run is larger: sums and squares of larger ones are no numbers any more."""


@dataclass(slots=True, frozen=True, eq=False)
class Framework:
    """One framework that trains policies."""

    name: str
    """What people call it."""
    key: str
    """Prefix of its metrics that we have no name for."""
    metrics: Metrics
    marks: tuple[str, ...]
    """Names, or beginnings of names that end in a slash, that no other framework logs: it is known by them."""
    rows: Callable[[Log], Iterator[Row]]
    """Its rows, each with the step that it belongs to, under the names of `metrics`."""
    derive: Callable[[Mapping[str, float], Figures, AbstractSet[str]], None]
    """Add what takes several of their figures, such as the phases of a step. `run/steps` is there already, where a row stands
    for several. The last argument is every name that a row of the run has."""
    evaluated: Callable[[Mapping[str, float]], float | None]
    """The mean reward of an evaluation in a row; None where it has none."""
    settings: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
    """Those of its own settings that we have keys for, by section."""
    devices: Callable[[Mapping[str, Any]], tuple[int, int]]
    """GPUs that train, and others that only sample, from its settings; 0 where these do not say."""
    samples_apart: bool = False
    """Whether engines always have devices of their own."""

    def wrote(self, log: Log) -> bool:
        """Whether a log has names that only this framework writes."""
        names = log.names
        return any(any(name.startswith(mark) for name in names) if mark.endswith("/") else mark in names for mark in self.marks)


@dataclass(slots=True, frozen=True)
class Translated:
    """The logs of one run, in our names."""

    steps: list[Figures] = field(default_factory=list)
    """Rows as `metrics.jsonl` has them."""
    evaluations: list[Figures] = field(default_factory=list)
    """Rows as `evaluations.jsonl` has them."""


def translate(framework: Framework, logs: Sequence[Log]) -> Translated:
    """Put the rows of the logs together by step, and give every figure our name and unit. Where a step was logged twice, as
    after a resume, the later figures stand. Times below zero are damage, and left out."""
    found = Translated()
    by_step = _by_step(row for log in logs for row in framework.rows(log))
    names = frozenset(name for theirs, _ in by_step.values() for name in theirs)
    counts = _steps_of_rows(step for step, (theirs, _) in by_step.items() if theirs.keys() & framework.metrics.keys())
    for step, (theirs, time) in sorted(by_step.items()):
        reward = framework.evaluated(theirs)
        if reward is not None:
            found.evaluations.append({"step": step, "evaluation/reward_mean": reward})
        if step in counts:
            row: Figures = {"step": step} | ({"run/steps": counts[step]} if counts[step] > 1 else {})
            for name, value in theirs.items():
                ours, factor = framework.metrics.get(name, (f"{framework.key}/{name}", 1.0))
                if value >= 0 or not ours.endswith("_s"):
                    row[ours] = value * factor
            framework.derive(theirs, row, names)
            _finish(row, time)
            found.steps.append(row)
    return found


def _by_step(rows: Iterable[Row]) -> dict[int, tuple[dict[str, float], float | None]]:
    found: dict[int, tuple[dict[str, float], float | None]] = {}
    for row in rows:
        if row.step is not None and row.step <= LAST_STEP:
            values, time = found.setdefault(row.step, ({}, None))
            values.update({name: value for name, value in row.values.items() if abs(value) <= LARGEST})
            found[row.step] = (values, max(filter(None, (row.time, time)), default=None))
    return found


def _finish(row: Figures, time: float | None) -> None:
    """Add when the step ended, and the time that no phase accounts for."""
    if time is not None:
        row["run/time_s"] = time
    phases = [value for name, value in row.items() if name.startswith("timeline/")]
    if phases and "run/step_s" in row:
        row["timeline/unaccounted_s"] = max(0.0, row["run/step_s"] - sum(phases))
    if "trainer/grad_norm" not in row and "trainer/learning_rate" in row:
        # A rate without a gradient's norm would read as if no gradient had ever come.
        row["run/learning_rate"] = row.pop("trainer/learning_rate")


def _steps_of_rows(steps: Iterable[int]) -> dict[int, int]:
    """Return how many steps each row stands for: logs may have a row only every so many."""
    rows = sorted(steps)
    gaps = [after - before for before, after in pairwise(rows)]
    first = max(1, min(rows[0], gaps[0])) if gaps else 1
    return dict(zip(rows, [first, *gaps], strict=False))


def phases(row: Figures, theirs: Mapping[str, float], table: Mapping[str, str], prefix: str = "timeline/") -> None:
    """Add the seconds of their parts to our phases: `table` is their name → the phase."""
    for name, phase in table.items():
        if (seconds := time_of(theirs, name)) is not None:
            row[f"{prefix}{phase}_s"] = row.get(f"{prefix}{phase}_s", 0.0) + seconds


def time_of(theirs: Mapping[str, float], name: str) -> float | None:
    """Return a figure that is a time; None where there is none, or it is below zero."""
    value = theirs.get(name)
    return None if value is None or value < 0 else value


def whole(value: Any) -> int | None:
    """Return a setting as a positive whole number; None where it is none."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 else None


def setting(config: Mapping[str, Any], path: str) -> Any:
    """Return a setting under a dotted path; None where there is none."""
    found: Any = config
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
