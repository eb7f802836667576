"""All detectors together, and whom they tell: the console, `alerts.jsonl`, the other listeners, a webhook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.config.schema import Config
from redline.config.sections.alerts import AlertKind
from redline.errors import boundary
from redline.telemetry.alerts.bias import LengthBias
from redline.telemetry.alerts.detector import Detector, Finding, Row
from redline.telemetry.alerts.host import DeadWorkers, HostMemorySlope
from redline.telemetry.alerts.pipeline import KvSaturation, StalenessRise, ThroughputDrop
from redline.telemetry.alerts.training import AbortStorm, NotFinite, NotLearning, RewardCollapse
from redline.telemetry.alerts.waits import LongWait, StalledRollouts
from redline.telemetry.alerts.webhook import Webhook, webhook_url
from redline.telemetry.files.durable import drop_torn_line
from redline.telemetry.stalls.activity import Activity

POST_TIMEOUT_S = 5.0
"""For one post of the webhook, which has a thread of its own."""
EXPLAINED_BY: Mapping[AlertKind, frozenset[AlertKind]] = {
    "long_wait": frozenset({"stalled_rollouts", "stall", "dead_worker"}),
    "stalled_rollouts": frozenset({"stall", "dead_worker"}),
    "stall": frozenset({"stalled_rollouts", "dead_worker"}),
}
"""A kind is not told in a step in which one of these was: the cause is known."""


class Alerts:
    """Asks every detector, and tells what it finds once. May be called from several threads."""

    def __init__(
        self,
        detectors: Sequence[Detector],
        path: Path,
        *,
        tell: Callable[[str], None] = lambda text: None,
        send: Callable[[Row], None] = lambda row: None,
        webhook: Webhook | None = None,
        off: Sequence[AlertKind] = (),
        run: str = "",
    ) -> None:
        """`tell` shows a line to a person, `send` gives a row to the other listeners."""
        self._detectors = [detector for detector in detectors if detector.kind not in off]
        self._path = path
        self._tell = tell
        self._send = send
        self._webhook = webhook
        self._off = off
        self._run = run
        self._lock = threading.RLock()
        self._last_step = 0
        self._told_this_step: set[AlertKind] = set()
        self._unwritten = False
        """The file was refused once, and that was told."""
        drop_torn_line(path)

    @property
    def last_step(self) -> int:
        return self._last_step

    def step(self, row: Row, now: Activity) -> None:
        with self._lock:
            self._last_step = row["step"]
            self._ask(lambda detector: detector.step(row))
            self._ask(lambda detector: detector.end_of_step(now))
            self._told_this_step.clear()

    def evaluation(self, row: Row) -> None:
        with self._lock:
            self._ask(lambda detector: detector.evaluation(row))

    def sample(self, row: Row) -> None:
        with self._lock:
            self._ask(lambda detector: detector.sample(row))

    def tick(self, now: Activity) -> None:
        with self._lock:
            self._ask(lambda detector: detector.tick(now))

    def close(self) -> None:
        if self._webhook:
            self._webhook.close()

    def found(self, kind: AlertKind, finding: Finding) -> bool:
        """Tell it, unless its cause was told, or the same, in this step. Whether it was."""
        with self._lock:
            if kind in self._off or self._told_this_step & ({kind} | EXPLAINED_BY.get(kind, frozenset())):
                return False
            self._told_this_step.add(kind)
            self._tell_everybody(kind, finding)
            return True

    def _ask(self, question: Callable[[Detector], Finding | None]) -> None:
        """A detector that fails is switched off, and said to be: looking at a run must not end it."""
        for detector in list(self._detectors):
            finding = None
            with boundary() as caught:
                finding = question(detector)
            if caught.error is not None:
                self._detectors.remove(detector)
                self._tell(f"alerts of kind {detector.kind} are off: {type(caught.error).__name__}: {caught.error}")
            elif finding is not None:
                self.found(detector.kind, finding)

    def _tell_everybody(self, kind: AlertKind, finding: Finding) -> None:
        row: dict[str, Any] = {
            "time": time.time(),
            "step": self._last_step,
            "kind": kind,
            "seen": finding.seen,
            "since": finding.since,
            "look_at": finding.look_at,
        }
        text = f"alert, {kind.replace('_', ' ')}: {finding.seen}; since {finding.since}. Look at: {finding.look_at}"
        self._tell(text)
        with boundary() as caught, self._path.open("ab") as file:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if caught.error is not None and not self._unwritten:
            self._unwritten = True
            self._tell(f"{self._path.name} does not have this alert: {caught.error}; the run goes on")
        self._send(row)
        if self._webhook:
            self._webhook.post({**row, "run": self._run, "text": text})


def make_detectors(config: Config) -> list[Detector]:
    """A detector for each kind that is on, causes before their consequences."""
    alerts, group_size = config.telemetry.alerts, config.rollouts.group_size
    found = [
        alerts.not_finite and NotFinite(),
        alerts.dead_worker and DeadWorkers(),
        alerts.stalled_rollouts and StalledRollouts(alerts.stalled_rollouts, config.buffer.max_lag),
        alerts.long_wait and LongWait(alerts.long_wait),
        alerts.abort_storm and AbortStorm(alerts.abort_storm, group_size),
        alerts.reward_collapse and RewardCollapse(alerts.reward_collapse),
        alerts.not_learning and NotLearning(alerts.not_learning, group_size),
        alerts.throughput_drop and ThroughputDrop(alerts.throughput_drop),
        alerts.staleness_rise and StalenessRise(alerts.staleness_rise),
        alerts.length_bias and LengthBias(alerts.length_bias),
        alerts.kv_saturation and KvSaturation(alerts.kv_saturation),
        alerts.host_memory_slope and HostMemorySlope(alerts.host_memory_slope),
    ]
    return [detector for detector in found if isinstance(detector, Detector)]


def make_webhook(setting: str | None, tell: Callable[[str], None]) -> Webhook | None:
    """What posts alerts to `telemetry.alert_webhook`; None where it is null."""
    return Webhook(webhook_url(setting), POST_TIMEOUT_S, tell) if setting else None
