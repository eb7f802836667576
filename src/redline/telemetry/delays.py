"""Delays at spans of a run that goes on: how much longer does a step take when a part of it takes longer?

    delays.json   {"id": "…", "pid": 4711, "expires": 1794880402.8, "steps": [{"rollouts.reward": 0.01}, {}, …]}

The file lies in the run folder. The run looks for it before each step, which costs nothing where there is none. The n-th entry
of `steps` is for the n-th step after the file was found: the name of a span → seconds that each such span sleeps when it opens,
in whichever thread of the run's process; in an event loop that holds up all tasks, as code that blocks does. The row of such a
step has `delays/plan` (the id), `delays/total_s` and `delays/SPAN_s`, the seconds that were slept, so that nobody takes it for
a measurement of the run itself; a step of the plan that has no delay has `delays/total_s` 0.

Delays end with the last entry, when the file is removed, when it expires, and when the run ends; the run then removes the file.
A file for another process is removed unread, so that a run that was killed and resumed is not delayed again.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from redline.errors import RunFolderError
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.spans import pause_spans

MOST_S = 10.0
"""Seconds of one delay, at most."""
MOST_PER_STEP_S = 60.0
"""Seconds that all delays of a step may sum to; what comes after that is not delayed."""
MOST_STEPS = 1000
"""Steps of one plan."""
MOST_LIFE_S = 3600.0
"""Seconds from when a plan is written to when it expires, at most."""
PLAN, TOTAL = "delays/plan", "delays/total_s"
"""Keys of the row of a step that belongs to a plan."""


@dataclass(slots=True, frozen=True)
class DelayPlan:
    """Which spans sleep in which of the next steps."""

    id: str
    pid: int
    """The process that may take it."""
    expires: float
    """Seconds since 1970 from which on nothing is delayed."""
    steps: Sequence[Mapping[str, float]]
    """For each step: the name of a span → seconds that it sleeps whenever it opens."""

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "pid": self.pid, "expires": self.expires, "steps": [dict(step) for step in self.steps]}


def delays_path(folder: RunFolder) -> Path:
    return folder.path / "delays.json"


def seconds_in(row: Mapping[str, Any], span: str) -> float:
    """Seconds that a span slept in the step of a row; 0 where it was not delayed."""
    value = row.get(f"delays/{span}_s")
    return float(value) if isinstance(value, int | float) else 0.0


def ask(folder: RunFolder, pid: int, steps: Sequence[Mapping[str, float]], life_s: float) -> DelayPlan:
    """Leave a plan for a process that runs in the folder. Raises RunFolderError where a plan lies there already, and where a
    delay or the plan is longer than is allowed."""
    worst = max((seconds for step in steps for seconds in step.values()), default=0.0)
    if not 0 <= worst <= MOST_S or len(steps) > MOST_STEPS or not 0 < life_s <= MOST_LIFE_S:
        raise RunFolderError(
            f"a plan of {len(steps)} steps with delays up to {worst:g} s, for {life_s:g} s, is more than a run takes",
            f"at most {MOST_STEPS} steps, {MOST_S:g} s a delay and {MOST_LIFE_S:g} s in all",
        )
    if (found := _read(delays_path(folder))) and time.time() < found.expires and _is_alive(found.pid):
        raise RunFolderError(
            f"{folder.shown}: this run is being delayed already, until {time.ctime(found.expires)} at the latest",
            f"wait for it, or remove {delays_path(folder)}",
        )
    plan = DelayPlan(uuid.uuid4().hex[:12], pid, time.time() + life_s, tuple(steps))
    write_json(delays_path(folder), plan.as_json())
    return plan


def withdraw(folder: RunFolder, plan: DelayPlan) -> None:
    """Remove a plan, if it still lies there; the run stops delaying with its next step."""
    if (found := _read(delays_path(folder))) and found.id == plan.id:
        delays_path(folder).unlink(missing_ok=True)


class Delays:
    """The delays of the process that runs in a folder: told when a step begins, asked what it slept when the step ends."""

    def __init__(self, folder: RunFolder, tell: Callable[[str], None] = lambda text: None) -> None:
        """`tell` hears when delays begin and end."""
        self._path = delays_path(folder)
        self._tell = tell
        self._plan: DelayPlan | None = None
        self._taken = 0
        """Entries of the plan that were used."""
        self._now: Mapping[str, float] = {}
        self._slept: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def step_begins(self) -> None:
        """Look for a plan, and delay the spans that its next entry names."""
        if self._plan is None and not self._path.exists():
            return
        found = _read(self._path)
        if found is None or found.pid != os.getpid() or time.time() >= found.expires:
            self.close()
            return
        if self._plan is None or self._plan.id != found.id:
            self._tell(f"spans are being delayed for {len(found.steps)} steps: an experiment, no measurement of this run")
            self._plan, self._taken = found, 0
            self._forget()
        if self._taken >= len(found.steps):
            self.close()
            return
        self._now = found.steps[self._taken]
        self._taken += 1
        pause_spans(self._pause if self._now else None)

    def mark(self) -> dict[str, float | str]:
        """End the step, and return what its row says of its delays: nothing where it belongs to no plan. Until the next step
        begins nothing is delayed, such as an evaluation."""
        if self._plan is None:
            return {}
        now, self._now = self._now, {}
        slept = self._forget()
        return {
            PLAN: self._plan.id,
            TOTAL: sum(slept.values()),
            **{f"delays/{name}_s": slept[name] for name in {*now, *slept}},
        }

    def close(self) -> None:
        """Delay nothing any more, and remove the file."""
        if self._plan is not None:
            self._tell("spans are no longer delayed")
        pause_spans(None)
        self._plan, self._now = None, {}
        self._forget()
        with suppress(OSError):  # nothing can be written there
            self._path.unlink(missing_ok=True)

    def _forget(self) -> defaultdict[str, float]:
        """Return what was slept until now, and begin again with nothing."""
        with self._lock:
            slept, self._slept = self._slept, defaultdict(float)
        return slept

    def _pause(self, span: str) -> None:
        """Called by any thread whose span has just opened."""
        seconds = self._now.get(span, 0.0)
        plan = self._plan
        if not seconds or plan is None or time.time() >= plan.expires:
            return
        with self._lock:
            if sum(self._slept.values()) + seconds > MOST_PER_STEP_S:
                return
        began = time.perf_counter()
        time.sleep(seconds)
        took = time.perf_counter() - began
        with self._lock:
            self._slept[span] += took


def _read(path: Path) -> DelayPlan | None:
    """The plan that lies there; None where there is none, or one that cannot be read or is out of bounds."""
    try:
        found = json.loads(path.read_text())
        steps = [{str(name): float(seconds) for name, seconds in step.items()} for step in found["steps"]]
        plan = DelayPlan(str(found["id"]), int(found["pid"]), float(found["expires"]), steps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    is_bounded = all(0 <= seconds <= MOST_S for step in steps for seconds in step.values()) and len(steps) <= MOST_STEPS
    return plan if is_bounded and math.isfinite(plan.expires) and plan.expires <= time.time() + MOST_LIFE_S else None


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid)
