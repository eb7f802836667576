"""What was dropped for coming too late, beside what was trained on: whether training sees the answers that the policy gives.

A group is late if it grew too old (`stale`, `overdue`) or took too long (`timed_out`). Long answers are late more often than
short ones, so late drops make what is trained on shorter than what was sampled. A group that was given up under way counts with
the tokens it had until then, which is less than its answers would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STALE = "stale"
"""Grew older than the lag budget."""
OVERDUE = "overdue"
"""Was under way when it grew so old that it could no longer be trained on."""
TIMED_OUT = "timed_out"
"""Was under way for longer than `buffer.group_timeout_s`."""
NO_SIGNAL = "no_signal"
"""Had no signal, and another task was attempted in its place."""
LATE = (STALE, OVERDUE, TIMED_OUT)


@dataclass(slots=True)
class LateDrops:
    """Late groups of one step."""

    groups: int = 0
    attempts: int = 0
    tokens: int = 0
    """Sampled by those attempts, until they were given up."""
    rewards: tuple[float, ...] = ()
    """Means of the groups that had one."""

    def add(self, tokens: Sequence[int], reward: float | None = None) -> None:
        """One group, with the tokens of each of its attempts."""
        self.groups += 1
        self.attempts += len(tokens)
        self.tokens += sum(tokens)
        self.rewards += () if reward is None else (reward,)

    def metrics(self, num_trained: int) -> dict[str, float]:
        """The row of the step that trained on `num_trained` groups. It has means only where something was dropped."""
        found: dict[str, float] = {
            "buffer/dropped_late": self.groups,
            "buffer/dropped_late_fraction": self.groups / max(1, self.groups + num_trained),
        }
        if self.attempts:
            found["buffer/dropped_attempts"] = self.attempts
            found["buffer/dropped_tokens_mean"] = self.tokens / self.attempts
        if self.rewards:
            found["buffer/dropped_reward_mean"] = sum(self.rewards) / len(self.rewards)
        return found
