"""A recorded run: everything that its folder holds, as values and Arrow tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from redline.config.earlier import as_of_now
from redline.config.trained_step import is_of_newest_checkpoint
from redline.errors import RunFolderError
from redline.runs.left_out import LeftOut
from redline.runs.status import Status, is_closed, status_of, why
from redline.runs.stored import StoredRun
from redline.runs.tables import table_of
from redline.runs.targets import judged
from redline.runs.verdict import Bound, bound_of
from redline.telemetry import Ledger, RunFolder
from redline.telemetry.files.durable import read_json
from redline.telemetry.files.failure import RunFailure, read_failure, steps_logged
from redline.telemetry.files.tail import Tail
from redline.telemetry.machine.hosts import sampled_hosts
from redline.telemetry.machine.samplers import samples_left_out
from redline.telemetry.summary.failed_attempts import reaches_target
from redline.telemetry.summary.targets import Evidence, Verdict

LogName = Literal["metrics", "samples", "evaluations", "alerts"]
"""The logs of a run, each a file NAME.jsonl."""


class Rows(Protocol):
    """What gives the rows of a log as it grows: `Tail` does."""

    at_end: bool

    def read(self) -> tuple[bool, list[dict[str, Any]]]: ...


class Run:
    """One recorded run. Every call reads the files as they are at that moment and writes nothing, so that the run may go on
    in another process meanwhile; a last line that is not whole yet is left for the next call."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        """The names of the run's files."""
        self._left_out = LeftOut(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Open the folder of a run, such as `runs/demo-001`. Raises `RunFolderError` for anything else."""
        if not isinstance(folder, str | os.PathLike):
            raise RunFolderError(f"{folder!r} is no run folder", "give its path, such as runs/demo-001")
        path = Path(folder).expanduser()
        if path.is_file():
            hint = f"give its folder: {path.parent}" if path.name == "config.json" else "give the folder that the run left"
            raise RunFolderError(f"{path}: a file, not a run folder", hint)
        return cls(RunFolder.open(path))

    def __repr__(self) -> str:
        return f"Run({str(self.folder.shown)!r})"

    @property
    def path(self) -> Path:
        """The folder, from the root."""
        return self.folder.path

    @property
    def name(self) -> str:
        """The folder's own name, such as `demo-001`."""
        return self.path.name

    @property
    def model(self) -> Path | None:
        """The folder of the trained model; None until the run has finished, and while a run that goes on is past it."""
        model = self.folder.model
        return model if model.is_dir() and is_of_newest_checkpoint(model) else None

    # ── documents ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def config(self) -> dict[str, Any]:
        """The resolved recipe, by section, under today's names of the keys whichever version wrote it."""
        return as_of_now(read_json(self.folder.config))

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and the versions that the run began with; empty where they were not written."""
        return read_json(self.folder.environment)

    @property
    def failure(self) -> RunFailure | None:
        """The error that ended the last process of the run; None where none did."""
        return read_failure(self.folder)

    @property
    def ledger(self) -> Ledger | None:
        """Where the time of the last process went; None until it has closed."""
        if not is_closed(self.folder):
            return None
        try:
            return Ledger.from_json(read_json(self.folder.ledger))
        except (KeyError, TypeError, AssertionError):
            return None

    @property
    def ledger_is_of(self) -> str | None:
        """Which steps the ledger is of, in a sentence, where earlier processes have taken some; else None."""
        return self._left_out.ledger()

    @property
    def steps(self) -> int:
        """The last step that was logged; 0 before the first."""
        return steps_logged(self.folder)

    @property
    def total_steps(self) -> int:
        """`run.steps` of the recipe."""
        return setting(self.config, "run", "steps", 0)

    @property
    def status(self) -> Status:
        """Whether the run goes on, or how it ended, with the reason."""
        return self.status_after(self.steps, self.rows("evaluations"))

    def status_after(self, steps: int, evaluations: Iterable[Mapping[str, Any]]) -> Status:
        """The same for a caller who has read the logs already: its last step, and the rows of its evaluations."""
        config = self.config
        total = setting(config, "run", "steps", 0)
        state = status_of(self.folder, steps, total, _reached_target(config, evaluations))
        failure = self.failure if state == "failed" else None
        return Status(state, failure.line if failure else why(state, self.folder, steps, total))

    # ── logs and trajectories ──────────────────────────────────────────────────────────────────────────────────────────

    def rows(self, log: LogName) -> Iterator[dict[str, Any]]:
        """Give the rows of a log as it is now, block by block; none where there is no such file."""
        return rows_of(self.folder.path / f"{log}.jsonl")

    def tail(self, log: LogName) -> Rows:
        """Return what reads a log as it grows, from its first row on."""
        return Tail(self.folder.path / f"{log}.jsonl")

    def metrics(self) -> pa.Table:
        """One row per step, `step` from 1, with a column for each metric of `metrics.jsonl`."""
        return table_of(self.rows("metrics"))

    def evaluations(self) -> pa.Table:
        """One row per evaluation of the held-out tasks; `step` is the number of steps taken before it."""
        return table_of(self.rows("evaluations"))

    def samples(self, host: str | None = None) -> pa.Table:
        """What host and devices were doing, one row per sample: of rank 0's machine, or of one that `hosts` names. Raises
        `RunFolderError` for another."""
        if host is None:
            return table_of(self.rows("samples"))
        hosts = self.hosts()
        if host not in hosts:
            raise RunFolderError(f"{host!r}: no machine of this name was sampled beside rank 0's", _names(hosts))
        return table_of(rows_of(hosts[host]))

    def hosts(self) -> dict[str, Path]:
        """The machines that were sampled beside rank 0's: name → the file of its samples."""
        return sampled_hosts(self.folder.samples_elsewhere)

    def alerts(self) -> pa.Table:
        """One row for each thing that looked wrong."""
        return table_of(self.rows("alerts"))

    def trajectories(self, step: int | None = None) -> pa.Table:
        """One row per attempt that is still stored, or per attempt that `step`, counted from 1, was trained on. Raises
        `RunFolderError` where the run kept none, or the step trained on none."""
        if step is not None and not isinstance(step, int | np.integer):
            raise RunFolderError(f"{step!r} is no step", "give a whole number, from 1, or leave it out")
        return StoredRun(self.folder.shown).table(None if step is None else int(step))

    # ── what it came to ────────────────────────────────────────────────────────────────────────────────────────────────

    def targets(self) -> list[Verdict]:
        """The key metrics beside the targets of the recipe; none where this version cannot read the recipe."""
        evidence = Evidence()
        for row in self.rows("metrics"):
            evidence.add_row(row)
        for sample in self.rows("samples"):
            evidence.add_sample(sample)
        return judged(evidence, self.config)

    def bound(self, phases: Mapping[str, float], ledger: Ledger | None) -> Bound:
        """What bounded the run, in words. `phases` is the time of all steps in the main lane."""
        return bound_of(phases, ledger, setting(self.config, "buffer", "max_lag", 0))

    def left_out(self, num_samples: int | None = None) -> list[str]:
        """What the files no longer hold, a sentence for each file that let something go. `num_samples` is how many samples were
        let go, for a caller who has read them already."""
        count = samples_left_out(self.folder.samples) if num_samples is None else num_samples
        return self._left_out.sentences(count)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Give the rows of a log that may be growing, block by block; none where there is no such file."""
    tail = Tail(path)
    while not tail.at_end:
        yield from tail.read()[1]


def setting(config: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    """Return a value of a recipe, or `default` where it is missing or of another type: the run may be of another version, or
    its config half-written."""
    found = config.get(section)
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, type(default)) else default


def _names(hosts: Iterable[str]) -> str:
    return f"there are {', '.join(hosts)}" if hosts else "there is none; leave the name out"


def _reached_target(config: Mapping[str, Any], evaluations: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether an evaluation after the first step came to `rollouts.evaluation.stop_at`."""
    target = setting(config, "rollouts", "evaluation", {}).get("stop_at")
    return isinstance(target, int | float) and any(reaches_target(row, target) for row in evaluations)
