"""Whether a run learned anything, told from its rows of metrics: they outlive a process, and a resumed run has them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
MANY_AT_A_BUDGET = 0.1
"""Share of attempts that ended at a budget from which on it may be why all scored alike."""


def has_signal(row: Row) -> bool | None:
    """Whether some attempt of a step was better than another that it is compared with; None where no group arrived in it."""
    if not row.get("rollouts/groups") or "rollouts/groups_with_signal" not in row:
        return None
    # A group that is its own baseline knows by itself. Where the batch is the baseline, attempts must differ somewhere in it.
    return bool(row.get("rollouts/groups_with_signal")) and row.get("rollouts/reward_std") != 0


def num_attempts(row: Row, group_size: int) -> int:
    """Attempts that arrived in a step; rows of earlier versions do not say, and then every group had `group_size`."""
    found = row.get("rollouts/attempts")
    return int(found) if isinstance(found, int | float) else int(row.get("rollouts/groups") or 0) * group_size


class Learning:
    """What came of all steps of a run."""

    def __init__(self, rows: Iterable[Row], group_size: int) -> None:
        """`rows` are those of metrics.jsonl, from the first step on."""
        self._group_size = group_size
        self.num_steps = 0
        self.moved_weights = False
        """Some step applied a gradient that was not zero."""
        self.steps_without_signal = 0
        """The last ones, in a row."""
        self.num_at_a_budget = self.num_used_up = 0
        """Attempts that some budget ended, and those among them that had used up one for the whole attempt."""
        self.most_turns = 0.0
        """Replies of the policy in one attempt."""
        self._skipped = self._groups = self._attempts = self._failed = 0
        self._had_signal = False
        self._reward = 0.0
        """Sum over groups of their mean."""
        for row in rows:
            self.take(row)

    def take(self, row: Row) -> None:
        """Count the next step."""
        # Of several updates of a step some may have been skipped, and the others taken.
        skipped = bool(row.get("trainer/skipped")) and not row.get("trainer/updates")
        norm = row.get("trainer/grad_norm")  # null where it is not finite
        self.num_steps += 1
        self._skipped += skipped
        self.moved_weights |= not skipped and bool(norm) and bool(row.get("trainer/learning_rate"))
        signal = has_signal(row)
        if signal is not None:
            self.steps_without_signal = 0 if signal else self.steps_without_signal + 1
            self._had_signal |= signal
            self._groups += row["rollouts/groups"]
            self._attempts += num_attempts(row, self._group_size)
            self._failed += row.get("rollouts/failures") or 0
            self._take_budgets(row)
            self._reward += (row.get("rollouts/reward_mean") or 0.0) * row["rollouts/groups"]

    def _take_budgets(self, row: Row) -> None:
        self.num_at_a_budget += round((row.get("rollouts/truncated_fraction") or 0.0) * num_attempts(row, self._group_size))
        self.num_used_up += int(row.get("rollouts/truncated") or 0)
        self.most_turns = max(self.most_turns, row.get("rollouts/turns_max") or 0.0)

    @property
    def is_cut_short(self) -> bool:
        """Whether so many attempts ended at a budget that this may be why nothing was learned."""
        return self.share_at_a_budget >= MANY_AT_A_BUDGET

    @property
    def share_at_a_budget(self) -> float:
        """Attempts that a budget ended / attempts."""
        return self.num_at_a_budget / max(1, self._attempts)

    @property
    def why_not(self) -> str | None:
        """Why the weights are still those that the run began with; None where they are not, or where no step was taken."""
        if self.moved_weights or not self.num_steps:
            return None
        if self._skipped == self.num_steps:
            return "every step was skipped, because its loss or gradient was not finite"
        if self._attempts and self._failed >= self._attempts:
            return "every attempt failed"
        if not self._had_signal:
            alike = f"in every group all attempts scored alike (mean reward {self._reward / max(1, self._groups):.3f})"
            return f"{alike}{self._at_a_budget()}"
        return "no step had a gradient"

    def _at_a_budget(self) -> str:
        if not self.is_cut_short:
            return ""
        share = "all" if self.num_at_a_budget >= self._attempts else f"{self.share_at_a_budget:.0%}"
        return f", and {share} of them ended at a budget"
