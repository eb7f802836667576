"""Back-pressure: how many groups may be under way or waiting at once.

Too few, and the trainer waits for data; too many, and they grow old before it comes to them. The controller sees one
`Observation` a step and moves its target, by little and seldom:

    up      the trainer waited for more than `STARVING` of the time, late groups apart: more groups would not make those come
            sooner. If it then steps no faster, rollouts cannot do more: back to where it was, and no further attempt for a
            while, each time for longer.
    down    the trainer hardly waited, and every batch of the window left groups behind: they would not have been missed.

It only computes: no clock, no randomness, so that simulations and recorded runs drive it as the loop does. How many workers
compute rewards is `worker_controller.py`'s to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline.buffer.admission import most_at_once
from redline.config.sections.buffer import BufferConfig

WINDOW = 8
"""Steps that a decision looks at."""
STARVING = 0.03
"""Share of the time that the trainer may wait before there should be more groups."""
DIRE = 0.25
"""Share of the time that needs no whole window to be believed."""
CALM = 0.01
"""Share of the time below which there may be fewer. Between the two nothing changes."""
CALM_WINDOWS = 2
"""Windows in a row that must be calm: up is quick, down is slow."""
MIN_GAIN = 0.4
"""Share of what a raise should have brought that it must bring to stand."""
PATIENCE = 3 * WINDOW
"""Steps without another move in a direction in which the last had to be undone; doubled each time, up to `MOST_PATIENCE`."""
MOST_PATIENCE = 16 * PATIENCE
MUCH_MORE = 0.1
"""Share of the time by which the trainer must wait longer than when a raise was in vain for another to be worth a try."""


@dataclass(slots=True, frozen=True)
class Observation:
    """How one step went."""

    trainer_wait_s: float
    """From asking for a batch to having it."""
    train_s: float
    """From having it to being done with it."""
    groups_left: int
    """Ready groups that were not needed, and wait for another step at least."""
    to_score_s: Sequence[float] = ()
    """Seconds for which 0, 1, 2, … groups were sampled and had no reward yet; none where no worker computes them."""
    late_wait_s: float = 0.0
    """Seconds of the trainer's wait in which enough groups were ready and others would have grown too old."""


@dataclass(slots=True, frozen=True)
class Decision:
    """A number before and after a step: groups that may be under way or waiting, or workers that compute rewards."""

    old: int
    new: int
    why: str
    is_news: bool = False
    """Somebody should hear of it, though nothing changes."""

    @property
    def is_change(self) -> bool:
        return self.new != self.old


@dataclass(slots=True, frozen=True)
class Trial:
    """A raise whose use is not yet known."""

    before: int
    """What was raised."""
    step_s: float
    """Mean length of a step that is short enough for it to stand."""
    full_step_s: float
    """Mean length of a step if it brings all that it can."""


@dataclass(slots=True)
class Brake:
    """Against moving to and fro: forbids a direction for a while, and for longer each time."""

    steps: int = 0
    """For which it still holds."""
    patience: int = PATIENCE

    def step(self) -> None:
        self.steps = max(0, self.steps - 1)

    def pull(self) -> None:
        self.steps, self.patience = self.patience, min(2 * self.patience, MOST_PATIENCE)


class Controller:
    """Holds the target between one batch of groups and the lag budget."""

    def __init__(self, groups_per_step: int, most: int, least: int | None = None) -> None:
        """Begins with two batches, one to train on and one under way. `least` = `most` fixes the target."""
        self._batch, self._most = groups_per_step, most
        self._least = groups_per_step if least is None else least
        self.target = max(self._least, min(2 * groups_per_step, most))
        self._seen: list[Observation] = []
        self._spare: list[int] = []
        """Groups that every batch left behind, of each of the last windows in which the trainer did not wait."""
        self._settling = 0
        """Steps that still run with groups begun under the old target."""
        self._trial: Trial | None = None
        self._up, self._down = Brake(), Brake()
        self._share_in_vain = 0.0
        """The share of time that the trainer waited when a raise did not help."""
        self._has_lowered = False
        """The last move was down."""

    @staticmethod
    def for_config(config: BufferConfig, groups_per_step: int) -> Controller:
        if config.depth is not None:
            return Controller(groups_per_step, config.depth * groups_per_step, config.depth * groups_per_step)
        return Controller(groups_per_step, most_at_once(config.max_lag, groups_per_step))

    @property
    def is_trying(self) -> bool:
        """Steps are other than before for a reason of its own."""
        return self._settling > 0 or self._trial is not None

    def look_again(self) -> None:
        """What it has seen since its last decision is no more."""
        self._seen = []

    def observe(self, observation: Observation, *, may_decide: bool = True) -> Decision:
        """Once a step; the new target holds from now on. Who may not decide sees more until he may."""
        if self._least == self._most:
            return Decision(self.target, self.target, "fixed")
        self._up.step()
        self._down.step()
        if self._settling:
            self._settling -= 1
            return Decision(self.target, self.target, "settling")
        self._seen.append(observation)
        share = share_waited(self._seen, but_late=True)
        if not may_decide or len(self._seen) < self._steps_needed(share):
            return Decision(self.target, self.target, "watching")
        decision = Decision(self.target, *self._decide(share))
        self.look_again()
        if decision.is_change:
            self.target, self._spare = decision.new, []
            self._settling = math.ceil(max(decision.old, decision.new) / self._batch)
        return decision

    def _steps_needed(self, share: float) -> int:
        """Steps to see before a decision: fewer where there is no doubt, and more before a raise is undone."""
        if self._trial is None:
            return WINDOW if share < DIRE else WINDOW // 2
        return WINDOW if mean_step_s(self._seen) < self._trial.full_step_s else 2 * WINDOW

    def _decide(self, share: float) -> tuple[int, str]:
        """The new target, from the share of the time that the trainer waited, and why."""
        trial, self._trial = self._trial, None
        if trial is not None and mean_step_s(self._seen) > trial.step_s:
            self._up.pull()
            self._share_in_vain = share
            return trial.before, f"{self.target - trial.before} more groups made steps no shorter"
        waited = f"the trainer waited for {share:.0%} of the time"
        spare = min(o.groups_left for o in self._seen)
        self._spare = [*self._spare, spare][-CALM_WINDOWS:] if share < CALM else []
        if share > STARVING:
            return self._raised(share, waited)
        if len(self._spare) == CALM_WINDOWS and min(self._spare) and not self._down.steps:
            self._has_lowered = True
            fewer = min(math.ceil(min(self._spare) / 2), self._batch, self.target - self._least)
            return self.target - fewer, f"every batch left {min(self._spare)} groups or more waiting"
        return self.target, waited

    def _raised(self, share: float, waited: str) -> tuple[int, str]:
        """If each group takes as long as before, 1 / (1 - share) times as many keep the trainer busy."""
        if self.target == self._most:
            return self.target, f"{waited}, and the lag budget allows no more groups"
        if self._up.steps and share < self._share_in_vain + MUCH_MORE:
            return self.target, f"{waited}, and more groups were no help"
        if self._has_lowered:
            self._down.pull()
            self._has_lowered = False
        busy = max(0.01, 1 - share)
        wanted = max(self.target * share / busy, self._batch / 2)  # less would be lost in the noise
        more = min(math.ceil(wanted), self._batch, self._most - self.target)
        gain = min(share, more / (self.target + more))
        step_s = mean_step_s(self._seen)
        self._trial = Trial(self.target, step_s * (1 - MIN_GAIN * gain), step_s * (1 - gain))
        return self.target + more, waited


class Waits:
    """Times the steps for the controller. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at: float | None = None
        self._taken_at = 0.0
        self._trainer_wait_s = self._late_wait_s = 0.0
        self._late_since: float | None = None

    def trainer_is_free(self) -> None:
        """It asks for a batch, perhaps not for the first time."""
        if self._free_at is None:
            self._free_at = self._clock()

    def late_groups_are_waited_for(self) -> None:
        """From now on, or from before, until the batch is taken."""
        if self._late_since is None:
            self._late_since = self._clock()

    def batch_is_taken(self) -> None:
        self._taken_at = self._clock()
        self._trainer_wait_s = 0.0 if self._free_at is None else self._taken_at - self._free_at
        self._late_wait_s = 0.0 if self._late_since is None else self._taken_at - self._late_since

    def step_is_done(self, groups_left: int, to_score_s: Sequence[float]) -> Observation:
        self._free_at = self._late_since = None
        train_s = self._clock() - self._taken_at
        return Observation(self._trainer_wait_s, train_s, groups_left, to_score_s, self._late_wait_s)


def mean_step_s(seen: Sequence[Observation]) -> float:
    """Mean length of a step."""
    return sum(o.trainer_wait_s + o.train_s for o in seen) / len(seen)


def share_waited(seen: Sequence[Observation], *, but_late: bool = False) -> float:
    """The share of its time that the trainer waited; with `but_late`, waits for late groups do not count."""
    total = mean_step_s(seen) * len(seen)
    waited = sum(o.trainer_wait_s - (o.late_wait_s if but_late else 0.0) for o in seen)
    return waited / total if total else 0.0
