"""The thread that looks at a run while it goes on, or does not: alerts and stalls.

    rows ──► Watchdog ──► Alerts
    clock ─► thread ──┬─► Alerts        what every lane is at, and new samples
                      └─► StallWatch    nothing moves

It opens no span: it is no part of the run. It asks the stages nothing that could make it wait, so that it goes on when they
do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.config.schema import Config
from redline.config.sections.alerts import AlertKind
from redline.errors import boundary
from redline.telemetry.alerts import Alerts, make_detectors, make_webhook
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.files.tail import Tail
from redline.telemetry.spans import Recorder
from redline.telemetry.stalls.activity import ActivityProbe
from redline.telemetry.stalls.watch import Stall, StallWatch

EVERY_S = 1.0
PATIENCE_S = 5.0
"""For the look under way, when all is to end."""


class Watchdog:
    """Implements `StepListener`."""

    name = "alerts"

    def __init__(
        self,
        recorder: Recorder,
        *,
        tell: Callable[[str], None] = lambda text: None,
        send: Callable[[Mapping[str, Any]], None] = lambda row: None,
        every_s: float = EVERY_S,
    ) -> None:
        """`tell` shows a line to a person; `send` gives an alert to the other listeners."""
        self._probe = ActivityProbe(recorder)
        self._tell = tell
        self._send = send
        self._every_s = every_s
        self._closing = threading.Event()
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._alerts: Alerts | None = None
        self._stalls: StallWatch | None = None
        self._samples: SampleTails | None = None

    def started(self, folder: RunFolder, config: Config) -> None:
        settings = config.telemetry
        self._alerts = Alerts(
            make_detectors(config),
            folder.alerts,
            tell=self._tell,
            send=self._send,
            webhook=make_webhook(settings.alert_webhook, self._tell),
            off=settings.alerts.off,
            run=folder.path.name,
        )
        self._samples = SampleTails(folder)
        if settings.stall_after_s != 0:
            self._stalls = StallWatch(folder.stalls, settings.stall_after_s)
            self._every_s = min(self._every_s, (settings.stall_after_s or EVERY_S) / 4)
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._thread.start()

    def begin(
        self, queues: Callable[[], Mapping[str, float]], elsewhere: Callable[[], Mapping[str, Sequence[str]]] = dict
    ) -> None:
        """Note that the stages are there. `queues` gives the depth of every queue, by its name, and `elsewhere` the stacks of
        processes that are not among our descendants; neither may wait for anything."""
        if self._stalls:
            self._stalls.begin(queues, elsewhere)

    def step(self, row: Mapping[str, Any]) -> None:
        assert self._alerts is not None, "started first"
        if self._stalls:
            self._stalls.step()
        self._alerts.step(row, self._probe.look())

    def evaluation(self, row: Mapping[str, Any]) -> None:
        assert self._alerts is not None, "started first"
        self._alerts.evaluation(row)

    def alert(self, row: Mapping[str, Any]) -> None:
        pass  # it is ours

    def close(self) -> None:
        """Look once more: what ended the run may be what there is to tell."""
        self._closing.set()
        if self._thread:
            self._thread.join(PATIENCE_S)
        self.look()
        if self._stalls:
            self._stalls.close()
        if self._alerts:
            self._alerts.close()

    def look(self) -> None:
        assert self._alerts is not None
        assert self._samples is not None
        with self._looking:
            now = self._probe.look()
            for row in self._samples.read():
                self._alerts.sample(row)
            stall = self._stalls.tick(now, self._alerts.last_step) if self._stalls else None
            if stall:
                self._report(stall)
            self._alerts.tick(now)

    def _report(self, stall: Stall) -> None:
        assert self._alerts is not None
        kind: AlertKind = "stalled_rollouts" if stall.in_rollouts else "stall"
        if not self._alerts.found(kind, stall.finding):
            self._tell(f"{stall.finding.seen}; written to {stall.path}")

    def _work(self) -> None:
        while not self._closing.wait(self._every_s):
            with boundary() as caught:
                self.look()
            if caught.error is not None:
                self._tell(f"nobody looks for alerts and stalls any more: {type(caught.error).__name__}: {caught.error}")
                return


class SampleTails:
    """The samples of all machines of a run, as they come. What an earlier process saw is not this one's."""

    def __init__(self, folder: RunFolder) -> None:
        self._elsewhere = folder.samples_elsewhere
        self._tails: dict[Path, Tail] = {}
        for path in (folder.samples, *self._others()):
            self._tails[path] = Tail(path)
            self._tails[path].skip()

    def read(self) -> list[dict[str, Any]]:
        """Return the samples that were added since the last look."""
        for path in self._others():
            self._tails.setdefault(path, Tail(path))
        return [row for tail in self._tails.values() for row in _new_rows(tail)]

    def _others(self) -> list[Path]:
        return sorted(self._elsewhere.glob("*.jsonl"))


def _new_rows(samples: Tail) -> list[dict[str, Any]]:
    """Return the samples that were added since the last look; none where the log was thinned, since what it holds is known."""
    restarted, rows = samples.read()
    if restarted:
        samples.skip()
        return []
    return rows
