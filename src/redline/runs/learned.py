"""Whether a run learned, in one sentence and a few figures: what its page opens with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redline.runs.columns import Columns, Json
from redline.telemetry.summary.failed_attempts import reaches_target
from redline.telemetry.summary.held_out import Evaluation, HeldOut
from redline.telemetry.summary.learning import Learning

Row = Mapping[str, Any]
_OPENINGS = {
    "rose": "It learned",
    "fell": "It got worse",
    "unclear": "It is not clear that it learned",
    "same": "It did not get better",
    "once": "Not known yet",
}
_OF_STEPS = (
    "rollouts/attempts",
    "rollouts/failures",
    "rollouts/groups",
    "rollouts/groups_with_signal",
    "rollouts/reward_mean",
    "rollouts/reward_std",
    "rollouts/truncated_fraction",
    "trainer/grad_norm",
    "trainer/learning_rate",
    "trainer/skipped",
    "trainer/updates",
)
_SHARE_OF_STEPS = 10
"""The first and the last tenth of the steps are compared where nothing is held out."""


class Learned:
    """Collects the rows of a run as they come, and says what was learned so far."""

    def __init__(self, group_size: int, target: float | None) -> None:
        """`target` is `rollouts.evaluation.stop_at`."""
        self._learning = Learning((), group_size)
        self._is_told = False
        """Rows say whether weights moved; those of other versions may not."""
        self._target = target
        self._first: Evaluation | None = None
        self._last: Evaluation | None = None
        self._reached_at: int | None = None

    def add_step(self, row: Row) -> None:
        """Take a row of metrics.jsonl."""
        known = {key: row[key] for key in _OF_STEPS if isinstance(row.get(key), int | float)}
        self._is_told |= "trainer/learning_rate" in known
        self._learning.take(known)

    def add_evaluation(self, row: Row) -> None:
        """Take a row of evaluations.jsonl."""
        found = Evaluation.read(row)
        self._first, self._last = self._first or found, found or self._last
        if self._reached_at is None and reaches_target(row, self._target):
            self._reached_at = row["step"]

    def document(self, steps: Columns, *, is_running: bool) -> dict[str, Json]:
        """Return the sentence, the held-out figures, and what became of the target, for a page."""
        held_out = HeldOut(self._first, self._last) if self._first and self._last else None
        word, headline = self._verdict(held_out, steps, is_running)
        target = None if self._target is None else {"reward": self._target, "reached_at": self._reached_at}
        return {"word": word, "headline": headline, "held_out": held_out.as_json() if held_out else None, "target": target}

    def _verdict(self, held_out: HeldOut | None, steps: Columns, is_running: bool) -> tuple[str, str]:
        if self._is_told and self._learning.why_not is not None:
            return "nothing", f"Nothing was learned{' so far' if is_running else ''}: {self._learning.why_not}."
        if held_out is not None:
            return held_out.word, f"{_OPENINGS[held_out.word]}: {held_out.sentence}."
        return "not held out", _sampled(steps)


def _sampled(steps: Columns) -> str:
    """What the reward of sampled attempts says, for want of held-out tasks."""
    count = max(1, len(steps) // _SHARE_OF_STEPS)
    first, last = steps.head_mean("rollouts/reward_mean", count), steps.tail_mean("rollouts/reward_mean", count)
    if first is None or last is None or len(steps) < 2:
        return "Nothing was evaluated, and too few steps are done to tell from what was sampled."
    of = "the first and the last step" if count == 1 else f"means of the first and the last {count:,} steps"
    return f"Nothing was held out; the reward of sampled attempts went from {first:.3f} to {last:.3f} ({of})."
