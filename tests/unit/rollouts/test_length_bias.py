"""Answers whose lengths are log-normal, in simulated time around the real buffer: training must see what was sampled.

The lengths of a group follow from its number, and it takes as long as its longest answer, so each test knows the truth.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from redline.buffer.buffer import GroupBuffer
from redline.buffer.store.memory_store import MemoryStore
from redline.config.sections.buffer import BufferConfig
from redline.types import FinishReason, Trajectory, TrajectoryGroup, VersionSpan

BATCH = 8
ATTEMPTS = 2
MEAN_LOG, SPREAD_LOG = 5.0, 1.0
"""Of the logarithm of an answer's tokens: the median is 148, the longest percentile has 1,500 and more."""
TOKENS_PER_S = 150.0
TRAIN_S = 1.0
STEPS = 200


def tokens_of(number: int) -> list[int]:
    rng = Random(1000 + number)
    return [math.ceil(rng.lognormvariate(MEAN_LOG, SPREAD_LOG)) for _ in range(ATTEMPTS)]


def has_signal(number: int) -> bool:
    return Random(-number).random() < 0.7


@dataclass
class SimulatedRun:
    """The loop in simulated time; `late_groups` and the like go into the recipe of its buffer."""

    max_lag: int
    keys: dict[str, Any]
    extra_rounds: int = 0
    now: float = 0.0
    begun: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    under_way: list[tuple[float, int, int]] = field(default_factory=list)
    """When each ends, its number, and the version at which it was begun."""
    store: MemoryStore = field(default_factory=MemoryStore)

    def run(self, first: int, last: int, steps: int | None = STEPS) -> SimulatedRun:
        """From version `first` to `last`, of a run that has so many steps."""
        config = BufferConfig(max_lag=self.max_lag, **{"group_timeout_s": None} | self.keys)
        self.buffer = GroupBuffer(
            config,
            BATCH,
            self.store,
            max_extra_rounds=self.extra_rounds,
            clock=lambda: self.now,
            steps=steps,
            sampled_tokens=self.sampled_tokens,
        )
        self.buffer.resume(first)
        return self.run_on(first, last)

    def run_on(self, first: int, last: int) -> SimulatedRun:
        for version in range(first, last):
            self.take_in(version)
            while not self.buffer.has_batch(version):
                patience_s = self.buffer.patience_s
                until = min(self.under_way[0][0], math.inf if patience_s is None else self.now + patience_s + 1e-6)
                self.now = max(self.now, until)
                self.take_in(version)
            batch = self.buffer.next_batch(version)
            self.now += TRAIN_S
            self.trained += batch.indices
            self.buffer.trained(batch)
            self.rows.append(self.buffer.metrics)
        return self

    def take_in(self, version: int) -> None:
        while self.under_way and self.under_way[0][0] <= self.now:
            _, number, begun_version = heapq.heappop(self.under_way)
            self.buffer.offer(group(number, begun_version))
        given_up = set(self.buffer.cancel_late(version))
        self.under_way = [entry for entry in self.under_way if entry[1] not in given_up]
        heapq.heapify(self.under_way)
        for number in self.buffer.admit(version):
            self.begun.append(number)
            heapq.heappush(self.under_way, (self.now + max(tokens_of(number)) / TOKENS_PER_S, number, version))

    def sampled_tokens(self, number: int) -> list[int]:
        [end] = [end for end, other, _ in self.under_way if other == number]
        lengths = tokens_of(number)
        sampled = max(0, round(max(lengths) - (end - self.now) * TOKENS_PER_S))
        return [min(length, sampled) for length in lengths]

    @property
    def lengths(self) -> np.ndarray:
        """Of every answer that was trained on."""
        return np.array([tokens for number in self.trained for tokens in tokens_of(number)])


def attempt(tokens: int, version: int) -> Trajectory:
    return Trajectory(
        token_ids=np.ones(1 + tokens, dtype=np.int32),
        loss_mask=np.arange(1 + tokens) > 0,
        logprobs=np.zeros(1 + tokens, dtype=np.float32),
        versions=VersionSpan(version, version),
        finish_reason=FinishReason.STOP,
        text="",
        reward=1 / tokens,
    )


def group(number: int, version: int) -> TrajectoryGroup:
    attempts = [attempt(tokens, version) for tokens in tokens_of(number)]
    advantages = [1.0, -1.0] if has_signal(number) else [0.0] * ATTEMPTS
    return TrajectoryGroup("task", attempts, np.array(advantages, dtype=np.float32), number)


@cache
def simulated(max_lag: int, late_groups: str = "wait") -> SimulatedRun:
    return SimulatedRun(max_lag, {"late_groups": late_groups}).run(0, STEPS)


def ks_statistic(lengths: np.ndarray) -> float:
    """Kolmogorov and Smirnov's √n · D against the distribution that lengths were drawn from. Beyond 1.63 is less than 1% likely
    by chance, beyond 3 less than one in ten million."""
    ordered = np.sort(lengths)
    found = np.arange(1, len(ordered) + 1) / len(ordered)
    truth = np.array([0.5 * math.erfc(-(math.log(length) - MEAN_LOG) / SPREAD_LOG / math.sqrt(2)) for length in ordered])
    return float(np.abs(found - truth).max() * math.sqrt(len(ordered)))


# ── what is sampled is trained on ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_lag", [0, 1, 2, 4])
def test_the_lengths_trained_on_are_those_that_the_policy_gives(max_lag: int) -> None:
    run = simulated(max_lag)
    assert sorted(run.trained) == list(range(STEPS * BATCH)), "every group once, none of them left behind at the end"
    assert ks_statistic(run.lengths) < 1.63
    drawn = math.exp(MEAN_LOG + SPREAD_LOG**2 / 2)
    error = drawn * math.sqrt((math.exp(SPREAD_LOG**2) - 1) / len(run.lengths))
    assert abs(run.lengths.mean() - drawn) < 2.6 * error + 0.5, "beyond chance (1%), and half a token for rounding up"


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_dropping_late_groups_is_what_makes_lengths_shorter(max_lag: int) -> None:
    """The other way of `buffer.late_groups`, and proof that the test above would notice it."""
    run = simulated(max_lag, "drop")
    assert ks_statistic(run.lengths) > 3
    longest = sorted(run.begun, key=lambda number: max(tokens_of(number)))[-len(run.begun) // 10 :]
    trained = set(run.trained)
    assert sum(number in trained for number in longest) < 0.5 * len(longest), "of the longest tenth"
    assert run.lengths.mean() < 0.9 * simulated(max_lag).lengths.mean()


def test_a_lag_is_much_faster_than_lockstep_though_it_waits_for_long_answers() -> None:
    """1.6, 2.2 and 3.0 times as fast with a step of training that takes as long as 150 tokens of an answer."""
    speed_up = {lag: simulated(0).now / simulated(lag).now for lag in (1, 2, 4)}
    assert speed_up[1] > 1.5
    assert speed_up[2] > 2.0
    assert speed_up[4] > 2.7


@pytest.mark.parametrize(
    "keys", [{"order": "oldest_first"}, {"order": "signal_first"}, {"depth": 3}, {"max_reuses": 2}], ids=str
)
@pytest.mark.parametrize("extra_rounds", [0, 1])
def test_no_other_setting_leaves_a_group_with_signal_behind(keys: dict[str, Any], extra_rounds: int) -> None:
    """Dynamic sampling replaces groups without signal; every group with signal that was begun in time is trained on."""
    run = SimulatedRun(2, keys, extra_rounds=extra_rounds).run(0, 60, steps=None)
    at_the_end = {number for _, number, _ in run.under_way} | {info.index for info in run.store.ready()}
    assert {number for number in run.begun if has_signal(number)} - at_the_end <= set(run.trained)
    assert sum(row["buffer/dropped_late"] for row in run.rows) == 0
    uses = Counter(run.trained)
    assert max(uses.values()) <= 1 + keys.get("max_reuses", 0)


def test_a_run_that_is_killed_again_and_again_trains_on_every_group_once() -> None:
    """Resumed from two steps before it was killed: what was under way is attempted again, long or short."""
    run = SimulatedRun(2, {})
    checkpoint = 0
    for killed_at in (7, 13, 14, 30, 60):
        run.trained = run.trained[: checkpoint * BATCH]
        run.under_way = []
        run.run(checkpoint, killed_at, steps=60)
        checkpoint = killed_at - 2
    assert sorted(run.trained) == list(range(60 * BATCH))


def test_a_run_that_keeps_no_trajectories_goes_on_with_the_groups_that_were_under_way(tmp_path: Path) -> None:
    """Another process knows only what was written with the checkpoint: which groups were begun and not trained on."""
    killed = SimulatedRun(2, {}, store=MemoryStore(2, tmp_path / "under_way.json")).run(0, 10, steps=40)
    killed.store.flush()
    killed.run_on(10, 13)
    resumed = SimulatedRun(2, {}, store=MemoryStore(2, tmp_path / "under_way.json")).run(10, 40, steps=40)
    assert sorted(killed.trained[: 10 * BATCH] + resumed.trained) == list(range(40 * BATCH)), "each once, long or short"


# ── what is dropped is told ────────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_is_measured_apart_and_dropping_tells_lengths_and_rewards_of_both_sides() -> None:
    waiting, dropping = simulated(1).rows, simulated(1, "drop").rows
    assert sum(row["buffer/late_wait_s"] for row in waiting) > 0
    assert all(row["buffer/late_wait_s"] <= row["buffer/trainer_wait_s"] for row in waiting)
    assert all(row["buffer/late_wait_s"] == 0 for row in dropping)
    assert all("buffer/dropped_tokens_mean" not in row for row in waiting)
    by_reason = sum(dropping[-1][f"buffer/dropped_{reason}"] for reason in ("stale", "overdue", "timed_out"))
    assert sum(row["buffer/dropped_late"] for row in dropping) == by_reason > 100
    dropped = [row for row in dropping if row["buffer/dropped_late"]]
    attempts = sum(row["buffer/dropped_attempts"] for row in dropped)
    tokens = sum(row["buffer/dropped_tokens_mean"] * row["buffer/dropped_attempts"] for row in dropped) / attempts
    trained = float(np.mean([row["buffer/trained_tokens_mean"] for row in dropping]))
    assert trained == pytest.approx(simulated(1, "drop").lengths.mean())
    assert tokens > 1.3 * trained
    scored = [row for row in dropped if "buffer/dropped_reward_mean" in row]
    assert scored
    assert scored[0]["buffer/dropped_reward_mean"] < scored[0]["buffer/trained_reward_mean"], "rewards fall with length here"


def test_a_group_that_times_out_is_a_late_drop_with_what_it_had_sampled() -> None:
    run = SimulatedRun(1, {"group_timeout_s": 6.0}).run(0, 40, steps=None)
    timed_out = [number for number in run.begun if max(tokens_of(number)) / TOKENS_PER_S >= 6.0]
    last = run.rows[-1]
    assert last["buffer/dropped_timed_out"] > 0
    assert last["buffer/dropped_overdue"] == last["buffer/dropped_stale"] == 0
    assert not set(timed_out) & set(run.trained)
    dropped = [row for row in run.rows if row["buffer/dropped_late"]]
    assert all(0 < row["buffer/dropped_late_fraction"] < 1 for row in dropped)
    assert all(row["buffer/dropped_tokens_mean"] <= 6.0 * TOKENS_PER_S for row in dropped), "until then, no more"


def test_dropping_is_refused_in_lockstep_where_no_group_is_late() -> None:
    with pytest.raises(ValueError, match=r"late_groups = drop: in lockstep \(max_lag = 0\) no group is late"):
        BufferConfig(late_groups="drop")
    assert BufferConfig(max_lag=1, late_groups="drop").late_groups == "drop"
    assert BufferConfig(max_lag=1).late_groups == "wait"
