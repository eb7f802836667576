"""Whether a run goes on, and if not, how it ended; told from its files alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from redline.telemetry import RunFolder

Status = Literal["starting", "running", "finished", "stopped", "failed", "killed"]


def status_of(folder: RunFolder, steps_done: int, total_steps: int, reached_target: bool = False) -> Status:
    """`finished` took all steps, or ended because an evaluation reached its target; `stopped` closed its files before that,
    `killed` did not, `failed` left a failure.json that says why. A run is running while its process, on this machine, holds
    its lock."""
    if is_locked(folder.path / ".lock"):
        return "running" if folder.metrics.exists() else "starting"
    if folder.failure.exists():
        return "failed"
    if is_closed(folder):
        return "finished" if steps_done >= total_steps or reached_target else "stopped"
    return "killed"


def is_locked(path: Path) -> bool:
    """As the kernel lists it: to try the lock would keep a run that starts at this moment from taking it."""
    try:
        file = path.stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    return any(wanted in line.split() and "FLOCK" in line for line in locks)


def is_closed(folder: RunFolder) -> bool:
    """The ledger is the last file that a process writes; one that is older than the metrics is of a process before it."""
    try:
        return folder.ledger.stat().st_mtime_ns >= folder.metrics.stat().st_mtime_ns
    except OSError:
        return False
