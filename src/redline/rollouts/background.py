"""Rollouts beside the trainer: threads of their own fetch tasks, step the engine and score, so that nobody waits without need.

    loop        begin ──► numbers ──►┐                                            ┌──► finished
    tasks                            └─► train, render ─┐                         │
    rollouts                                            └─► submit ─ step ─┐      │
    rewards, …                                                             └─► score
    loop        pause ───────────────────────────────┤ between two steps ├──── resume

The session's thread steps the engine and never waits for the user's code. Tasks and rewards may take long, and some never
come: as many workers score as the buffer's controller asks for, and a group that is abandoned while its task is fetched or its
rewards are computed leaves its worker behind, and another goes on with the next one (`rewards/pool.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from redline.ports import Session
from redline.rollouts.rewards.pool import RewardPool
from redline.rollouts.runner import SingleTurnRollouts
from redline.telemetry import span
from redline.types import Completion, Delta, GenerateRequest, Task, TrajectoryGroup

PATIENCE_S = 5.0
"""For the step, and then for the rewards under way, when all is to end."""


@dataclass(slots=True)
class _Attempt:
    """A group under way."""

    number: int
    task: Task
    request: GenerateRequest
    began: float
    """On `time.perf_counter`."""
    completions: dict[int, Completion] = field(default_factory=dict)
    request_id: int = -1
    """The session's number of the request."""
    is_wanted: bool = True
    """False once the group is abandoned: what is left of its rewards is not computed."""

    @property
    def is_sampled(self) -> bool:
        return len(self.completions) == self.request.sampling.n


class BackgroundRollouts:
    """Implements `ports.Rollouts`."""

    def __init__(
        self, rollouts: SingleTurnRollouts, session: Session, prepare_thread: Callable[[], None] = lambda: None
    ) -> None:
        """Starts the session's thread. `prepare_thread` is called first in each new thread, for settings that belong to one."""
        self._rollouts = rollouts
        self._session = session
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._attempts: dict[int, _Attempt] = {}
        """Being sampled, by the session's number of the request."""
        self._under_way: dict[int, _Attempt] = {}
        """From their request to the engine until they are delivered or abandoned, by number."""
        self._finished: deque[TrajectoryGroup] = deque()
        self._error: BaseException | None = None
        ends = rollouts.thread_ends
        self.rewards: RewardPool[TrajectoryGroup] = RewardPool(
            "rewards", rollouts.max_reward_workers, self._deliver, self._fail, lock, prepare_thread, finish_thread=ends
        )
        """Whoever computes them; the number of its workers is the buffer's to decide."""
        self._tasks: RewardPool[_Attempt | TrajectoryGroup] = RewardPool(
            "tasks", 1, self._take_posed, self._fail, lock, prepare_thread, finish_thread=ends, idle="wait.for_budget"
        )
        session.start("rollouts", prepare_thread, self._why_idle)

    # ── from the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, numbers: Sequence[int], version: int) -> None:
        with span("rollouts.dispatch"), self._changed:
            self._rollouts.step_begins(version)
            for number in numbers:
                self._tasks.put(number, partial(self._pose, number, version))
        self._session.wake()

    def arrived(self) -> list[TrajectoryGroup]:
        with span("rollouts.dispatch"), self._changed:
            self._raise_error()
            groups = list(self._finished)
            self._finished.clear()
            return groups

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> list[TrajectoryGroup]:
        with span("wait.for_late_groups" if late else "wait.for_rollouts"), self._changed:
            self._changed.wait_for(lambda: self._finished or self._error, patience_s)
        return self.arrived()

    def abandon(self, numbers: Sequence[int]) -> None:
        """None of them will come any more, wherever they are."""
        if not numbers:
            return
        with self._changed:
            given_up = set(numbers)
            self._finished = deque(group for group in self._finished if group.number not in given_up)
            for attempt in [self._under_way.pop(number) for number in given_up if number in self._under_way]:
                attempt.is_wanted = False
                if self._attempts.pop(attempt.request_id, None) is not None:
                    self._session.abort(attempt.request_id)
            self._tasks.abandon(given_up)
            self.rewards.abandon(given_up)
            self._changed.notify_all()
        self._session.wake()

    def sampled_tokens(self, number: int) -> list[int]:
        """Tokens that each attempt of a group under way has so far; none where it has not come to the engine yet."""
        with self._changed:
            attempt = self._under_way.get(number)
        if attempt is None:
            return []
        so_far = self._session.sampled_tokens(attempt.request_id)
        whole = {index: len(completion.token_ids) for index, completion in list(attempt.completions.items())}
        return [whole.get(index, so_far.get(index, 0)) for index in range(attempt.request.sampling.n)]

    def pause(self) -> None:
        """Block until the engine is between two steps and its device idle. It stays there until `resume`."""
        self._raise_error()
        self._session.hold()

    def resume(self) -> None:
        """Let the engine go on, once the device has done what its borrower launched."""
        self._session.resume()

    @contextmanager
    def paused(self, patience_s: float | None = None) -> Iterator[None]:
        """Inside, nobody else uses the engine or the tasks. Tasks and rewards that are under way are waited for, but no longer
        than `patience_s`."""
        self.pause()
        for pool in (self._tasks, self.rewards):
            pool.be_quiet(quiet=True)
        try:
            with span("wait.for_rewards"), self._changed:
                self._changed.wait_for(
                    lambda: not (self._tasks.num_scoring or self.rewards.num_scoring) or self._error, patience_s
                )
                self._raise_error()
            yield
        finally:
            for pool in (self._tasks, self.rewards):
                pool.be_quiet(quiet=False)
            self.resume()

    def close(self) -> None:
        """Give up what is under way. A task or a reward that does not return is left behind, and ends with the process."""
        with self._changed:
            self._attempts.clear()  # what the session says of them now is no failure
            self._tasks.close()
            self.rewards.close()
            self._changed.notify_all()
        self._session.close(PATIENCE_S)
        self._tasks.join(PATIENCE_S)
        self.rewards.join(PATIENCE_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ── the thread that steps the engine ───────────────────────────────────────────────────────────────────────────────

    def _why_idle(self) -> str:
        """Either others still owe the engine requests, or what follows from its answers, or they may begin no more."""
        return "wait.for_requests" if self._tasks.num_to_score or self.rewards.num_to_score else "wait.for_budget"

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        with span("rollouts.dispatch"), self._changed:
            for request_id, piece in pieces:
                self._take(request_id, piece)

    def _take(self, request_id: int, piece: Delta | Exception) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return  # what is left of one that was abandoned
        if isinstance(piece, Exception):
            self._fail(piece)
            raise piece
        if piece.completion is None:
            return
        attempt.completions[piece.index] = piece.completion
        if attempt.is_sampled:
            del self._attempts[request_id]
            self.rewards.put(attempt.number, partial(self._group, attempt))

    # ── the worker of the tasks ────────────────────────────────────────────────────────────────────────────────────────

    def _pose(self, number: int, version: int) -> _Attempt | TrajectoryGroup:
        """A group of failed attempts where there is nothing to ask the engine for."""
        began = time.perf_counter()
        [posed] = self._rollouts.posed([number])
        if isinstance(posed.request, GenerateRequest):
            return _Attempt(number, posed.task, posed.request, began)
        return self._rollouts.group(number, posed.task, self._rollouts.failed(posed.request, version), began)

    def _take_posed(self, number: int, posed: _Attempt | TrajectoryGroup) -> None:
        if isinstance(posed, TrajectoryGroup):
            self._finished.append(posed)
        else:
            posed.request_id = self._session.submit(posed.request, self)
            self._attempts[posed.request_id] = self._under_way[number] = posed
        self._changed.notify_all()
        self._session.wake()

    # ── the workers of the rewards ─────────────────────────────────────────────────────────────────────────────────────

    def _group(self, attempt: _Attempt) -> TrajectoryGroup:
        completions = [attempt.completions[index] for index in sorted(attempt.completions)]
        trajectories = self._rollouts.scored(attempt.task, attempt.request, completions, lambda: attempt.is_wanted)
        return self._rollouts.group(attempt.number, attempt.task, trajectories, attempt.began)

    def _deliver(self, number: int, group: TrajectoryGroup) -> None:
        self._under_way.pop(number, None)
        self._finished.append(group)
        self._changed.notify_all()
        self._session.wake()

    def _fail(self, error: BaseException | None) -> None:
        self._error = self._error or self._session.failure or error
        self._changed.notify_all()
