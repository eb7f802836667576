"""An alert about what is trained on: groups that are dropped because they are late are the long ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from redline.telemetry.alerts.detector import Detector, Episode, Finding, Row, number


@dataclass(slots=True, frozen=True)
class _Step:
    """What became late in a step, and what it trained on."""

    step: int
    late: float
    """Groups."""
    trained: float
    """Groups."""
    attempts: float
    """Attempts of the late groups."""
    late_tokens: float
    """Mean of those attempts."""
    trained_tokens: float
    late_reward: float | None
    trained_reward: float | None
    timed_out: float
    """Groups up to this step, since the run began."""

    @staticmethod
    def of(row: Row) -> _Step | None:
        late, trained = number(row, "buffer/dropped_late"), number(row, "buffer/trained_groups")
        if late is None or trained is None:
            return None
        return _Step(
            row["step"],
            late,
            trained,
            number(row, "buffer/dropped_attempts") or 0.0,
            number(row, "buffer/dropped_tokens_mean") or 0.0,
            number(row, "buffer/trained_tokens_mean") or 0.0,
            number(row, "buffer/dropped_reward_mean"),
            number(row, "buffer/trained_reward_mean"),
            number(row, "buffer/dropped_timed_out") or 0.0,
        )


class LengthBias(Detector):
    """Groups are dropped as late, so what is trained on is not what the policy gives.

    Told when at least `LEAST` groups of `RECENT` steps and the share asked for were late, with the lengths and rewards of both
    sides. An attempt that was given up under way counts with the tokens it had until then: the bias is larger than it looks.
    """

    kind = "length_bias"
    RECENT = 16
    LEAST = 3

    def __init__(self, dropped_fraction: float) -> None:
        self._dropped_fraction = dropped_fraction
        self._recent: deque[_Step] = deque(maxlen=self.RECENT)
        self._episode = Episode(enter=1, leave=self.RECENT)

    def step(self, row: Row) -> Finding | None:
        found = _Step.of(row)
        if found is None:
            return None
        self._recent.append(found)
        late = sum(step.late for step in self._recent)
        share = late / max(1.0, late + sum(step.trained for step in self._recent))
        limit = self._dropped_fraction if not self._episode.is_on else self._dropped_fraction / 2
        if not self._episode.see(late >= self.LEAST and share > limit):
            return None
        return Finding(
            seen=f"{late:.0f} groups, {share:.1%} of the last {len(self._recent)} steps', were dropped as late;"
            f" {self._compared()}",
            since=f"step {self._recent[0].step}",
            look_at=self._look_at(),
        )

    def _compared(self) -> str:
        """Lengths and rewards of what was dropped beside what was trained on, and what follows."""
        attempts = sum(step.attempts for step in self._recent)
        dropped = sum(step.attempts * step.late_tokens for step in self._recent) / max(1.0, attempts)
        trained = sum(step.trained_tokens for step in self._recent) / len(self._recent)
        lengths = f"their attempts had at least {dropped:,.0f} tokens on average, those trained on {trained:,.0f}"
        if dropped > trained:
            return f"{lengths}{self._rewards()}: the training distribution is biased towards short answers"
        return f"{lengths}{self._rewards()}: what is trained on is not what was sampled"

    def _rewards(self) -> str:
        dropped = [step.late_reward for step in self._recent if step.late_reward is not None]
        trained = [step.trained_reward for step in self._recent if step.trained_reward is not None]
        if not dropped or not trained:
            return ""
        return f", with a mean reward of {sum(dropped) / len(dropped):.3g} beside {sum(trained) / len(trained):.3g}"

    def _look_at(self) -> str:
        first, last = self._recent[0], self._recent[-1]
        timed_out = last.timed_out - (0.0 if first.step <= 1 else first.timed_out)
        if timed_out >= sum(step.late for step in self._recent) / 2:
            return "buffer.group_timeout_s, which should be longer than the longest answers take; a reward that hangs"
        return "buffer.late_groups: wait, which drops none of them; or a larger buffer.max_lag, which gives them more time"
