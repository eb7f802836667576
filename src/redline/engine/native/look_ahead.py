"""How much the next step launches: for how many decode steps the device is on its own, and what is guessed in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from redline.engine.native.in_flight import InFlight
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Runner
from redline.engine.native.scheduler import Plan, Scheduler
from redline.engine.native.sequence import Sequence
from redline.engine.native.speculation.costs import StepClock, Timed
from redline.engine.native.speculation.speculation import Speculation

GUESSING_STEPS = 4
"""Steps per launch where the device guesses: rows whose guesses fail are noticed after two launches."""
MANY_ENDS = 8
"""A launch ends with the step after which one row in so many has all of its tokens: the host sees them off while the others go
on, and not all of them at the end."""


@dataclass(slots=True, frozen=True)
class Ahead:
    """The next launch, as far as it is not the scheduler's to decide."""

    num_steps: int = 1
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Tokens to verify, which the host has guessed."""
    guesses: dict[Sequence, int] = field(default_factory=dict)
    """How many tokens the device is to guess in each step."""


class LookAhead:
    """Decides it, step by step, and hears how long each took. Books room with the scheduler for all that may come of it."""

    def __init__(
        self, rows: Rows, scheduler: Scheduler, speculation: Speculation, in_flight: InFlight, runner: Callable[[], Runner]
    ) -> None:
        """`runner` returns what runs on the device now."""
        self._rows, self._scheduler, self._speculation = rows, scheduler, speculation
        self._in_flight, self._runner = in_flight, runner
        self._clock = StepClock()

    def decide(self, version: int) -> Ahead:
        """What the next step is to launch. Waits for the device where the host guesses tokens; `version` is that of the
        weights now."""
        drafts = self._drafts(version)
        return Ahead(drafts=drafts) if drafts else self._guesses()

    def ended(self, plan: Plan, began: float, *, runs_ahead: bool, has_waited: bool, was_held_up: bool) -> None:
        """A step has launched this plan, from a moment of `time.perf_counter` on. `has_waited`: it took in an earlier one;
        `was_held_up`: a graph was captured in it."""
        timed = _timed(plan)
        done = self._clock.step(timed, began, runs_ahead=runs_ahead, has_waited=has_waited, was_held_up=was_held_up)
        if done is not None:
            self._speculation.took(*done)

    def _drafts(self, version: int) -> dict[Sequence, list[int]]:
        """Tokens to verify in the next step; none where there is no room for them."""
        scheduler, most = self._scheduler, self._runner().most_verified
        if self._runner().guesses_itself or not self._speculation.may_draft(len(scheduler.decoding), most):
            return {}
        if self._in_flight and not self._speculation.drafts(scheduler.decoding, most):
            return {}  # by what is known of them so far; the device goes on meanwhile
        self._in_flight.collect(0, version)  # the newest tokens say what may come next
        drafts = self._speculation.drafts(scheduler.decoding, most)
        scheduler.reserve_for({sequence: len(draft) for sequence, draft in drafts.items()})
        if scheduler.can_grow(1):
            return drafts
        scheduler.reserve_for({})
        return {}

    def _guesses(self) -> Ahead:
        """Steps in which the device guesses, plain ones where it does not or there is no room for that."""
        scheduler, num_steps, most = self._scheduler, self._num_steps(), self._runner().most_verified
        if not self._runner().guesses_itself or scheduler.is_crowded:
            return Ahead(num_steps)
        guesses, few = self._speculation.guesses(scheduler.decoding, most), min(num_steps, GUESSING_STEPS)
        scheduler.reserve_for({sequence: few * count for sequence, count in guesses.items()})
        if guesses and scheduler.can_grow(few):
            return Ahead(few, guesses=guesses)
        scheduler.reserve_for({})
        return Ahead(few if self._speculation.measures_plain(len(scheduler.decoding)) else num_steps)

    def _num_steps(self) -> int:
        """Steps to launch at once: one where prompts queue or somebody looks at every token, else as many as the longest may
        still take, or as there are until many rows end."""
        rows, max_steps = self._rows, self._runner().max_steps
        if max_steps == 1 or self._scheduler.is_crowded:
            return 1
        rows_B = self._scheduler.decoding_rows
        pieces_B = rows.streaming_R[rows_B]
        piece = int(pieces_B.min(initial=max_steps, where=pieces_B > 0))
        if piece == 1 or rows.has_stop_R[rows_B].any():
            return 1
        left_B = rows.limit_R[rows_B] - rows.launched_R[rows_B]
        return until_many_end(left_B, max(1, min(piece, int(left_B.max(initial=1)))))


def until_many_end(left_B: np.ndarray, most_steps: int) -> int:
    """After which of so many steps enough rows have all of their tokens, of which so many are left; else all of the steps."""
    ends_S = np.bincount(left_B[(left_B > 0) & (left_B <= most_steps)], minlength=most_steps + 1)[1:].cumsum()
    many_S = np.flatnonzero(ends_S * MANY_ENDS >= max(1, len(left_B)))
    return int(many_S[0]) + 1 if len(many_S) else most_steps


def _timed(plan: Plan) -> Timed | None:
    """What a step did, where it did nothing but decode."""
    if not plan.decode or plan.chunks:
        return None
    num_rows = len(plan.decode)
    num_guessed = sum(plan.guesses.get(sequence, 0) for sequence in plan.decode) if plan.guesses else 0
    num_drafted = sum(map(len, plan.drafts.values())) + num_guessed
    return Timed(num_rows, plan.num_steps, num_rows + num_drafted if num_drafted else 0)
