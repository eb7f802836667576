"""The process of a worker, as the run sees it, and what starts it: on this machine, unless a cluster does.

start_process("environment process 1") ──► WorkerProcess: wait_until_ready, ask, why_ended, kill, close
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from redline.child import Child, ChildError
from redline.environments.workers.jobs import PATIENCE_S

PROGRAM = "redline.environments.workers.program"
START_S = 120.0
"""Seconds for a process to begin, and for the import of a game's module: neither counts as a call."""


class EndedError(Exception):
    """A process has ended, or was ended since it did not answer in time."""

    def __init__(self, reason: str, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        """`its worker process was ended by SIGKILL`."""
        self.is_late = is_late
        """Whether it was ended because it did not answer in time."""


class WorkerProcess(Protocol):
    """A process that answers the messages of `program.py`, wherever it runs."""

    @property
    def start_s(self) -> float:
        """Seconds that it may take to begin."""
        ...

    @property
    def pid(self) -> int:
        """Its process id on its machine; 0 where that is not known yet."""
        ...

    def wait_until_ready(self, limit_s: float) -> bool:
        """Block until it takes messages, or for `limit_s` seconds: then it may still begin. Raises EndedError."""
        ...

    def ask(self, message: Mapping[str, Any], limit_s: float | None) -> Mapping[str, Any]:
        """Send a message and block until the answer is there. Raises EndedError, also where none came within `limit_s` seconds,
        and then the process is ended."""
        ...

    def why_ended(self) -> str:
        """Why it has ended; empty where it is not known to have. Does not block."""
        ...

    def kill(self) -> None:
        """End it at once. Any thread may, also while another waits for an answer."""
        ...

    def close(self) -> None:
        """End it and let go of what it holds here. Blocks for some seconds at most."""
        ...


class LocalProcess:
    """A process of this machine. Implements `WorkerProcess`."""

    start_s = START_S

    def __init__(self, name: str) -> None:
        """Starts it and returns at once. Its interpreter is one of its own: no fork, since the run has threads."""
        command = [sys.executable, "-m", PROGRAM, str(os.getpid())]
        self._child = Child(command, {"OMP_NUM_THREADS": "1"}, patience_s=PATIENCE_S, own_group=True)

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self, limit_s: float) -> bool:
        if not self._child.has_answer(limit_s):
            return False
        try:
            self._child.read()
        except ChildError as error:
            raise _ended(error) from None
        return True

    def ask(self, message: Mapping[str, Any], limit_s: float | None) -> Mapping[str, Any]:
        try:
            return self._child.ask(json.dumps(message), limit_s)
        except ChildError as error:
            raise _ended(error) from None

    def why_ended(self) -> str:
        return "" if self._child.is_alive else _ended(ChildError(self._child.code, self._child.last_lines())).reason

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.close()


def _ended(error: ChildError) -> EndedError:
    if error.code is None:
        return EndedError("its worker process was ended: it did not answer in time", is_late=True)
    code = error.code
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return EndedError(f"its worker process {how}" + (f": {error.lines[-1]}" if error.lines else ""))


# ── where processes are started ────────────────────────────────────────────────────────────────────────────────────────

Start = Callable[[str], WorkerProcess]
"""Starts a process of this name and returns at once."""

_start: Start = LocalProcess


def start_process(name: str) -> WorkerProcess:
    """Start a worker process: on this machine, unless `start_processes_with` has said otherwise. Returns at once."""
    return _start(name)


def start_processes_with(start: Start) -> None:
    """Have all workers of this process, those of an environment's own making too, started by `start` from now on."""
    global _start  # a process is one run, and environments that make workers of their own know of no cluster
    _start = start
