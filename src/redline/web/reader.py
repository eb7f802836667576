"""One run, read as it grows: its files → a JSON document, or what is new in it since a cursor.

    cursor  "3.120.40.2.1.9f3a"   epoch, rows of metrics, of samples, of evaluations, of alerts, digest of the head

The head is small and changes with every step; the rows are many and never change. A cursor of another epoch (the run was
resumed and its logs were cut, or the server was started anew) gets everything.
"""

from __future__ import annotations

import json
import math
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.telemetry import Ledger, RunFolder
from redline.telemetry.failure import read_failure
from redline.telemetry.timeline import bottleneck, in_words, phase_of, step_phases
from redline.web.columns import Columns, Json
from redline.web.status import is_closed, status_of
from redline.web.tail import Tail
from redline.web.targets import judged
from redline.web.verdict import bound_of

RECENT_STEPS = 20
"""What `now` means: the bottleneck, the speed and the ETA of a run that goes on."""
_SPARK_POINTS = 120


@dataclass(slots=True, frozen=True)
class Cursor:
    """How much of a run somebody has."""

    epoch: str
    steps: int
    samples: int
    evaluations: int
    alerts: int
    head: str

    def __str__(self) -> str:
        return ".".join(map(str, (self.epoch, self.steps, self.samples, self.evaluations, self.alerts, self.head)))

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """None for what is not a cursor; a client may send anything."""
        try:
            epoch, steps, samples, evaluations, alerts, head = text.split(".")
            found = cls(epoch, int(steps), int(samples), int(evaluations), int(alerts), head)
        except ValueError:
            return None
        return found if min(found.steps, found.samples, found.evaluations, found.alerts) >= 0 else None


class RunReader:
    """Reads a run's files; safe to use from several threads."""

    def __init__(self, path: Path, *, keep_rows: int | None = 1000) -> None:
        """`keep_rows` of the last rows are kept whole, to be held against the targets; None keeps all."""
        self.folder = RunFolder.open(path)
        self._lock = threading.Lock()
        self._keep_rows = keep_rows
        self._tails = {
            name: Tail(self.folder.path / f"{name}.jsonl") for name in ("metrics", "samples", "evaluations", "alerts")
        }
        self._num_resets = 0
        self._forget()

    def _forget(self) -> None:
        self._epoch = f"{time.time_ns():x}-{self._num_resets}"
        self._num_resets += 1
        self.steps, self._samples = Columns("step"), Columns("time")
        self._evaluations: list[dict[str, Any]] = []
        self._alerts: list[dict[str, Any]] = []
        self._rows: deque[dict[str, Any]] = deque(maxlen=self._keep_rows)
        self._sample_rows: deque[dict[str, Any]] = deque(maxlen=self._keep_rows)
        self._phases: Counter[str] = Counter()
        self._judged: tuple[tuple[int, int], list[dict[str, Json]]] | None = None
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)

    @property
    def model(self) -> str:
        return str(_get(_json_file(self.folder.config), "model", "path", ""))

    @property
    def seed(self) -> int:
        return int(_get(_json_file(self.folder.config), "run", "seed", 0))

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refresh(self) -> None:
        """Take in what the files have gained."""
        found = {name: tail.read() for name, tail in self._tails.items()}
        if any(restarted for restarted, _ in found.values()):
            self._forget()
            for name, tail in self._tails.items():
                if not found[name][0]:
                    self._tails[name] = tail = Tail(self.folder.path / f"{name}.jsonl")
                    found[name] = tail.read()
        for row in found["metrics"][1]:
            self._take_step(row)
        for row in found["samples"][1]:
            self._samples.add(row)
            self._sample_rows.append(row)
        self._evaluations += found["evaluations"][1]
        self._alerts += found["alerts"][1]

    def _take_step(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        phases = step_phases(row)
        self._recent.append(phases)
        self._phases.update(phases)
        # The charts' timeline, for rows that were written before there was one.
        self.steps.add({**{f"timeline/{phase}_s": seconds for phase, seconds in phases.items()}, **row})

    # ── what a page shows ──────────────────────────────────────────────────────────────────────────────────────────────

    def document(self, after: str = "") -> dict[str, Json]:
        """Everything, or what the holder of a cursor lacks."""
        with self._lock:
            self._refresh()
            have = Cursor.parse(after)
            if have is None or have.epoch != self._epoch:
                have = None
            head = self._head()
            digest = f"{zlib.crc32(json.dumps(head, sort_keys=True).encode()):x}"
            counts = (len(self.steps), len(self._samples), len(self._evaluations), len(self._alerts))
            now = Cursor(self._epoch, *counts, digest)
            document: dict[str, Json] = {"cursor": str(now), "whole": have is None}
            if have is None or have.head != digest:
                document["head"] = head
            if have is None:
                document["config"] = _json_file(self.folder.config)
                document["environment"] = _json_file(self.folder.environment)
                have = Cursor(self._epoch, 0, 0, 0, 0, "")
            for name, columns, start in (("steps", self.steps, have.steps), ("samples", self._samples, have.samples)):
                if len(columns) > start:
                    document[name] = columns.since(start)
            for name, rows, start in (
                ("evaluations", self._evaluations, have.evaluations),
                ("alerts", self._alerts, have.alerts),
            ):
                if len(rows) > start:
                    document[name] = rows[start:]
            return document

    def summary(self) -> dict[str, Json]:
        """A line of the list of runs."""
        with self._lock:
            self._refresh()
            config = _json_file(self.folder.config)
            facts = self._facts(config)
            return {
                **facts,
                "reward": _thinned(self.steps.values.get("rollouts/reward_mean", ())),
                "evaluation": self._evaluations[-1].get("evaluation/reward_mean") if self._evaluations else None,
                "alerts": len(self._alerts),
            }

    def _head(self) -> dict[str, Json]:
        config, ledger = _json_file(self.folder.config), self._ledger()
        max_lag = _get(config, "buffer", "max_lag", 0)
        return {
            **self._facts(config),
            "verdict": asdict(bound_of(self._phases, ledger, max_lag)),
            "targets": self._targets(config),
            "ledger": _ledger_json(ledger) if ledger else None,
            "phases": dict(self._phases),
        }

    def _targets(self, config: Mapping[str, Any]) -> list[dict[str, Json]]:
        """Judged again when there is something new to judge."""
        seen = (len(self.steps), len(self._samples))
        if self._judged is None or self._judged[0] != seen:
            self._judged = (seen, judged(self._rows, self._sample_rows, config))
        return self._judged[1]

    def _facts(self, config: Mapping[str, Any]) -> dict[str, Json]:
        done = int(self.steps.values["step"][-1]) if len(self.steps) else 0
        total = _get(config, "run", "steps", 0)
        status = status_of(self.folder, done, total)
        step_s = self.steps.tail_mean("run/step_s", RECENT_STEPS)
        now = bottleneck(sum((Counter(phases) for phases in self._recent), Counter()))
        return {
            "name": self.folder.path.name,
            "status": status,
            "failure": _failure(self.folder) if status == "failed" else None,
            "steps_done": done,
            "total_steps": total,
            "model": _get(config, "model", "path", ""),
            "task": _task_name(config),
            "algorithm": _get(config, "trainer", "algorithm", ""),
            "max_lag": _get(config, "buffer", "max_lag", 0),
            "started": _json_file(self.folder.environment).get("started"),
            "updated": _mtime(self.folder.metrics) or _mtime(self.folder.config),
            "train_s": sum(value for value in self.steps.values.get("run/step_s", ()) if math.isfinite(value)),
            "step_s": step_s,
            "eta_s": (total - done) * step_s if step_s and status == "running" else None,
            "tokens_per_s": self.steps.tail_mean("engine/tokens_per_s", RECENT_STEPS),
            "bottleneck": {"phase": now[0], "words": in_words(now[0]), "share": now[1]} if now else None,
        }

    def _ledger(self) -> Ledger | None:
        """Of the last process, once it has closed."""
        if not is_closed(self.folder):
            return None
        try:
            return Ledger.from_json(json.loads(self.folder.ledger.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            return None


def _failure(folder: RunFolder) -> dict[str, Json] | None:
    found = read_failure(folder)
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


def _thinned(values: Iterable[float]) -> list[float | None]:
    """At most some dozens of points, each the mean of those it stands for."""
    found = [value for value in values if math.isfinite(value)]
    size = max(1, -(-len(found) // _SPARK_POINTS))
    return [round(sum(part) / len(part), 6) for i in range(0, len(found), size) if (part := found[i : i + size])]


def _task_name(config: Mapping[str, Any]) -> str:
    task = _get(config, "rollouts", "task", {})
    return str(task.get("dataset") or task.get("path") or task.get("kind") or "") if isinstance(task, dict) else ""


def _get(config: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    """A run may be of another version, or its config half-written."""
    found = config.get(section)
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, type(default)) else default


def _json_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
