"""Alerts about waiting: groups that do not come, and lanes that are kept longer than ever before."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from redline.telemetry.alerts.detector import Detector, Episode, Finding, Row, number
from redline.telemetry.alerts.robust import explained_by, median
from redline.telemetry.stalls.activity import WAITS_FOR_GROUPS, Activity

DEVIATIONS = 8.0
"""How far beyond its median a wait may go, in robust standard deviations: waits have long tails, and at 8 a run without a fault
is told nothing. Twice the longest so far is never too long."""
MIN_HISTORY = 12
"""Steps before a wait has a history that explains anything."""


class StalledRollouts(Detector):
    """No group comes any more: the main lane has been after groups for longer than in any step before, or steps go by without
    one."""

    kind = "stalled_rollouts"
    PATIENCE = 10
    """Times the floor, before there is a history."""

    def __init__(self, floor_s: float, max_lag: int) -> None:
        self._floor_s = floor_s
        self._most_empty_steps = max_lag + 2
        """That many steps' groups may lie ready, and one more for luck."""
        self._history: deque[float] = deque(maxlen=256)
        self._before_s: float | None = None
        """What the lane had spent on groups when the step began."""
        self._empty_steps = 0
        self._emptiness, self._delay = Episode(leave=1), Episode(leave=1)

    def step(self, row: Row) -> Finding | None:
        groups = number(row, "rollouts/groups")
        if groups is None:
            return None
        self._empty_steps = 0 if groups else self._empty_steps + 1
        if not self._emptiness.see(self._empty_steps > self._most_empty_steps, row["step"]):
            return None
        return Finding(
            seen=f"no group arrived in the last {self._empty_steps} steps, which trained on what was there",
            since=f"step {row['step'] - self._empty_steps + 1}",
            look_at="stalls/ in the run folder, and the lane of the rollouts in trace.json: an environment or a reward that"
            " does not return, or an engine that is out of blocks",
        )

    def end_of_step(self, now: Activity) -> None:
        spent_s = now.getting_groups_s()
        if self._before_s is not None:
            self._history.append(spent_s - self._before_s)
        self._before_s = spent_s

    def evaluation(self, row: Row) -> None:
        self._before_s = None  # it used the same engine

    def tick(self, now: Activity) -> Finding | None:
        if now.is_between_steps:
            return None
        if self._before_s is None:
            self._before_s = now.getting_groups_s()
        waited_s = now.getting_groups_s() - self._before_s
        if not self._delay.see(waited_s > self._floor_s and waited_s > self._limit_s):
            return None
        usual = f"; a step usually takes {median(self._history):.1f} s of it" if self._history else ""
        return Finding(
            seen=f"no batch after {waited_s:.0f} s of making groups or waiting for them{usual}",
            since=f"{waited_s:.0f} s ago",
            look_at=f"{busy_with(now)}; stalls/ in the run folder once nothing moves at all",
        )

    @property
    def _limit_s(self) -> float:
        if len(self._history) < MIN_HISTORY:
            return self.PATIENCE * self._floor_s
        return explained_by(self._history, floor=self._floor_s, deviations=DEVIATIONS)


class LongWait(Detector):
    """A lane waits, in one step, longer than the steps before explain. Each wait of each lane has a history of its own."""

    kind = "long_wait"

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._history: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=256))
        self._before: dict[tuple[str, str], float] | None = None
        """Seconds that each wait had when the step began."""
        self._excused_before_s = 0.0
        self._episodes: defaultdict[tuple[str, str], Episode] = defaultdict(lambda: Episode(leave=1))
        self._steps = 0

    def evaluation(self, row: Row) -> None:
        self._before = None  # everybody waits for it

    def tick(self, now: Activity) -> Finding | None:
        """While a wait lasts. Where nothing moves at all, the run is stalled, which is another's to say; and whether groups
        still come is too."""
        if now.is_between_steps:
            return None
        if self._before is None:
            self._begin(now)
        waiting = {(lane.name, lane.innermost) for lane in now.lanes} - {("main", wait) for wait in WAITS_FOR_GROUPS}
        lasting = {
            wait: seconds for wait, seconds in self._so_far(now).items() if wait in waiting and now.quiet_s < seconds / 2
        }
        return self._judge(lasting, now)

    def end_of_step(self, now: Activity) -> Finding | None:
        if self._before is None:
            self._begin(now)
            return None
        self._steps += 1
        so_far = self._so_far(now)
        finding = self._judge(so_far, now, over=True)
        for wait, seconds in so_far.items():
            self._history[wait].append(seconds)
        self._begin(now)
        return finding

    def _begin(self, now: Activity) -> None:
        self._before, self._excused_before_s = now.waits_s(), now.run_s()

    def _so_far(self, now: Activity) -> dict[tuple[str, str], float]:
        """Seconds of this step, less those in which the main lane was at a checkpoint or the like."""
        assert self._before is not None
        excused_s = now.run_s() - self._excused_before_s
        waits = now.waits_s().items()
        return {wait: max(0.0, seconds - self._before.get(wait, 0.0) - excused_s) for wait, seconds in waits}

    def _judge(self, waits: Mapping[tuple[str, str], float], now: Activity, over: bool = False) -> Finding | None:
        finding = None
        for (lane, name), seconds in waits.items():
            history = self._history[lane, name]
            # A wait that is new now waited nothing in all the steps before.
            known = [0.0] * min(self._steps - len(history), MIN_HISTORY) + list(history)
            if len(known) < MIN_HISTORY:
                continue
            bad = seconds > self._floor_s and seconds > explained_by(known, floor=self._floor_s, deviations=DEVIATIONS)
            if (bad or over) and self._episodes[lane, name].see(bad):
                whom = name.removeprefix("wait.for_").replace("_", " ")
                finding = Finding(
                    seen=f"{lane} waited {seconds:.1f} s for {whom}; a step usually has {median(known):.1f} s of it",
                    since=f"{seconds:.0f} s ago",
                    look_at=busy_with(now, but=lane),
                )
        return finding


def busy_with(now: Activity, but: str = "") -> str:
    """The lanes that do not wait, and what each is at; where all do, who waits for whom."""
    lanes = [lane for lane in now.lanes if lane.name != but and lane.open]
    working = [lane for lane in lanes if not lane.innermost.startswith(("wait.", "telemetry."))]
    return "; ".join(f"{lane.name} is in {lane.innermost}" for lane in working or lanes) or "no lane has a span open"
