"""How many workers compute rewards at once.

Too few, and sampled groups wait for a worker while the trainer waits for groups. Too many, and some have nothing to do; where
rewards compute instead of waiting, they even take the interpreter from each other. It begins with one, sees the same
`Observation`s as the controller of the groups, and moves as that does:

    up      the trainer waited, and so did groups for a worker: to half as many again as keep up with a trainer that never
            waits. If steps are no shorter then, workers were not what was missing: back, and no further attempt for a while.
    down    fewer would have been enough for nearly all of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.buffer.control.groups import (
    CALM,
    CALM_WINDOWS,
    DIRE,
    MIN_GAIN,
    MUCH_MORE,
    STARVING,
    WINDOW,
    Brake,
    Controller,
    Decision,
    Observation,
    Trial,
    mean_step_s,
    share_waited,
)

SETTLING = 2
"""Steps after a move that still take groups which waited before it."""
WORTH_IT = 0.25
"""The least share of the trainer's wait in which groups wait for a worker. Below it, the trainer waits for something else."""
HEADROOM = 1.5
"""Workers in units of those that would always be busy: groups do not come evenly."""
GAIN_ENOUGH = 0.05
"""Share by which steps must be shorter, at most, for more workers to stand: one too many costs little, and is noticed later."""


class WorkerController:
    """Holds the number of workers between one and `most`."""

    def __init__(self, most: int) -> None:
        self.count = 1
        self.most = most
        self._seen: list[Observation] = []
        self._enough: list[int] = []
        """Workers that would have been enough, in each of the last windows."""
        self._settling = 0
        self._trial: Trial | None = None
        self._up, self._down = Brake(), Brake()
        self._share_in_vain = 0.0
        """The share of time that the trainer waited when more workers did not help."""
        self._share_tried = 0.0
        """The same, when more were last tried; it is less than in the end where the load has changed meanwhile."""
        self._raised_from = 0
        """By the last raise that may still turn out to be of no use."""
        self._has_lowered = False
        """The last move was down."""
        self._has_told = False
        """That it may not have as many as it wants."""

    @property
    def is_trying(self) -> bool:
        """Steps are other than before for a reason of its own."""
        return self._settling > 0 or self._trial is not None

    @property
    def may_raise(self) -> bool:
        """So far it looks as if there should be more, and there may be."""
        if not self._seen or self.count == self.most:
            return False
        share = share_waited(self._seen)
        return not self._is_held_back(share) and _is_short(share, sum(_shares(self._seen)[self.count + 1 :]))

    def look_again(self) -> None:
        """What it has seen since its last decision is no more."""
        self._seen = []

    def observe(self, observation: Observation) -> Decision:
        """Once a step; the new number holds from now on."""
        self._up.step()
        self._down.step()
        if self._settling:
            self._settling -= 1
            return self._same("settling")
        self._seen.append(observation)
        if self._trial is None and self._is_dire():
            self._seen = self._seen[-WINDOW // 2 :]
        elif len(self._seen) < self._steps_needed():
            return self._same("watching")
        decision = self._decide(share_waited(self._seen))
        self.look_again()
        if decision.is_change:
            self.count, self._enough, self._settling = decision.new, [], SETTLING
        return decision

    def _is_dire(self) -> bool:
        """In each of the last steps, whatever came before: a load that changes all at once is seen as what it is now."""
        last = self._seen[-WINDOW // 2 :]
        return len(last) == WINDOW // 2 and all(share_waited([o]) > DIRE for o in last)

    def _steps_needed(self) -> int:
        """As for groups: more before a raise is undone."""
        return WINDOW if self._trial is None or mean_step_s(self._seen) < self._trial.full_step_s else 2 * WINDOW

    def _decide(self, share: float) -> Decision:
        trial, self._trial = self._trial, None
        if trial is not None and mean_step_s(self._seen) > trial.step_s:
            self._was_in_vain(share)
            return Decision(self.count, trial.before, f"{self.count - trial.before} more workers made steps no shorter")
        load = _shares(self._seen)
        queued = sum(load[self.count + 1 :])
        self._enough = [*self._enough, _enough(load)][-CALM_WINDOWS:]
        if _is_short(share, queued):
            return self._raised(share, queued, load)
        if len(self._enough) == CALM_WINDOWS and max(self._enough) < self.count and not self._down.steps:
            self._has_lowered = True
            fewer = max(self._enough)
            if fewer <= self._raised_from:
                self._was_in_vain(share)
            return Decision(self.count, fewer, f"for {1 - CALM:.0%} of the time there was work for {fewer} at most")
        return self._same(f"the trainer waited for {share:.0%} of the time, groups for a worker for {queued:.0%}")

    def _was_in_vain(self, share: float) -> None:
        self._up.pull()
        self._share_in_vain = min(share, self._share_tried)
        self._raised_from = 0

    def _raised(self, share: float, queued: float, load: Sequence[float]) -> Decision:
        """Rewards take as many worker-seconds a step as before, and a step that does not wait is 1 - share as long."""
        waited = f"the trainer waited for {share:.0%} of the time, and groups for a worker for {queued:.0%}"
        if self.count == self.most:
            is_news, self._has_told = not self._has_told, True
            limit = f"rollouts.max_reward_workers allows no more than {self.most}"
            return Decision(self.count, self.count, f"{waited}; {limit}", is_news)
        if self._is_held_back(share):
            return self._same(f"{waited}, and more workers were no help")
        if self._has_lowered:
            self._down.pull()
            self._has_lowered = False
        busy = sum(min(count, self.count) * part for count, part in enumerate(load))
        new = min(math.ceil(HEADROOM * max(self.count, busy / max(0.01, 1 - share))), self.most)
        gain = min(share, queued * (1 - self.count / new))
        self._share_tried, self._raised_from = share, self.count
        step_s = mean_step_s(self._seen)
        self._trial = Trial(self.count, step_s * (1 - min(MIN_GAIN * gain, GAIN_ENOUGH)), step_s * (1 - gain))
        return Decision(self.count, new, waited)

    def _is_held_back(self, share: float) -> bool:
        return self._up.steps > 0 and share < self._share_in_vain + MUCH_MORE

    def _same(self, why: str) -> Decision:
        return Decision(self.count, self.count, why)


class Controllers:
    """Groups and workers, one at a time: tried at once, neither would be known to have helped."""

    def __init__(self, groups: Controller, workers: WorkerController) -> None:
        self._groups, self._workers = groups, workers
        self._starting = SETTLING if workers.most > 1 else 0
        """The first steps of a run are longer than others, and whatever was tried after them would seem to help."""

    def observe(self, observation: Observation) -> tuple[Decision, Decision]:
        """What is decided on groups, and on workers. Workers come first: where groups wait for one, more groups would too."""
        target, count = self._groups.target, self._workers.count
        if self._starting:
            self._starting -= 1
            return Decision(target, target, "starting"), Decision(count, count, "starting")
        if self._groups.is_trying:
            self._workers.look_again()
            return self._groups.observe(observation), Decision(count, count, "the number of groups comes first")
        workers = self._workers.observe(observation)
        if self._workers.is_trying:
            self._groups.look_again()
            return Decision(target, target, "the number of workers comes first"), workers
        return self._groups.observe(observation, may_decide=not self._workers.may_raise), workers


def _is_short(share: float, queued: float) -> bool:
    """There are too few workers, from the shares of the time that the trainer and groups waited for."""
    return share > STARVING and queued > max(STARVING, share * WORTH_IT)


def _shares(seen: Sequence[Observation]) -> list[float]:
    """Shares of the time in which 0, 1, 2, … groups were to be scored."""
    most = max(len(o.to_score_s) for o in seen)
    seconds = [sum(o.to_score_s[count] for o in seen if count < len(o.to_score_s)) for count in range(most)]
    total = sum(seconds)
    return [s / total for s in seconds] if total else []


def _enough(load: Sequence[float]) -> int:
    """The fewest workers for which groups would have waited for less than `CALM` of the time."""
    return next((count for count in range(1, len(load)) if sum(load[count + 1 :]) < CALM), 1)
