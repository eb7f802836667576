"""Alerts about what is learned: numbers that are none, rewards that collapse, attempts that fail."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import fmean

from redline.telemetry.alerts.detector import Detector, Episode, Finding, Row, number
from redline.telemetry.alerts.robust import step_noise
from redline.telemetry.summary.learning import MANY_AT_A_BUDGET, has_signal, num_attempts

ALWAYS = ("trainer/loss", "trainer/grad_norm")
"""Every step has them."""
OVER_TOKENS = ("trainer/entropy", "trainer/clip_fraction", "trainer/mismatch_kl", "trainer/max_ratio")
"""Means over trained tokens: a step without any has none."""


class NotFinite(Detector):
    """A loss, a gradient or a mean that is NaN or infinite; `metrics.jsonl` has them as null."""

    kind = "not_finite"

    def __init__(self) -> None:
        self._episode = Episode(leave=5)

    def step(self, row: Row) -> Finding | None:
        bad = sorted(set(_not_finite(row)))
        if not self._episode.see(bool(bad), row["step"]):
            return None
        skipped = "; the step was skipped" if row.get("trainer/skipped") else ""
        return Finding(
            seen=f"NaN or infinity in {', '.join(bad)}{skipped}",
            since=f"step {row['step']}",
            look_at="bad-steps/ in the run folder, where the trainer keeps the batch and names the tokens; then"
            " trainer.learning_rate, trainer.max_grad_norm and the rewards",
        )

    def evaluation(self, row: Row) -> Finding | None:
        value = row.get("evaluation/reward_mean")
        has_none = value is None and row.get("evaluation/failures") == row.get("evaluation/num_answers", -1)
        if has_none or (value is not None and math.isfinite(value)):
            return None
        if not self._episode.see(True, row["step"]):
            return None
        return Finding("NaN or infinity in evaluation/reward_mean", f"step {row['step']}", "what the task's `score` returns")


def _not_finite(row: Row) -> Iterator[str]:
    yield from (key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value))
    expected = [*ALWAYS, *(OVER_TOKENS if row.get("trainer/trained_tokens") else ())]
    if row.get("rollouts/groups") and not row.get("rollouts/failures"):  # where all attempts fail there is no mean
        expected.append("rollouts/reward_mean")
    yield from (key for key in expected if key in row and row[key] is None)
    if row.get("trainer/skipped"):
        yield "the gradient"


class RewardCollapse(Detector):
    """The mean reward fell far below the best that the run held for a while.

    Compared are the mean of the last `RECENT` steps and the best mean of any `BLOCK` before them. The fall must be a share of
    what there was to lose, and `ERRORS` standard errors.
    """

    kind = "reward_collapse"
    RECENT = 8
    BLOCK = 16
    ERRORS = 6.0

    def __init__(self, drop: float) -> None:
        self._drop = drop
        self._recent: deque[tuple[int, float]] = deque(maxlen=self.RECENT)
        self._older: deque[float] = deque(maxlen=self.BLOCK)
        self._noise: deque[float] = deque(maxlen=8 * self.BLOCK)
        self._best = -math.inf
        self._best_step = 0
        self._episode = Episode(enter=2, leave=self.RECENT)

    def step(self, row: Row) -> Finding | None:
        reward = number(row, "rollouts/reward_mean")
        if reward is None or not math.isfinite(reward):
            return None
        self._take(row["step"], reward)
        if len(self._noise) < self.BLOCK + self.RECENT:
            return None
        now, limit = fmean(value for _, value in self._recent), self._limit()
        # Over only once half of what was lost is back: on the edge of the limit an episode would begin again and again.
        bad = now < limit if not self._episode.is_on else now < (self._best + limit) / 2
        if not self._episode.see(bad, self._recent[0][0]):
            return None
        return Finding(
            seen=f"the mean reward of the last {self.RECENT} steps is {now:.3g}; it was {self._best:.3g} up to step"
            f" {self._best_step}",
            since=f"step {self._recent[0][0]}",
            look_at="`redline show RUN --step N` for what is sampled now; trainer/entropy, trainer/grad_norm and"
            " trainer/mismatch_kl around that step; checkpoints/ to go back to",
        )

    def _take(self, step: int, reward: float) -> None:
        if len(self._recent) == self.RECENT:
            last_step, value = self._recent[0]
            self._older.append(value)
            if len(self._older) == self.BLOCK and fmean(self._older) > self._best:
                self._best, self._best_step = fmean(self._older), last_step
        self._recent.append((step, reward))
        self._noise.append(reward)

    def _limit(self) -> float:
        error = step_noise(list(self._noise)) * math.sqrt(1 / self.RECENT + 1 / self.BLOCK)
        return self._best - max(self._drop * abs(self._best), self.ERRORS * error)


class NotLearning(Detector):
    """No attempt is better than the others that it is compared with, step after step: the gradient is zero."""

    kind = "not_learning"

    def __init__(self, steps: int, group_size: int) -> None:
        self._steps = steps
        self._group_size = group_size
        self._episode = Episode(enter=steps, leave=3)

    def step(self, row: Row) -> Finding | None:
        signal = has_signal(row)
        if signal is None or not self._episode.see(not signal, row["step"]):
            return None
        failed = (number(row, "rollouts/failures") or 0.0) / max(1, num_attempts(row, self._group_size))
        failures = f"; {failed:.0%} of the last step's attempts failed" if failed else ""
        cut = number(row, "rollouts/truncated_fraction") or 0.0
        cut_off = f"; {cut:.0%} of the last step's attempts ended at a budget" if cut >= MANY_AT_A_BUDGET else ""
        return Finding(
            seen=f"in {self._steps} steps in a row all attempts of every group scored alike, so that nothing was learned; the"
            f" mean reward is {number(row, 'rollouts/reward_mean') or 0.0:.3f}{failures}{cut_off}",
            since=f"step {self._episode.since}",
            look_at="`redline show RUN` for the answers and their rewards. Where the reward is as high as it gets, the run can"
            " end. Else: is `score` right, and are tasks easy enough that some attempts earn more than others? A larger"
            " rollouts.group_size or rollouts.temperature makes attempts differ",
        )


class AbortStorm(Detector):
    """Many more attempts fail, or are given up, than did before."""

    kind = "abort_storm"
    POOLED = 3
    """Steps that are judged together."""
    MIN_HISTORY = 8
    ERRORS = 5.0
    FROM_THE_START = 0.5
    """Share that is wrong without anything to compare it with."""

    def __init__(self, fraction: float, group_size: int) -> None:
        self._fraction = fraction
        self._group_size = group_size
        self._timed_out: float | None = None
        """Groups up to the last row, since the run began."""
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=self.POOLED)
        self._history: deque[tuple[float, float]] = deque(maxlen=64)
        """(failed, attempted) of older steps without a storm."""
        self._episode = Episode(enter=1, leave=self.POOLED)

    def step(self, row: Row) -> Finding | None:
        given_up = self._given_up(row)
        attempts = num_attempts(row, self._group_size) + given_up * self._group_size
        if not attempts:
            return None
        failed = min(attempts, (number(row, "rollouts/failures") or 0.0) + given_up * self._group_size)
        if len(self._recent) == self.POOLED and not self._episode.is_on:
            self._history.append(self._recent[0][1:])
        self._recent.append((row["step"], failed, attempts))
        if len(self._recent) < self.POOLED:
            return None
        share, limit = _share([part[1:] for part in self._recent]), self._limit()
        # One bad batch of three is a bad batch: the last one must be as bad as the three together.
        bad = (share > limit and failed / attempts > limit) if not self._episode.is_on else share > limit / 2
        if not self._episode.see(bad, self._recent[0][0]):
            return None
        usual = f"; {_share(self._history):.1%} did before" if self._history else ""
        reason = row.get("rollouts/failure_reason")
        most = f", most of the last with: {reason}" if reason else ""
        return Finding(
            seen=f"{share:.0%} of the attempts of the last {self.POOLED} steps failed or were given up{usual}{most}",
            since=f"step {self._recent[0][0]}",
            look_at="`redline show RUN --failures` for the reason of each: a reward that raises, an environment that is down,"
            " attempts that run out of time",
        )

    def _given_up(self, row: Row) -> float:
        """Groups of this step that did not come in time."""
        before, now = self._timed_out, number(row, "buffer/dropped_timed_out") or 0.0
        self._timed_out = now
        if before is None:  # of a resumed run earlier processes have given up most of them
            return now if row["step"] <= 1 else 0.0
        return max(0.0, now - before)

    def _limit(self) -> float:
        if len(self._history) < self.MIN_HISTORY:
            return self.FROM_THE_START
        usual = _share(self._history)
        attempts = sum(part[2] for part in self._recent)
        noise = math.sqrt(usual * (1 - usual) / attempts)
        return min(max(self._fraction, 2 * usual, usual + self.ERRORS * noise), (1 + usual) / 2)


def _share(parts: Iterable[tuple[float, float]]) -> float:
    parts = list(parts)
    return sum(failed for failed, _ in parts) / sum(attempted for _, attempted in parts)
