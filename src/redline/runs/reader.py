"""One run, read as it grows: its files → the JSON document of its page, or what is new in it since a cursor.

    cursor  "3.120.40.2.1.9f3a.160"   epoch, rows of metrics, of samples, of evaluations, of alerts, digest of the head, and
                                      how many points the page has to draw

The head is small and changes with every step; the rows are many and never change. A cursor of another epoch (the run was
resumed and its logs were cut, or the server was started anew) gets everything, and so does a page that has come to hold more
points than it can show: of a long run, everything is older rows in buckets and newer ones one by one (`columns.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.errors import boundary
from redline.runs.columns import MOST_POINTS, Columns, Json, is_finite, spread
from redline.runs.learned import Learned
from redline.runs.machines import machines_lately
from redline.runs.run import LogName, Run, setting
from redline.runs.targets import judged
from redline.telemetry import Ledger
from redline.telemetry.files.failure import RunFailure
from redline.telemetry.machine.samplers import LEFT_OUT
from redline.telemetry.summary.targets import Evidence
from redline.telemetry.summary.timeline import PREFIX, ROLLOUTS_PREFIX, bottleneck, in_words, phase_of, step_phases

_LOGS: tuple[LogName, ...] = ("metrics", "samples", "evaluations", "alerts")
RECENT_STEPS = 20
"""What `now` means: the bottleneck, the speed and the ETA of a run that goes on."""
MOST_HELD = 2 * MOST_POINTS
"""Points of metrics and samples, each, that a page may hold before it gets everything anew, in buckets."""
MOST_EVALUATIONS = 500
MOST_ALERTS = 500
"""The newest, of those that a page gets at once."""
_SPARK_POINTS = 120
Explain = Callable[[Run], Mapping[str, Json]]
"""What explains a run on its page: `lab.doctor` does, and whoever makes a reader brings it along."""
AGAIN = 1.1
"""A run is explained again when it has grown by this factor, and when it ends."""


@dataclass(slots=True, frozen=True)
class Cursor:
    """How much of a run somebody has."""

    epoch: str
    steps: int
    samples: int
    evaluations: int
    alerts: int
    head: str
    held: int
    """Points of metrics or of samples, whichever are more."""

    def __str__(self) -> str:
        return ".".join(map(str, (self.epoch, self.steps, self.samples, self.evaluations, self.alerts, self.head, self.held)))

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """None for what is not a cursor; a client may send anything."""
        try:
            epoch, steps, samples, evaluations, alerts, head, held = text.split(".")
            found = cls(epoch, int(steps), int(samples), int(evaluations), int(alerts), head, int(held))
        except ValueError:
            return None
        counts = (found.steps, found.samples, found.evaluations, found.alerts, found.held)
        return found if min(counts) >= 0 else None


class RunReader:
    """Reads a run's files, of which it keeps the numbers; safe to use from several threads."""

    def __init__(self, run: Run | Path, explain: Explain | None = None) -> None:
        """`run` is one that was opened, or the folder of one of ours."""
        self.run = run if isinstance(run, Run) else Run.open(run)
        self._explain = explain
        self.folder = self.run.folder
        self._lock = threading.Lock()
        self._num_resets = 0
        self._forget()

    def _forget(self) -> None:
        self._explained: tuple[int, bool, Mapping[str, Json]] = (0, False, {})
        """After how many steps, whether the run had ended, and what was said."""
        self._epoch = f"{time.time_ns():x}-{self._num_resets}"
        self._num_resets += 1
        self._tails = {name: self.run.tail(name) for name in _LOGS}
        self.steps, self._samples = Columns("step"), Columns("time")
        self._evaluations: list[dict[str, Any]] = []
        self._alerts: list[dict[str, Any]] = []
        self._evidence = Evidence()
        self._phases: Counter[str] = Counter()
        self._train_s = 0.0
        stop_at = setting(self.run.config, "rollouts", "evaluation", {}).get("stop_at")
        group_size = setting(self.run.config, "rollouts", "group_size", 0)
        self._learned = Learned(group_size, stop_at if isinstance(stop_at, int | float) else None)
        self._judged: tuple[tuple[int, int], list[dict[str, Json]]] | None = None
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)
        self._machines_seen: tuple[tuple[int, bool], list[dict[str, Json]]] | None = None

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refresh(self) -> None:
        """Take in what the files have gained."""
        for name in _LOGS:
            while self._take_block(name):
                pass

    def _take_block(self, name: LogName) -> bool:
        """Whether there may be more in that log. Where one was written anew, all are read again from the beginning."""
        restarted, rows = self._tails[name].read()
        if restarted and name == "samples":  # the sampler thins its own log now and then
            self._forget_samples()
        elif restarted:
            self._forget()
            self._refresh()
            return False
        take = {"metrics": self._take_step, "samples": self._take_sample, "evaluations": self._take_evaluation}.get(name)
        for row in rows:
            if take is None:
                self._alerts.append(row)
                continue
            with contextlib.suppress(TypeError, ValueError, ArithmeticError):  # values of other kinds than ours: no row
                take(row)
        return not self._tails[name].at_end

    def _take_step(self, row: dict[str, Any]) -> None:
        phases = step_phases(row)
        self._evidence.add_row(row, phases)
        self._recent.append(phases)
        self._phases.update(phases)
        seconds = row.get("run/step_s")
        if isinstance(seconds, int | float) and math.isfinite(seconds):
            self._train_s += seconds * row.get("run/steps", 1)
        if phases and f"timeline/{next(iter(phases))}_s" not in row:  # written before there was one
            row |= {f"timeline/{phase}_s": seconds for phase, seconds in phases.items()}
        self.steps.add(row)
        self._learned.add_step(row)

    def _take_sample(self, row: dict[str, Any]) -> None:
        self._samples.add(row)
        self._evidence.add_sample(row)

    def _take_evaluation(self, row: dict[str, Any]) -> None:
        """Its numbers; answers are no part of a chart."""
        known = {key: value for key, value in row.items() if is_finite(value)}
        self._learned.add_evaluation(known | {key: value for key, value in row.items() if isinstance(value, list)})
        self._evaluations.append(known)

    def _forget_samples(self) -> None:
        self._epoch = f"{time.time_ns():x}-{self._num_resets}"
        self._num_resets += 1
        self._samples = Columns("time")
        self._evidence.forget_samples()

    # ── what a page shows ──────────────────────────────────────────────────────────────────────────────────────────────

    def document(self, after: str = "") -> dict[str, Json]:
        """Everything, or what the holder of a cursor lacks."""
        with self._lock:
            self._refresh()
            have = Cursor.parse(after)
            head = self._head()
            digest = f"{zlib.crc32(json.dumps(head, sort_keys=True).encode()):x}"
            if have is None or have.epoch != self._epoch or have.held > MOST_HELD:
                document, held = self._whole()
            else:
                document, held = self._news(have)
            if have is None or document["whole"] or have.head != digest:
                document["head"] = head
            counts = (len(self.steps), len(self._samples), len(self._evaluations), len(self._alerts))
            return {"cursor": str(Cursor(self._epoch, *counts, digest, held)), **document}

    def _whole(self) -> tuple[dict[str, Json], int]:
        """Everything but the head, and how many points that is to draw."""
        document: dict[str, Json] = {"whole": True}
        document["config"] = self.run.config
        document["environment"] = self.run.environment
        document["evaluations"] = spread(self._evaluations, MOST_EVALUATIONS)
        document["alerts"] = self._alerts[-MOST_ALERTS:]
        held = 0
        for name, columns in (("steps", self.steps), ("samples", self._samples)):
            found = columns.whole()
            document[name], document[f"{name}_thinned"] = found.rows, found.thinned
            held = max(held, found.num_points)
        return document, held

    def _news(self, have: Cursor) -> tuple[dict[str, Json], int]:
        document: dict[str, Json] = {"whole": False}
        for name, columns, start in (("steps", self.steps, have.steps), ("samples", self._samples, have.samples)):
            if len(columns) > start:
                document[name] = columns.since(start)
        for name, rows, start in (("evaluations", self._evaluations, have.evaluations), ("alerts", self._alerts, have.alerts)):
            if len(rows) > start:
                document[name] = rows[start:]
        return document, have.held + max(len(self.steps) - have.steps, len(self._samples) - have.samples)

    def summary(self) -> dict[str, Json]:
        """A line of the list of runs."""
        with self._lock:
            self._refresh()
            config = self.run.config
            facts = self._facts(config)
            return {
                **facts,
                "reward": self.steps.means("rollouts/reward_mean", _SPARK_POINTS),
                "evaluation": self._evaluations[-1].get("evaluation/reward_mean") if self._evaluations else None,
                "alerts": len(self._alerts),
            }

    def _head(self) -> dict[str, Json]:
        config, ledger = self.run.config, self.run.ledger
        facts = self._facts(config)
        return {
            **facts,
            "learned": self._learned.document(self.steps, is_running=facts["status"] in ("starting", "running")),
            "verdict": asdict(self.run.bound(self._phases, ledger)),
            "doctor": self._doctor(ledger is not None),
            "targets": self._targets(config),
            "ledger": _ledger_json(ledger) if ledger else None,
            "phases": dict(self._phases),
            "alerts": len(self._alerts),
            "left_out": self.run.left_out(self._samples_left_out()),
            "machines": self._machines(ledger is not None),
        }

    def _machines(self, has_ended: bool) -> list[dict[str, Json]]:
        """What the machines beside rank 0's did lately; looked at with every step, and at the end."""
        seen = (len(self.steps), has_ended)
        if self._machines_seen is None or self._machines_seen[0] != seen:
            self._machines_seen = (seen, machines_lately(self.run.hosts()))
        return self._machines_seen[1]

    def _doctor(self, has_ended: bool) -> Mapping[str, Json]:
        """What explains the run; not anew for every step, since it reads all of them."""
        steps, ended, _ = self._explained
        if self._explain and (len(self.steps) > AGAIN * steps or ended != has_ended):
            self._explained = (len(self.steps), has_ended, self._said(self._explain))
        return self._explained[2]

    def _said(self, explain: Explain) -> Mapping[str, Json]:
        """What explains the run; nothing where that fails: the page is there for more."""
        found: Mapping[str, Json] = {}
        with boundary() as caught:
            found = explain(self.run)
            json.dumps(found, allow_nan=False)
        return {} if caught.error else found

    def _targets(self, config: Mapping[str, Any]) -> list[dict[str, Json]]:
        """Judged again when there is something new to judge."""
        seen = (len(self.steps), len(self._samples))
        if self._judged is None or self._judged[0] != seen:
            self._judged = (seen, [asdict(verdict) for verdict in judged(self._evidence, config)])
        return self._judged[1]

    def _facts(self, config: Mapping[str, Any]) -> dict[str, Json]:
        done = int(self.steps.values["step"][-1]) if len(self.steps) else 0
        total = setting(config, "run", "steps", 0)
        status = self.run.status_after(done, self._evaluations)
        step_s = self.steps.tail_mean("run/step_s", RECENT_STEPS)
        now = bottleneck(sum((Counter(phases) for phases in self._recent), Counter()))
        return {
            "name": self.folder.path.name,
            "status": status.state,
            "why": status.why,
            "failure": _failure(self.run.failure) if status.state == "failed" else None,
            "steps_done": done,
            "total_steps": total,
            "model": setting(config, "model", "path", ""),
            "task": _task_name(config),
            "algorithm": setting(config, "trainer", "algorithm", ""),
            "max_lag": setting(config, "buffer", "max_lag", 0),
            "started": self.run.environment.get("started"),
            "updated": _mtime(self.folder.metrics) or _mtime(self.folder.config),
            "train_s": self._train_s,
            "step_s": step_s,
            "eta_s": (total - done) * (self._pace_s() or step_s) if step_s and status.state == "running" else None,
            "tokens_per_s": self._tokens_per_s(),
            "bottleneck": {"phase": now[0], "words": in_words(now[0]), "share": now[1]} if now else None,
        }

    def _pace_s(self) -> float | None:
        """Seconds from the end of one recent step to the end of the next, with evaluations and checkpoints between them; None
        where the process that goes on has not taken two."""
        ended, began = (self.steps.values.get(f"run/{name}_s", array("d"))[-RECENT_STEPS - 1 :] for name in ("time", "began"))
        times = [end for end, start in zip(ended, began, strict=False) if start == began[-1] and math.isfinite(end)]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def _tokens_per_s(self) -> float | None:
        """What the engine sampled in the recent steps over its time in them. Beside the trainer steps differ by far."""
        lane = ROLLOUTS_PREFIX if f"{ROLLOUTS_PREFIX}generation_s" in self.steps.values else PREFIX
        return self.steps.tail_mean("engine/tokens_per_s", RECENT_STEPS, by=f"{lane}generation_s")

    def _samples_left_out(self) -> int:
        newest = self._samples.values.get(LEFT_OUT, ())[-1:]
        return int(max((value for value in newest if value == value), default=0))


def _failure(found: RunFailure | None) -> dict[str, Json] | None:
    return {"line": found.line, **asdict(found)} if found else None


def _ledger_json(ledger: Ledger) -> list[dict[str, Json]]:
    return [
        {
            "lane": name,
            "wall_ns": lane.wall_ns,
            "unaccounted_ns": lane.unaccounted_ns,
            "spans": [
                {"name": span, "ns": ns, "phase": phase_of(span)} for span, ns in sorted(lane.rows.items(), key=lambda r: -r[1])
            ],
        }
        for name, lane in ledger.lanes.items()
    ]


def _task_name(config: Mapping[str, Any]) -> str:
    """The name of the tasks, or of the environment that brings them."""
    task, environment = setting(config, "rollouts", "task", {}), setting(config, "rollouts", "environment", {})
    if isinstance(task, dict) and task:
        return str(task.get("dataset") or task.get("path") or task.get("kind") or "")
    return str(environment.get("name") or "") if isinstance(environment, dict) else ""


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
