"""Rollouts beside the trainer: threads of their own fetch tasks, step the engine and score, so that nobody waits without need.

    loop        begin ──► numbers ──►┐                                            ┌──► finished
    tasks                            └─► train, render ─┐                         │
    rollouts                                            └─► submit ─ step ─┐      │
    rewards, …                                                             └─► score
    loop        pause ───────────────────────────────┤ between two steps ├──── resume

The engine belongs to the thread of the rollouts. Whoever wants it (the trainer, who is about to overwrite the weights they
share, or an evaluation) pauses it: the thread stops between two steps, with all its sequences where they are. It never waits
for the user's code. Tasks and rewards may take long, and some never come: as many workers score as the buffer's controller asks
for, and a group that is abandoned while its task is fetched or its rewards are computed leaves its worker behind, and another
goes on with the next one (`reward_pool.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from redline.errors import EngineError
from redline.ports import Engine, SteppedEngine
from redline.rollouts.rewards.pool import RewardPool, new_thread
from redline.rollouts.runner import SingleTurnRollouts
from redline.telemetry import span
from redline.telemetry.workers import forget_worker, watch_worker
from redline.types import Completion, Delta, GenerateRequest, Task, TrajectoryGroup, WeightUpdate

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
    """The engine's number of the request."""
    is_wanted: bool = True
    """False once the group is abandoned: what is left of its rewards is not computed."""

    @property
    def is_sampled(self) -> bool:
        return len(self.completions) == self.request.sampling.n


class BackgroundRollouts:
    """Implements `ports.Rollouts`."""

    def __init__(
        self,
        rollouts: SingleTurnRollouts,
        engine: SteppedEngine,
        prepare_thread: Callable[[], None] = lambda: None,
        wait_for_device: Callable[[], None] = lambda: None,
    ) -> None:
        """`prepare_thread` is called first in each new thread, for settings that belong to one. `wait_for_device` blocks until
        the device has done all it was given: a borrower launches on another stream, and nothing else orders the two."""
        self._rollouts = rollouts
        self._engine = engine
        self._prepare_thread = prepare_thread
        self._wait_for_device = wait_for_device
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._posed: deque[_Attempt] = deque()
        """To be submitted."""
        self._attempts: dict[int, _Attempt] = {}
        """Being sampled, by the engine's number of the request; the thread's own."""
        self._under_way: dict[int, _Attempt] = {}
        """From their request to the engine until they are delivered or abandoned, by number."""
        self._finished: deque[TrajectoryGroup] = deque()
        self._abandoned: set[int] = set()
        """Numbers that the engine may still be at."""
        self._wanted_by = 0
        """Callers that want the engine for themselves."""
        self._is_between_steps = False
        self._closed = False
        self._error: BaseException | None = None
        ends = rollouts.thread_ends
        self.rewards: RewardPool[TrajectoryGroup] = RewardPool(
            "rewards", rollouts.max_reward_workers, self._deliver, self._fail, lock, prepare_thread, finish_thread=ends
        )
        """Whoever computes them; the number of its workers is the buffer's to decide."""
        self._tasks: RewardPool[_Attempt | TrajectoryGroup] = RewardPool(
            "tasks", 1, self._take_posed, self._fail, lock, prepare_thread, finish_thread=ends, idle="wait.for_budget"
        )
        self._thread = new_thread("rollouts", self._work, self._ended)
        self._thread.start()
        watch_worker("rollouts", self._thread)

    # ── from the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, numbers: Sequence[int], version: int) -> None:
        with span("rollouts.dispatch"), self._changed:
            self._rollouts.step_begins(version)
            for number in numbers:
                self._tasks.put(number, partial(self._pose, number, version))

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
            self._posed = deque(attempt for attempt in self._posed if attempt.number not in given_up)
            self._finished = deque(group for group in self._finished if group.number not in given_up)
            self._abandoned |= given_up
            for number in given_up:
                if attempt := self._under_way.pop(number, None):
                    attempt.is_wanted = False
            self._tasks.abandon(given_up)
            self.rewards.abandon(given_up)
            self._changed.notify_all()

    def sampled_tokens(self, number: int) -> list[int]:
        """Tokens that each attempt of a group under way has so far; none where it has not come to the engine yet."""
        with self._changed:
            attempt = self._under_way.get(number)
        if attempt is None:
            return []
        so_far = self._engine.sampled_tokens(attempt.request_id)
        whole = {index: len(completion.token_ids) for index, completion in list(attempt.completions.items())}
        return [whole.get(index, so_far.get(index, 0)) for index in range(attempt.request.sampling.n)]

    def pause(self) -> None:
        """Block until the engine is between two steps and its device idle. It stays there until `resume`."""
        with span("wait.for_engine"):
            with self._changed:
                self._wanted_by += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_between_steps or self._error)
                self._raise_error()
            self._wait_for_device()

    def resume(self) -> None:
        """Let the engine go on, once the device has done what its borrower launched."""
        self._wait_for_device()
        with self._changed:
            self._wanted_by -= 1
            self._changed.notify_all()

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
            if self._error is None:
                forget_worker("rollouts")
            self._closed = True
            self._tasks.close()
            self.rewards.close()
            self._changed.notify_all()
        self._thread.join(PATIENCE_S)
        self._tasks.join(PATIENCE_S)
        self.rewards.join(PATIENCE_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ── the thread of the rollouts ─────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        self._prepare_thread()
        while self._may_go_on():
            with span("rollouts.dispatch"):  # what is neither a task's nor the engine's
                self._abort_abandoned()
                self._submit()
                self._step()
        for request_id in list(self._attempts):
            self._engine.abort(request_id)

    def _step(self) -> None:
        if not self._engine.has_work:
            return
        with span("engine.schedule"):  # what of a step is neither prefill nor decode
            pieces = self._engine.step()
        for request_id, piece in pieces:
            self._take(request_id, piece)

    def _may_go_on(self) -> bool:
        """Between two steps: others may have the engine, and where there is nothing to do, wait. False ends the thread."""
        with span("rollouts.dispatch"), self._changed:
            self._is_between_steps = True
            self._changed.notify_all()
            while not self._closed:
                if self._wanted_by:
                    with span("wait.for_weights"):
                        self._changed.wait()
                elif self._posed or self._engine.has_work:
                    break
                else:
                    # Either others still owe the engine requests, or what follows from its answers, or they may begin no more.
                    is_owed = self._tasks.num_to_score or self.rewards.num_to_score
                    with span("wait.for_requests" if is_owed else "wait.for_budget"):
                        self._changed.wait()
            self._is_between_steps = False
            return not self._closed

    def _abort_abandoned(self) -> None:
        with self._changed:
            given_up, self._abandoned = self._abandoned, set()
        for request_id in [request_id for request_id, attempt in self._attempts.items() if attempt.number in given_up]:
            self._engine.abort(request_id)
            del self._attempts[request_id]

    def _submit(self) -> None:
        while (attempt := self._next_posed()) is not None:
            attempt.request_id = self._engine.submit(attempt.request)
            self._attempts[attempt.request_id] = attempt
            with self._changed:
                if attempt.number not in self._abandoned:
                    self._under_way[attempt.number] = attempt

    def _next_posed(self) -> _Attempt | None:
        with self._changed:
            return self._posed.popleft() if self._posed else None

    def _take(self, request_id: int, piece: Delta | EngineError) -> None:
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return  # what is left of one that was abandoned
        if isinstance(piece, EngineError):
            raise piece
        if piece.completion is None:
            return
        attempt.completions[piece.index] = piece.completion
        if not attempt.is_sampled:
            return
        del self._attempts[request_id]
        with self._changed:
            if attempt.number not in self._abandoned:
                self.rewards.put(attempt.number, partial(self._group, attempt))

    def _ended(self, error: Exception | None) -> None:
        """Whatever happened, nobody shall wait for this thread any more."""
        with self._changed:
            self._fail(error)

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
            self._posed.append(posed)
        self._changed.notify_all()

    # ── the workers of the rewards ─────────────────────────────────────────────────────────────────────────────────────

    def _group(self, attempt: _Attempt) -> TrajectoryGroup:
        completions = [attempt.completions[index] for index in sorted(attempt.completions)]
        trajectories = self._rollouts.scored(attempt.task, attempt.request, completions, lambda: attempt.is_wanted)
        return self._rollouts.group(attempt.number, attempt.task, trajectories, attempt.began)

    def _deliver(self, number: int, group: TrajectoryGroup) -> None:
        self._under_way.pop(number, None)
        self._finished.append(group)
        self._changed.notify_all()

    def _fail(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._changed.notify_all()


class SteppedElsewhere:
    """The engine as the loop sees it while the thread steps it. Implements `ports.Engine`."""

    def __init__(self, engine: Engine, rollouts: BackgroundRollouts) -> None:
        self._engine = engine
        self._rollouts = rollouts
        self._is_held = False

    def hold(self) -> None:
        """Somebody is about to write the weights that the engine reads; `apply` lets it go on."""
        self._rollouts.pause()
        self._is_held = True

    def apply(self, update: WeightUpdate) -> None:
        if not self._is_held:
            self.hold()
        with span("engine.update_weights"):
            self._engine.apply(update)
            self._is_held = False
            self._rollouts.resume()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        with self._rollouts.paused():
            return self._engine.generate(requests)
