"""Alerts about the flow: what slows down, what grows old, what is full."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from redline.telemetry.alerts.detector import Detector, Episode, Finding, Row, number
from redline.telemetry.alerts.robust import median, spread


class ThroughputDrop(Detector):
    """Tokens per second fell and stay down: a CUSUM over the logarithm of each rate.

        z = (centre - log rate) / spread, between -4 and 4        score = max(0, score + z - 1)

    Centre and spread come from the steps before the score began to rise. A score above `THRESHOLD` is a change: steps that are
    slow now and then never get there. It is told where the median since then is lower by the share asked for; either way what
    comes next is measured against the new level.
    """

    kind = "throughput_drop"
    RATES: Mapping[str, tuple[str, str]] = {
        "engine/tokens_per_s": ("engine/new_tokens", "the engine's tokens per second"),
        "trainer/tokens_per_s": ("trainer/tokens", "the trainer's tokens per second"),
    }
    """Rate → (the work of a step, its name)."""
    WORK_STEPS = 8
    QUIET_STEPS = 16
    """After an alert: engine and trainer slow down for the same reason."""

    def __init__(self, drop: float) -> None:
        self._series = {key: _Cusum(drop) for key in self.RATES}
        self._recent_work: dict[str, deque[float]] = {key: deque(maxlen=self.WORK_STEPS) for key in self.RATES}
        self._most_work = dict.fromkeys(self.RATES, 0.0)
        self._quiet_until = 0

    def step(self, row: Row) -> Finding | None:
        found = []
        for key, series in self._series.items():
            work, name = self.RATES[key]
            rate = number(row, key)
            if rate is None or rate <= 0 or not self._is_full(key, number(row, work) or 0.0):
                continue
            if change := series.take(row["step"], math.log(rate)):
                found.append((name, *change))
        if not found or row["step"] < self._quiet_until:
            return None
        self._quiet_until = row["step"] + self.QUIET_STEPS
        since = min(step for _, step, _, _ in found)
        parts = [
            f"{name} fell by {1 - after / before:.0%}, from {before:,.0f} to {after:,.0f}" for name, _, before, after in found
        ]
        return Finding(
            seen=" and ".join(parts),
            since=f"step {since}",
            look_at="samples.jsonl around that step: clocks and power of the GPU, CPU of other processes, free memory; then"
            " rollouts/completion_tokens_mean and engine/preemptions, and `redline profile RUN`",
        )

    def _is_full(self, key: str, work: float) -> bool:
        """Whether a step has at least half the work that steps have had. What it costs to begin shows in the rate of a small
        one: answers that became short, or groups that taught nothing, are no fault."""
        recent = self._recent_work[key]
        recent.append(work)
        if len(recent) == recent.maxlen:
            self._most_work[key] = max(self._most_work[key], median(recent))
        return work > 0 and work >= self._most_work[key] / 2


class _Cusum:
    """The cumulative sum of one rate's deviations."""

    MIN_HISTORY = 24
    THRESHOLD = 16.0
    SLACK = 1.0
    CLIP = 4.0
    MIN_SPREAD = 0.05

    def __init__(self, drop: float) -> None:
        self._smallest = -math.log1p(-drop)
        self._history: deque[float] = deque(maxlen=128)
        self._since_rise: list[tuple[int, float]] = []
        self._score = 0.0

    def take(self, step: int, value: float) -> tuple[int, float, float] | None:
        """The step of the change, the rate before and after it, where there was one."""
        if len(self._history) < self.MIN_HISTORY:
            self._history.append(value)
            return None
        centre, scale = median(self._history), max(self.MIN_SPREAD, spread(self._history))
        z = max(-self.CLIP, min(self.CLIP, (centre - value) / scale))
        self._score = max(0.0, self._score + z - self.SLACK)
        self._since_rise.append((step, value))
        if self._score == 0.0:
            self._history += [value for _, value in self._since_rise]
            self._since_rise = []
        elif self._score > self.THRESHOLD:
            return self._change(centre)
        return None

    def _change(self, centre: float) -> tuple[int, float, float] | None:
        first, values = self._since_rise[0][0], [value for _, value in self._since_rise]
        after = median(values)
        self._history, self._since_rise, self._score = deque(values, maxlen=128), [], 0.0
        return (first, math.exp(centre), math.exp(after)) if centre - after >= self._smallest else None


class StalenessRise(Detector):
    """What is trained on grows older: rollouts fall behind the trainer.

    A buffer that lets more groups be under way makes them older on purpose, and is compared with itself from then on.
    """

    kind = "staleness_rise"
    RECENT = 8
    MIN_HISTORY = 16

    def __init__(self, steps: float) -> None:
        self._steps = steps
        self._lags: deque[tuple[int, float]] = deque(maxlen=self.RECENT)
        self._history: deque[float] = deque(maxlen=128)
        self._target: float | None = None
        self._rise = Episode(enter=2, leave=self.RECENT)

    def step(self, row: Row) -> Finding | None:
        lag, target = number(row, "buffer/lag_mean"), number(row, "buffer/target")
        if lag is None:
            return None
        if target != self._target and (self._target is None or (target or 0.0) > self._target):
            self._history.clear()
            self._lags.clear()
        self._target = target
        if len(self._lags) == self.RECENT and not self._rise.is_on:
            self._history.append(self._lags[0][1])
        self._lags.append((row["step"], lag))
        if len(self._history) < self.MIN_HISTORY:
            return None
        usual, now = median(self._history), median(value for _, value in self._lags)
        rise = max(self._steps, 4 * spread(self._history))
        if not self._rise.see(now > usual + (rise if not self._rise.is_on else rise / 2)):
            return None
        return Finding(
            seen=f"a batch is {now:.1f} steps old; it was {usual:.1f}",
            since=f"step {self._lags[0][0]}",
            look_at="rollout latency and buffer/in_flight: slow attempts hold groups back; fewer may be under way with"
            " buffer.depth, or more engines must make them",
        )


class KvSaturation(Detector):
    """The engine's KV cache is full: sequences wait for blocks, or are thrown out and computed again."""

    kind = "kv_saturation"
    ENTER = 3

    def __init__(self, use: float) -> None:
        self._use = use
        self._episode = Episode(enter=self.ENTER, leave=self.ENTER)

    def step(self, row: Row) -> Finding | None:
        use, preemptions = number(row, "engine/kv_use_peak"), number(row, "engine/preemptions") or 0.0
        if use is None:
            return None
        limit = self._use if not self._episode.is_on else 0.9 * self._use
        if not self._episode.see(use >= limit or preemptions > 0, row["step"]):
            return None
        thrown_out = f", and {preemptions:.0f} sequences were preempted in the last" if preemptions else ""
        return Finding(
            seen=f"the KV cache was {use:.0%} full in {self.ENTER} steps in a row{thrown_out}",
            since=f"step {self._episode.since}",
            look_at="engine.gpu_memory_utilization or engine.kv_cache_memory_bytes (more room), engine.max_num_seqs or"
            " rollouts.max_new_tokens (fewer or shorter sequences)",
        )
