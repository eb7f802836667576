"""Rollouts beside the trainer: a thread of their own steps the engine, so that neither waits for the other without need.

    loop        begin ──► numbers ──►┐                            ┌──► finished
    thread                           └─► submit ─ step ─ score ───┘
    loop        pause ────────────────────────┤ between two steps ├──── resume

The engine belongs to the thread. Whoever wants it (the trainer, who is about to overwrite the weights they share, or an
evaluation) pauses it: the thread stops between two steps, with all its sequences where they are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from redline.errors import EngineError, TaskError, boundary
from redline.ports import Engine, SteppedEngine
from redline.rollouts.runner import SingleTurnRollouts
from redline.telemetry import span
from redline.types import Completion, Delta, GenerateRequest, Task, TrajectoryGroup, WeightUpdate

PATIENCE_S = 5.0
"""For the step under way, when all is to end."""


@dataclass(slots=True)
class _Attempt:
    """A group under way."""

    number: int
    task: Task
    request: GenerateRequest
    completions: dict[int, Completion] = field(default_factory=dict)


class BackgroundRollouts:
    """Implements `ports.Rollouts`."""

    def __init__(
        self, rollouts: SingleTurnRollouts, engine: SteppedEngine, prepare_thread: Callable[[], None] = lambda: None
    ) -> None:
        """`prepare_thread` is called first in the new thread, for settings that belong to one."""
        self._rollouts = rollouts
        self._engine = engine
        self._prepare_thread = prepare_thread
        self._changed = threading.Condition()
        self._begun: deque[int] = deque()
        self._finished: deque[TrajectoryGroup] = deque()
        self._attempts: dict[int, _Attempt] = {}
        """By the engine's number of the request; the thread's own."""
        self._wanted_by = 0
        """Callers that want the engine for themselves."""
        self._is_between_steps = False
        self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    # ── from the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, numbers: Sequence[int], version: int) -> None:
        with self._changed:
            self._begun += numbers
            self._changed.notify_all()

    def arrived(self) -> list[TrajectoryGroup]:
        with self._changed:
            self._raise_error()
            groups = list(self._finished)
            self._finished.clear()
            return groups

    def finished(self) -> list[TrajectoryGroup]:
        with span("wait.for_rollouts"), self._changed:
            self._changed.wait_for(lambda: self._finished or self._error)
        return self.arrived()

    def pause(self) -> None:
        """Returns when the engine is between two steps, where it stays until `resume`."""
        with span("wait.for_engine"), self._changed:
            self._wanted_by += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_between_steps or self._error)
            self._raise_error()

    def resume(self) -> None:
        with self._changed:
            self._wanted_by -= 1
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """Give up what is under way. A reward that does not return is left behind, and ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(PATIENCE_S)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ── the thread ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        error: Exception | None = TaskError(
            "a task or its reward ended the thread of the rollouts", "let it raise no SystemExit"
        )
        try:
            with boundary() as caught:
                self._work()
            error = caught.error
        finally:  # whatever happened, nobody shall wait for this thread any more
            with self._changed:
                self._error = error
                self._is_between_steps = True
                self._changed.notify_all()

    def _work(self) -> None:
        self._prepare_thread()
        while self._may_go_on():
            self._submit()
            if self._engine.has_work:
                with span("engine.schedule"):  # what of a step is neither prefill nor decode
                    pieces = self._engine.step()
                for request_id, piece in pieces:
                    self._take(request_id, piece)
        for request_id in list(self._attempts):
            self._engine.abort(request_id)

    def _may_go_on(self) -> bool:
        """Between two steps: others may have the engine, and where there is nothing to do, wait. False ends the thread."""
        with self._changed:
            self._is_between_steps = True
            self._changed.notify_all()
            while not self._closed:
                if self._wanted_by:
                    with span("wait.for_weights"):
                        self._changed.wait()
                elif self._begun or self._engine.has_work:
                    break
                else:
                    with span("wait.for_budget"):
                        self._changed.wait()
            self._is_between_steps = False
            return not self._closed

    def _submit(self) -> None:
        while self._begun:
            number = self._begun.popleft()
            task = self._rollouts.task(number)
            request = self._rollouts.request(number, task)
            self._attempts[self._engine.submit(request)] = _Attempt(number, task, request)

    def _take(self, request_id: int, piece: Delta | EngineError) -> None:
        if isinstance(piece, EngineError):
            raise piece
        if piece.completion is None:
            return
        attempt = self._attempts[request_id]
        attempt.completions[piece.index] = piece.completion
        if len(attempt.completions) < attempt.request.sampling.n:
            return
        del self._attempts[request_id]
        completions = [attempt.completions[index] for index in sorted(attempt.completions)]
        trajectories = self._rollouts.scored(attempt.task, attempt.request, completions)
        group = self._rollouts.group(attempt.number, attempt.task, trajectories)
        with self._changed:
            self._finished.append(group)
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
        self._engine.apply(update)
        self._is_held = False
        self._rollouts.resume()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        with self._rollouts.paused():
            return self._engine.generate(requests)
