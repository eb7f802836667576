"""Whether a run goes on, and if not, how it ended; told from its files alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from redline.telemetry import RunFolder

State = Literal["starting", "running", "finished", "stopped", "failed", "killed", "unreadable", "log"]


@dataclass(slots=True, frozen=True)
class Status:
    """How a run stands."""

    state: State
    """`finished` took all steps, or ended because an evaluation reached its target; `stopped` closed its files before that;
    `killed` did not close them; `failed` left a failure.json. `starting` has a process, but no step yet.
    `unreadable` has no process, and a config.json that does not say how many steps there are. `log` is one of another
    framework, whose log does not tell."""
    why: str
    """One line for a person: how far it came, what ended it, how to continue."""

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


def status_of(folder: RunFolder, steps_done: int, total_steps: int, reached_target: bool = False) -> State:
    """Return the state of a run. It is running while its process, on this machine, holds the folder's lock."""
    if is_locked(folder.path / ".lock"):
        return "running" if folder.metrics.exists() else "starting"
    if folder.failure.exists():
        return "failed"
    if not total_steps:
        return "unreadable"
    if is_closed(folder):
        return "finished" if steps_done >= total_steps or reached_target else "stopped"
    return "killed"


def why(state: State, folder: RunFolder, steps_done: int, total_steps: int) -> str:
    """Say in one line what a state means for this run; `failed` is explained by its failure.json instead."""
    of_total = f" of {total_steps}" if total_steps else ""
    done = f"step {steps_done}{of_total}" if steps_done else "no step"
    again = f"continue with: redline train {folder.shown} --resume"
    reasons = {
        "starting": "its process is loading; no step is done",
        "running": f"{done} is done",
        "finished": f"all {total_steps} steps are done",
        "stopped": f"it closed its files after {done}; {again}",
        "failed": f"it ended with an error after {done}; {again}",
        "killed": f"its process was ended after {done}; {again}",
    }
    if state == "unreadable":
        return f"config.json {_config_fault(folder.config)}; put a copy of it back; {done} is done"
    if state == "finished" and steps_done < total_steps:
        return f"an evaluation reached rollouts.evaluation.stop_at after {done}"
    return reasons[state]


def _config_fault(path: Path) -> str:
    try:
        text = path.read_text()
        document = json.loads(text) if text.strip() else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return f"is damaged ({error})"
    if not text.strip():
        return "is empty"
    return "has no run.steps" if isinstance(document, dict) else "holds no recipe"


def is_locked(path: Path, locks: Path = Path("/proc/locks")) -> bool:
    """Return whether a process holds the lock, as the kernel lists it: to try the lock would keep a run that starts at this
    moment from taking it. Some file systems (btrfs) have another device number in that list than in `stat`: there the process
    that wrote its number into the file is the one."""
    try:
        file, owner = path.stat(), path.read_text().strip()
        lines = [line.split() for line in locks.read_text().splitlines()]
    except (OSError, ValueError):
        return False
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    held = [fields for fields in lines if "FLOCK" in fields]
    return any(wanted in fields or _holds(fields, owner, file.st_ino) for fields in held)


def _holds(fields: Sequence[str], owner: str, inode: int) -> bool:
    """Whether the process holds a file with this inode number, on whichever device."""
    return owner in fields and any(field.endswith(f":{inode}") for field in fields)


def is_closed(folder: RunFolder) -> bool:
    """Return whether the last process closed its files. The ledger is the last one that a process writes; a ledger that is
    older than the metrics belongs to a process before it."""
    if not folder.ledger.exists():
        return False
    try:
        return folder.ledger.stat().st_mtime_ns >= folder.metrics.stat().st_mtime_ns
    except OSError:  # no metrics, or none that can be looked at
        return True
