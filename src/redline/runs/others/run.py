"""A run of TRL, verl or prime-rl, read from its logs: a `Run` as far as they go."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from redline.runs.others.framework import translate
from redline.runs.others.sources import Source, find_source, is_own
from redline.runs.others.verl import VERL, is_beside
from redline.runs.run import LogName, Run
from redline.runs.status import Status
from redline.runs.verdict import SMALL, Bound
from redline.telemetry import Ledger, RunFolder
from redline.telemetry.files.failure import RunFailure
from redline.telemetry.summary.timeline import in_words


def open_run(path: Path) -> Run:
    """Open a run folder of ours, or logs of another framework. Raises `RunFolderError` for anything else."""
    if path.name == "config.json" or (path.is_dir() and is_own(path)):
        return Run.open(path)
    source = find_source(path)
    return OtherRun(path, source) if source else Run.open(path)


class OtherRun(Run):
    """A run of another framework. Its logs are read once, when it is opened, and hold no attempts and no ledger."""

    def __init__(self, path: Path, source: Source) -> None:
        super().__init__(RunFolder(path.absolute(), path))
        self.framework = source.framework
        self.logs = source.logs
        found = translate(source.framework, source.logs)
        samples = sorted((dict(sample) for log in source.logs for sample in log.samples), key=lambda sample: sample["time"])
        self._rows: dict[LogName, list[dict[str, Any]]] = {
            "metrics": found.steps,
            "evaluations": found.evaluations,
            "samples": samples,
            "alerts": [],
        }
        self._theirs = {key: value for log in source.logs for key, value in log.config.items()}
        self._gpus = {name.split("/")[1] for sample in samples for name in sample if name.startswith("gpu/")}
        self._names = {name for row in found.steps for name in row}

    def __repr__(self) -> str:
        return f"OtherRun({str(self.folder.shown)!r}, {self.framework.name})"

    @property
    def model(self) -> Path | None:
        return None

    @property
    def config(self) -> dict[str, Any]:
        """What of its settings we have keys for, by section, and all of them under the framework's name."""
        ours = self.framework.settings(self._theirs)
        if self.framework is VERL and any(is_beside(log.names) for log in self.logs):
            ours["buffer"]["max_lag"] = 1
        if self._gpus:
            ours.setdefault("run", {})["device"] = "cuda"
        return {**ours, self.framework.key: self._theirs}

    @property
    def environment(self) -> dict[str, Any]:
        """The GPUs, where settings or samples say how many there were."""
        count = sum(self.devices) or len(self._gpus)
        return {"gpus": [{"name": "GPU"}] * count} if count else {}

    @property
    def devices(self) -> tuple[int, int]:
        """GPUs that train, and others that only sample, as the settings say; 0 where they do not."""
        return self.framework.devices(self._theirs)

    @property
    def failure(self) -> RunFailure | None:
        return None

    @property
    def ledger(self) -> Ledger | None:
        return None

    @property
    def steps(self) -> int:
        rows = self._rows["metrics"]
        return int(rows[-1]["step"]) if rows else 0

    def status_after(self, steps: int, evaluations: Iterable[Mapping[str, Any]]) -> Status:
        """A log does not say whether the run goes on."""
        files = ", ".join(log.path.name for log in self.logs)
        return Status("log", f"a log of {self.framework.name} ({self.logs[0].kind}: {files}), {steps:,} steps")

    def rows(self, log: LogName) -> Iterator[dict[str, Any]]:
        yield from (dict(row) for row in self._rows[log])

    def tail(self, log: LogName) -> Whole:
        return Whole(self._rows[log])

    def hosts(self) -> dict[str, Path]:
        """None: a log does not tell machines apart."""
        return {}

    def left_out(self, num_samples: int | None = None) -> list[str]:
        """What of the files could not be read, and what they do not hold."""
        return [*self.damage, *self.not_told]

    @property
    def damage(self) -> tuple[str, ...]:
        """What of the files could not be read, in sentences."""
        return tuple(f"{log.path.name}: {log.damage}." for log in self.logs if log.damage)

    @property
    def not_told(self) -> tuple[str, ...]:
        """What these logs do not say, in sentences."""
        names = self._names
        has_phases = any(name.startswith("timeline/") for name in names)
        missing = {
            f"{self._who} does not say what the time of a step went to. {self.how_to_tell}": not has_phases,
            f"{self._who} does not say how long a step took.": "run/step_s" not in names,
            f"{self._who} holds no reward.": "rollouts/reward_mean" not in names,
            f"{self._who} holds no samples of the machine.": not self._rows["samples"],
            f"{self._who} holds no evaluations.": not self._rows["evaluations"],
            f"{self._gap:,} steps have no row: each is taken to be like the next one that has.": self._gap,
        }
        return tuple(sentence for sentence, is_missing in missing.items() if is_missing)

    @property
    def _gap(self) -> int:
        """Steps that are missing among rows that come at an even pace."""
        counts = [row.get("run/steps", 1) for row in self._rows["metrics"]]
        usual = statistics.median_low(counts) if counts else 1
        return sum(count - usual for count in counts if count > 2 * usual)

    @property
    def _who(self) -> str:
        return f"The log of {self.framework.name}"

    @property
    def how_to_tell(self) -> str:
        """What to log so that the phases of a step are known, or what follows from not knowing them."""
        if self.framework.key == "trl" and self.logs[0].kind != "W&B":
            return "TRL writes that to W&B alone (report_to=wandb, WANDB_MODE=offline)."
        return "Without that no cause of lost time can be told."

    def bound(self, phases: Mapping[str, float], ledger: Ledger | None) -> Bound:
        """What took the time, as far as the log tells."""
        total = sum(phases.values())
        if total <= 0:
            return Bound(f"{self._who} does not say what the time of a step went to.", ())
        shares = {phase: seconds / total for phase, seconds in phases.items()}
        rest = [f"{in_words(phase)} {share:.0%}" for phase, share in _largest_first(shares) if share >= SMALL]
        return Bound(_headline(shares, bool(self.config["buffer"]["max_lag"])), (f"Of a step: {', '.join(rest)}.",))


class Whole:
    """Rows that are all there: what a reader of a growing file asks."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.at_end = True

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return all rows, and none the next time."""
        rows, self._rows = self._rows, []
        return False, [dict(row) for row in rows]


def _headline(shares: Mapping[str, float], is_beside: bool) -> str:
    if is_beside:
        waits = shares.get("wait_for_rollouts", 0.0)
        if waits >= SMALL:
            return f"Generation bounds this run: the trainer waits for it {waits:.0%} of the time."
        return f"Training bounds this run: the trainer waits for rollouts {waits:.0%} of the time."
    (first, share), *_ = _largest_first(shares)
    return f"{in_words(first).capitalize()} bounds this run: {share:.0%} of a step."


def _largest_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda each: -each[1])
