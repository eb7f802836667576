"""Runs that nobody ran: the rows, samples and lanes of hours, made in seconds, healthy but noisy.

What is noisy in real runs is noisy here: throughput drifts with the machine and has slow steps, rewards are means of few coin
flips, waits have heavy tails, memory fills up at first and then moves up and down, some attempts fail. A fault changes one of
these from a step on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from redline.telemetry.alerts import Alerts, Detector
from redline.telemetry.spans import LaneState, OpenSpan
from redline.telemetry.stalls.activity import Activity
from redline.telemetry.workers import WorkerState

GIB = 2**30
GROUPS, GROUP_SIZE = 8, 8
STEP_S = 20.0
SAMPLES_PER_STEP = 4
"""Fewer than a real run takes, which makes each noisier."""


@dataclass
class World:
    """What the machine and the policy are like; a fault changes it."""

    engine_speed: float = 1.0
    trainer_speed: float = 1.0
    success: float = 0.2
    failure: float = 0.02
    lag: float = 1.0
    stale_groups: int = 0
    """Dropped in each step."""
    kv_use: float = 0.6
    leak_bytes_per_s: float = 0.0
    groups: int = GROUPS
    wait_s: dict[tuple[str, str], float] = field(
        default_factory=lambda: {("main", "wait.for_rollouts"): 1.0, ("rollouts", "wait.for_weights"): 0.5}
    )
    """Typical seconds of each wait in a step."""
    row: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of a row."""
    workers: list[WorkerState] = field(default_factory=lambda: [WorkerState("rollouts", True)])


Fault = Callable[[World, int], None]
"""Called before each step; changes the world when its time has come."""


def run(detectors: list[Detector], steps: int, seed: int, folder: Path, fault: Fault = lambda world, step: None) -> list[str]:
    """The kinds of the alerts that a run raises, in order."""
    alerts = Alerts(detectors, folder / f"alerts-{seed}.jsonl")
    for kind, value, now in events(steps, seed, fault):
        if kind == "step":
            alerts.step(value, now)
        elif kind == "sample":
            alerts.sample(value)
        else:
            alerts.tick(now)
    path = folder / f"alerts-{seed}.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.exists() else []


def events(steps: int, seed: int, fault: Fault) -> Iterator[tuple[str, dict[str, Any], Activity]]:
    rng, world, totals = np.random.default_rng(seed), World(), _Totals()
    drift, now, dropped = 0.0, 1_000_000.0, 0
    for step in range(1, steps + 1):
        fault(world, step)
        drift = 0.95 * drift + rng.normal(0, 0.05 * np.sqrt(1 - 0.95**2))
        waits = {wait: typical * float(rng.lognormal(0, 0.7)) for wait, typical in world.wait_s.items()}
        for part in range(SAMPLES_PER_STEP):
            now += STEP_S / SAMPLES_PER_STEP
            yield "sample", _sample(rng, world, now), Activity(now, 0.0)
            totals.add(waits, 1 / SAMPLES_PER_STEP)
            yield "tick", {}, totals.activity(now, world, waits if part < 2 else {})
        dropped += world.stale_groups
        yield "step", {**_row(rng, world, step, drift, dropped), **world.row}, totals.activity(now, world, {})


def _row(rng: np.random.Generator, world: World, step: int, drift: float, dropped: int) -> dict[str, Any]:
    attempts = world.groups * GROUP_SIZE
    hiccup = 0.4 if rng.random() < 0.03 else 1.0
    trained = int(rng.integers(2, GROUPS + 1)) * 400 if rng.random() > 0.05 else 0
    speed = float(np.exp(drift)) * hiccup
    success = min(0.9, world.success * (1 + step / 2000))
    return {
        "step": step,
        "rollouts/groups": world.groups,
        "rollouts/groups_with_signal": round(world.groups * (1 - success**GROUP_SIZE - (1 - success) ** GROUP_SIZE)),
        "rollouts/reward_mean": float(rng.binomial(attempts, success)) / attempts if attempts else None,
        "rollouts/failures": int(rng.binomial(attempts, world.failure)),
        "engine/tokens_per_s": 9000 * world.engine_speed * speed * float(rng.lognormal(0, 0.08)),
        "engine/new_tokens": attempts * 32,
        "engine/kv_use_peak": float(np.clip(world.kv_use + rng.normal(0, 0.05), 0, 1)),
        "engine/preemptions": 0,
        "trainer/tokens_per_s": 5000 * world.trainer_speed * speed * float(rng.lognormal(0, 0.15)) if trained else 0.0,
        "trainer/tokens": 2 * trained,
        "trainer/trained_tokens": trained,
        "trainer/loss": float(rng.normal(0, 0.01)),
        "trainer/grad_norm": float(rng.lognormal(-2, 0.5)) if trained else 0.0,
        "trainer/entropy": float(rng.normal(2, 0.1)) if trained else None,
        "trainer/skipped": False,
        "buffer/lag_mean": float(np.clip(rng.normal(world.lag, 0.15), 0, None)),
        "buffer/target": 16,
        "buffer/dropped_stale": dropped + step // 50,
        "buffer/dropped_late": (late := world.stale_groups + (step % 50 == 0)),
        "buffer/dropped_attempts": late * GROUP_SIZE,
        "buffer/trained_groups": GROUPS,
        "buffer/dropped_tokens_mean": 640.0,
        "buffer/trained_tokens_mean": 32.0,
        "buffer/trained_reward_mean": 0.25,
        "run/step_s": STEP_S,
    }


def _sample(rng: np.random.Generator, world: World, now: float) -> dict[str, Any]:
    age = now - 1_000_000.0
    warm_up = 6 * GIB * (1 - np.exp(-age / 600))
    used = 10 * GIB + warm_up + world.leak_bytes_per_s * age + rng.normal(0, 0.3 * GIB)
    return {
        "time": now,
        "host/rss_bytes": used,
        "host/children_rss_bytes": 0,
        "host/available_bytes": max(0.0, 64 * GIB - used),
        "host/total_bytes": 64 * GIB,
    }


@dataclass
class _Totals:
    """What the lanes have spent so far."""

    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: {"main": {}, "rollouts": {}})

    def add(self, waits: dict[tuple[str, str], float], share: float) -> None:
        for (lane, name), value in waits.items():
            rows = self.seconds[lane]
            rows[name] = rows.get(name, 0.0) + value * share
        main = self.seconds["main"]
        main["trainer.forward"] = main.get("trainer.forward", 0.0) + STEP_S * share

    def activity(self, now: float, world: World, waiting: dict[tuple[str, str], float]) -> Activity:
        """`waiting`: the waits that are going on."""
        open_waits = dict(waiting)
        lanes = [
            LaneState(lane, None, None, True, {}, 0, "unaccounted", [OpenSpan(open_waits.get(lane, "trainer.forward"), 0, {})])
            for lane in self.seconds
        ]
        totals = {lane: dict(rows) for lane, rows in self.seconds.items()}
        return Activity(now, 0.1, lanes, totals, list(world.workers))
