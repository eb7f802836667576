"""Threads and processes that are to live as long as the run: the code that starts one says so here, and says when it may go.

    watch_worker("rollouts", thread)      forget_worker("rollouts")

One that ends in between is dead, and an alert says so. A child process without a name counts as well, once it has failed and
no code has taken note of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

Worker = threading.Thread | multiprocessing.process.BaseProcess | subprocess.Popen

_workers: dict[str, Worker] = {}


@dataclass(slots=True, frozen=True)
class WorkerState:
    """One worker, now."""

    name: str
    is_alive: bool
    end: str = ""
    """How it ended, in words, where it did and that is known."""


def watch_worker(name: str, worker: Worker) -> None:
    """Expect that it lives until `forget_worker`."""
    _workers[name] = worker


def forget_worker(name: str) -> None:
    """It may end now."""
    _workers.pop(name, None)


def workers_now() -> list[WorkerState]:
    """The watched, then child processes that failed and that their parent has not looked at."""
    watched = [_state(name, worker) for name, worker in list(_workers.items())]
    return [*watched, *_unnoticed_deaths()]


def _state(name: str, worker: Worker) -> WorkerState:
    if isinstance(worker, threading.Thread):
        return WorkerState(name, worker.is_alive(), "" if worker.is_alive() else "its thread ended")
    code = worker.poll() if isinstance(worker, subprocess.Popen) else worker.exitcode
    return WorkerState(name, code is None, "" if code is None else _ending(worker.pid, code))


def _unnoticed_deaths() -> list[WorkerState]:
    """Children whose exit code still lies with the kernel, and is not 0."""
    return [
        WorkerState(f"process {pid} ({name})", False, _ending(pid, code))
        for pid in child_pids()
        for name, code in [_zombie(pid)]
        if code
    ]


def child_pids(parent: int | str = "self") -> list[int]:
    """Children of a process; none where the kernel does not list them."""
    pids: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):  # the thread may have ended just now
            pids += [int(pid) for pid in task.read_text().split()]
    return sorted(pids)


def _zombie(pid: int) -> tuple[str, int]:
    """Name and exit code, as `subprocess` has it, of a process that has ended and was not waited for; code 0 for any other."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        fields = tail.split()
        status = int(fields[-1]) if fields[0] == "Z" else 0
    except (OSError, ValueError, IndexError):
        return "", 0
    return head.partition("(")[2], -(status & 0x7F) if status & 0x7F else status >> 8


def _ending(pid: int | None, code: int) -> str:
    if code >= 0:
        return f"process {pid} ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"process {pid} was ended by {name}"
