"""What every lane of this process is at, seen from another thread: the clock that alerts and the watch for stalls go by."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from redline.telemetry.ledger import UNACCOUNTED, by_section
from redline.telemetry.spans import LaneState, Recorder
from redline.telemetry.stalls.calls import Call, calls_now, num_finished_calls
from redline.telemetry.workers import WorkerState, workers_now

WAITS_FOR_GROUPS = frozenset({"wait.for_rollouts", "wait.for_late_groups", "wait.for_environments"})
"""The trainer's: for enough groups, for those that would grow too old if it went on without them, and in lockstep for the
environments that they are played in."""
IDLE_SECTIONS = frozenset({"wait", "telemetry", UNACCOUNTED})
"""Time that moves nothing: waiting, and looking at the run."""
GROUP_SECTIONS = frozenset({"rollouts", "engine", "environment", "reward"})
"""What a group is made by."""


@dataclass(slots=True, frozen=True)
class Activity:
    """One look at a process."""

    at_s: float
    """On the monotonic clock."""
    quiet_s: float
    """How long no lane has opened or closed a span of work, and no call of the user's code has ended."""
    lanes: Sequence[LaneState] = ()
    """Lanes of threads that live."""
    totals_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Lane → span → exclusive seconds since the process began, those of the open spans included."""
    workers: Sequence[WorkerState] = ()
    calls: Sequence[Call] = ()
    """Calls of the user's functions that are under way."""

    @property
    def main(self) -> LaneState | None:
        return next((lane for lane in self.lanes if lane.name == "main"), None)

    @property
    def is_between_steps(self) -> bool:
        """The main lane evaluates, checkpoints or loads: what others wait for meanwhile is no fault of theirs."""
        return self.main is not None and any(span.name.startswith(("run.", "models.")) for span in self.main.open)

    def waits_s(self) -> dict[tuple[str, str], float]:
        """(lane, wait) → seconds. A thread that has nothing to do until somebody asks does not wait."""
        return {
            (lane.name, name): seconds
            for lane in self.lanes
            for name, seconds in self.totals_s[lane.name].items()
            if name.startswith("wait.for_") and name != lane.idle
        }

    def getting_groups_s(self) -> float:
        """What the main lane has spent on groups: making them itself, or waiting for those who do."""
        rows = self.totals_s.get("main", {})
        sections = by_section({name: round(seconds * 1e9) for name, seconds in rows.items()})
        made_s = sum(sections.get(section, 0) for section in GROUP_SECTIONS) / 1e9
        return made_s + sum(rows.get(wait, 0.0) for wait in WAITS_FOR_GROUPS)

    def run_s(self) -> float:
        """What the main lane has spent between steps."""
        return sum(seconds for name, seconds in self.totals_s.get("main", {}).items() if name.startswith("run."))


class ActivityProbe:
    """Looks at a recorder, and remembers when something last moved."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder = recorder
        self._clock = clock
        self._worked_ns: dict[str, int] = {}
        self._num_calls = num_finished_calls()
        self._moved_at = clock()

    def look(self) -> Activity:
        now, now_ns = self._clock(), self._recorder.now_ns()
        lanes = self._recorder.lane_states()
        worked_ns = {lane.name: _worked_ns(lane) for lane in lanes}
        num_calls = num_finished_calls()
        if worked_ns != self._worked_ns or num_calls != self._num_calls:
            self._worked_ns, self._num_calls, self._moved_at = worked_ns, num_calls, now
        living = [lane for lane in lanes if lane.is_alive]
        totals = {lane.name: _totals_s(lane, now_ns) for lane in living}
        return Activity(now, now - self._moved_at, living, totals, workers_now(), calls_now())


def _worked_ns(lane: LaneState) -> int:
    """What is booked to work. Open spans add nothing, so this stands still while nothing opens or closes."""
    return sum(ns for section, ns in by_section(lane.booked_ns).items() if section not in IDLE_SECTIONS)


def _totals_s(lane: LaneState, now_ns: int) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for name, ns in lane.booked_ns.items():
        totals[name] += ns / 1e9
    totals[lane.innermost] += max(0, now_ns - lane.booked_until_ns) / 1e9
    return totals
