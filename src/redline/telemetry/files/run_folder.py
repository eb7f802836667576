"""The folder of one run, and who may write in it.

runs/demo-001/
  config.json         the resolved recipe            metrics.jsonl       one row per step
  environment.json    the machine and the versions   evaluations.jsonl   one row per evaluation
  ledger.json         where the time went            trace.json          spans, the first and the newest
  trajectories/       what was sampled (Arrow)       checkpoints/        to resume from       model/  the result
  failure.json        why it ended with an error     base_model.json     which weights it began with
  task_data.json      which data it began with, where its tasks can tell
  samples.jsonl       host and GPU of rank 0         samples/            of the other machines, a file each
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from redline.errors import RunFolderError


@dataclass(slots=True, frozen=True)
class RunFolder:
    """Names every file of a run. Reading needs no more; writing needs the lock."""

    path: Path
    """From the root, where `create` or `open` gave it: the code of a task may change the working folder at any time."""
    given: Path | None = field(default=None, compare=False)
    """The same as somebody called it."""

    @property
    def shown(self) -> Path:
        """What messages call the folder."""
        return self.given or self.path

    @classmethod
    def create(cls, parent: Path, name: str, given: Path | None = None) -> RunFolder:
        """Make `<parent>/<name>-001`, or the number after the last one there. `given` is what messages call the parent."""
        parent.mkdir(parents=True, exist_ok=True)
        number = max((number for number, _ in _numbered(parent, name)), default=0)
        while True:
            number += 1
            own = f"{name}-{number:03d}"
            folder = cls(parent.absolute() / own, (given or parent) / own)
            try:
                folder.path.mkdir()
            except FileExistsError:
                continue  # another process took the number just now
            folder.trajectories.mkdir()
            folder.checkpoints.mkdir()
            return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that a run has made before."""
        if not os.path.isdir(path):
            raise RunFolderError(f"{path}: no such run folder", _whereabouts(path.parent, path.name))
        folder = cls(path.absolute(), path)
        if not folder.config.is_file():
            raise RunFolderError(f"{path}: not a run folder, it has no config.json", _whereabouts(path))
        return folder

    @classmethod
    def newest(cls, parent: Path, name: str, *, tell: Callable[[str], None] = lambda text: None) -> RunFolder:
        """The highest-numbered folder of this name that got as far as its config.json, and that did not fail before its first
        step: to continue that one would be to fail again. `tell` hears of those that are passed over."""
        failed = None
        for _, path in sorted(_numbered(parent, name), reverse=True):
            folder = cls(path.absolute(), path)
            if not folder.config.is_file():
                continue
            if not folder.failure.exists() or folder.has_steps:
                return folder
            tell(f"{path.name} failed before its first step and is passed over")
            failed = failed or folder
        if failed:
            raise RunFolderError(
                f"{parent}: no run called {name} to continue; {failed.path.name} failed before its first step",
                f"start without --resume, or continue that one by its folder: redline train {failed.shown} --resume",
            )
        raise RunFolderError(f"{parent}: no run called {name} to continue", f"start one without --resume, as {name}-001")

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def has_steps(self) -> bool:
        """Whether a step was logged, or a checkpoint is there."""
        logged = self.metrics.exists() and self.metrics.stat().st_size > 0
        return logged or any(self.checkpoints.glob("step-*"))

    @property
    def task_data(self) -> Path:
        """Which data the run began with, where its tasks can tell."""
        return self.path / "task_data.json"

    @property
    def base_model(self) -> Path:
        """Which weights the run began with."""
        return self.path / "base_model.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def samples_elsewhere(self) -> Path:
        """Samples of the machines beside rank 0's, one file each."""
        return self.path / "samples"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def spans(self) -> Path:
        """What other processes of the run write down, one file each."""
        return self.path / "spans"

    @property
    def sinks(self) -> Path:
        """What each sink has been told, so that a resumed run tells it nothing twice."""
        return self.path / "sinks"

    @property
    def sinks_log(self) -> Path:
        return self.path / "sinks.log"

    @property
    def failure(self) -> Path:
        """Why the last process ended with an error; not there where it did not."""
        return self.path / "failure.json"

    @property
    def alerts(self) -> Path:
        return self.path / "alerts.jsonl"

    @property
    def stalls(self) -> Path:
        return self.path / "stalls"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    @property
    def under_way(self) -> Path:
        """Groups that a resumed run attempts again, where trajectories are not kept."""
        return self.path / "under_way.json"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that writes here. The kernel lets go of the lock however the process ends. Afterwards the file of
        the lock holds what it held before."""
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "another"
                raise RunFolderError(
                    f"{self.shown}: process {owner} is running in this folder",
                    "wait for it or stop it, or start a run of its own without --resume",
                ) from None
            file.seek(0)
            before = file.read()
            try:
                _rewrite(file, str(os.getpid()))
                yield
            finally:
                _rewrite(file, before)


def _rewrite(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _numbered(parent: Path, name: str) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(name) + r"-(\d{3,})")
    matches = ((pattern.fullmatch(path.name), path) for path in parent.iterdir()) if parent.is_dir() else ()
    return [(int(match[1]), path) for match, path in matches if match]


def _whereabouts(parent: Path, name: str = "") -> str:
    """The run near where the user looked that has almost this name, or else the newest one."""
    found = parent.glob("*-[0-9][0-9][0-9]*") if os.path.isdir(parent) else ()  # a name too long for a path would raise
    runs = [path for path in found if (path / "config.json").is_file()]
    if not runs:
        return "give the folder of an earlier run, such as runs/demo-001"
    if near := difflib.get_close_matches(name, [path.name for path in runs], n=1, cutoff=0.9):
        return f"did you mean {parent / near[0]}?"
    return f"the newest run there is {max(runs, key=lambda path: (path / 'config.json').stat().st_mtime)}"
