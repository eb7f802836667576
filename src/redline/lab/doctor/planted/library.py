"""Runs the library: each plant as it is, then without its bottleneck; what the doctor said of it beside what was measured."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from redline.child import Child, ChildError
from redline.errors import ConfigError
from redline.lab.doctor.planted.calibration import Point, calibration_svg
from redline.lab.doctor.planted.plants import PLANTS, Plant
from redline.telemetry import describe_environment, write_json
from redline.telemetry.files.durable import replace_file

CASE = "doctor"
PATIENCE_S = 300.0
"""Seconds that one run may take, its start included."""
WANTED = 0.9
"""Share of the plants whose cause must be the first finding."""
BUSY = 0.05
"""Share of the time that neighbours of a measurement may take."""


@dataclass(slots=True, frozen=True)
class Share:
    """A part of the time, with its interval."""

    low: float
    likely: float
    high: float


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of one plant."""

    name: str
    what: str
    expected: str | None
    """The planted cause; None for a healthy run."""
    found: str | None
    """The first finding; None where there is none. Neighbours that were not planted do not count: they are somebody else's."""
    neighbours: float
    """Share of the time that such neighbours took."""
    findings: Sequence[Mapping[str, Any]]
    predicted: Share | None = None
    """What the doctor said that the fix would save of the time."""
    measured: Share | None = None
    """What it saved."""
    fix: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why there is no outcome."""

    @property
    def is_right(self) -> bool:
        return not self.error and self.found == self.expected


@dataclass(slots=True)
class Library:
    """The outcome of all plants that ran."""

    outcomes: list[Outcome] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=describe_environment)

    @property
    def share_right(self) -> float:
        """Plants whose cause is the first finding, of those that have one."""
        sick = [outcome.is_right for outcome in self.outcomes if outcome.expected]
        return sum(sick) / len(sick) if sick else 1.0

    @property
    def are_healthy_right(self) -> bool:
        """Whether no healthy run has a finding."""
        return all(outcome.is_right for outcome in self.outcomes if not outcome.expected)

    @property
    def verdict(self) -> str:
        sick, healthy = ([o for o in self.outcomes if bool(o.expected) is kind] for kind in (True, False))
        right = sum(outcome.is_right for outcome in sick), sum(outcome.is_right for outcome in healthy)
        said = f"{right[0]} of {len(sick)} causes are the first finding; {right[1]} of {len(healthy)} healthy runs have none."
        worst = max((outcome.neighbours for outcome in self.outcomes), default=0.0)
        return (
            said if worst < BUSY else f"{said} Other processes took up to {worst:.0%} of the time: gains are not measured well."
        )

    @property
    def exit_code(self) -> int:
        """1 where fewer causes are found first than must be, or a healthy run has a finding."""
        return 0 if self.share_right >= WANTED and self.are_healthy_right else 1

    def as_json(self) -> dict[str, Any]:
        results = [{**asdict(outcome), "is_right": outcome.is_right} for outcome in self.outcomes]
        return {"case": CASE, "identity": self.identity, "verdict": self.verdict, "results": results}

    def save(self, folder: Path) -> Path:
        """Write the document to `doctor.json` in a folder, and beside it a picture of its gains. Returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{CASE}.json"
        write_json(path, self.as_json())
        points = [
            Point(outcome.expected or "", astuple(outcome.predicted), astuple(outcome.measured))
            for outcome in self.outcomes
            if outcome.predicted and outcome.measured
        ]
        replace_file(folder / f"{CASE}.svg", calibration_svg(points).encode())
        return path


def run_library(
    names: Sequence[str], tell: Callable[[str], None], *, with_fixes: bool = True, save: Path | None = None
) -> Library:
    """Run the plants of these names, all where none is given. Blocks for about 15 s a plant. Raises ConfigError where there is
    no such plant; without `with_fixes`, no gain is measured. The folder `save` has the document after every plant."""
    if unknown := [name for name in names if name not in PLANTS]:
        raise ConfigError(f"{unknown[0]!r} is no plant", f"one of {', '.join(PLANTS)}")
    library = Library()
    with Runner() as runner:
        for place, name in enumerate(names or PLANTS, 1):
            outcome = run_plant(name, PLANTS[name], runner, with_fixes)
            library.outcomes.append(outcome)
            if save:
                library.save(save)
            tell(f"{place}/{len(names or PLANTS)} {line_of(outcome)}")
    return library


class Runner:
    """A process that trains plants one after the other, so that torch is loaded once; another takes its place where it fails. A
    context manager; the process and its run folders are gone when the block ends."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="redline-planted-")
        self._child: Child | None = None

    def run(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Train one run and return what the process says of it. Blocks; raises ChildError where it fails or takes too long."""
        if self._child is None:
            command = [sys.executable, "-m", "redline.lab.doctor.planted.process", self._scratch.name]
            self._child = Child(command, own_group=True)
        try:
            return self._child.ask(json.dumps(wanted), PATIENCE_S)
        except ChildError:
            child, self._child = self._child, None
            child.kill()
            child.close()
            raise

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._child is not None:
            self._child.close() if error is None else self._child.kill()
        self._scratch.cleanup()


def line_of(outcome: Outcome) -> str:
    """One outcome for a person."""
    if outcome.error:
        return f"{outcome.name}: {outcome.error}"
    mark = "right" if outcome.is_right else "WRONG"
    said = f"{outcome.name}: {mark}, expected {outcome.expected or 'nothing'}, found {outcome.found or 'nothing'}"
    if outcome.predicted and outcome.measured:
        likely = f"{outcome.predicted.likely:.0%} ({outcome.predicted.low:.0%} to {outcome.predicted.high:.0%})"
        said += f"; predicted {likely}, measured {outcome.measured.likely:.0%}"
    return said


def render(library: Library) -> Table:
    """The outcomes as a table for people."""
    table = Table(box=box.SIMPLE_HEAD, caption=library.verdict, caption_justify="left")
    for title in ("plant", "expected", "found first"):
        table.add_column(title, no_wrap=True)
    for title in ("predicted", "measured"):
        table.add_column(title, justify="right", no_wrap=True)
    for outcome in library.outcomes:
        found = outcome.error.partition("\n")[0] or outcome.found or "nothing"
        shares = [_percents(share) for share in (outcome.predicted, outcome.measured)]
        table.add_row(
            Text(outcome.name),
            outcome.expected or "nothing",
            Text(found, style="" if outcome.is_right else "bold red"),
            *shares,
        )
    return table


def _percents(share: Share | None) -> str:
    return f"{share.likely:.0%} ({share.low:.0%} to {share.high:.0%})" if share else ""


def run_plant(name: str, plant: Plant, runner: Runner, with_fix: bool = True) -> Outcome:
    """Run a plant, and where it has a bottleneck the same without it, then the plant again: a machine is not as fast in one
    minute as in the next."""
    try:
        with neighbours(plant.neighbours):
            before = runner.run(_asked(plant))
        fix = _fix_of(plant, before["findings"])
        if not with_fix or fix is None:
            return _judged(name, plant, before, None, fix or {})
        after = runner.run(_asked(plant, fix))
        with neighbours(plant.neighbours):
            again = runner.run(_asked(plant))
    except ChildError as error:
        return Outcome(name, plant.what, plant.cause, None, 0.0, [], error=f"the run failed: {error}")
    return _judged(name, plant, before, saved_share([before, again], after), fix or {})


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Inside the block as many processes keep a core busy each."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _asked(plant: Plant, fix: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the process is told: the plant, or the plant with its fix."""
    is_same_world = fix is None or plant.fix is None
    return {
        "keys": {**plant.keys, **(fix or {})},
        "delays": dict(plant.delays) if is_same_world else {},
        "first_delays": dict(plant.first_delays) if is_same_world else {},
        "with_first": bool(plant.first_delays),
        "has_neighbours": plant.neighbours > 0,
        "ranks": plant.ranks,
    }


def _fix_of(plant: Plant, findings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The keys that take the bottleneck away: the plant's own, else those of the finding; None where nothing is to mend."""
    if plant.cause is None or plant.fix is not None:
        return plant.fix
    return next((finding["change"] for finding in findings if finding["cause"] == plant.cause and finding["change"]), None)


def _judged(name: str, plant: Plant, before: Mapping[str, Any], measured: Share | None, fix: Mapping[str, Any]) -> Outcome:
    findings, wall_s = before["findings"], sum(before["step_s"])
    own = next((finding for finding in findings if finding["cause"] == plant.cause), None)
    return Outcome(
        name=name,
        what=plant.what,
        expected=plant.cause,
        found=findings[0]["cause"] if findings else None,
        neighbours=0.0 if plant.neighbours else before["neighbours_s"] / wall_s,
        findings=findings,
        predicted=Share(*(own["gain"][key] / wall_s for key in ("low_s", "likely_s", "high_s"))) if own else None,
        measured=measured,
        fix=fix,
    )


def saved_share(before: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> Share:
    """1 - (seconds per attempt after) / (mean of those before), with two standard errors of the steps' spread to either side,
    and what the runs before lie apart by."""
    each = [_per_attempt(run) for run in before]
    mean = float(np.mean(each))
    ratio = _per_attempt(after) / mean
    spreads = [
        np.var(steps) / steps.mean() ** 2 / len(steps) for steps in (np.asarray(run["step_s"]) for run in (*before, after))
    ]
    error = ratio * (2 * float(np.sqrt(sum(spreads))) + (max(each) - min(each)) / 2 / mean)
    return Share(1 - ratio - error, 1 - ratio, 1 - ratio + error)


def _per_attempt(run: Mapping[str, Any]) -> float:
    """Seconds of all steps over the attempts that did not fail."""
    return float(np.sum(run["step_s"])) / max(1.0, run["attempts"])
