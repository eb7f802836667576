"""Calls of the user's functions, in threads of their own: one that hangs is given up, and its thread left behind.

    results ──► works ──► thread ──► outcomes, in their order
                            │
    limit_s passes ─────────┴── a Failure; the thread is left behind, and another takes its place

The caller waits for the results. One thread makes the calls, one after the other; where several may, others help as
soon as the calls wait for something (a service, a process, a disk): computing in Python would not become faster.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redline.errors import CallError, RedlineError, TaskError, boundary, first_inner, in_words, shortened
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.permits import MAX_LATE_IN_A_ROW, MAX_STUCK, Permit, Permits
from redline.telemetry import idle_as, span
from redline.telemetry.stalls.calls import Call, calling, forget_call
from redline.telemetry.stalls.stacks import place_of, users_place
from redline.types import Failure

Result = TypeVar("Result")

HELP_AFTER_S = 0.02
"""Seconds of waiting, and more than of computing, after which others help. To start them takes a millisecond."""
MAX_REASON = 2000
"""Characters of a failure's reason: it is stored with every attempt that failed so."""
MAX_PLACE = 500
PATIENCE_S = 1.0
"""For threads that have nothing to do, when all is to end."""


class UserCalls:
    """Makes calls for one thread at a time. Its own threads live until `close`."""

    def __init__(
        self,
        stage: str,
        what: str,
        limit_s: float | None,
        limit_key: str,
        *,
        most: int = 1,
        loop: EventLoop | None = None,
        permits: Permits | None = None,
    ) -> None:
        """`what` is the name of the function, `stage` that of its failures. A call may last `limit_s` seconds, which the key
        `limit_key` says; without a limit, and with one thread, the caller makes the calls. `most`: threads that may call at
        once. `loop` runs coroutines that the works wait for. `permits` are shared with others that call the same function, and
        the code that shares them says when to `try_again`; without them every call of `results` does."""
        self._stage, self._what, self._limit_s, self._limit_key = stage, what, limit_s, limit_key
        self._most = most
        self._loop = loop or EventLoop()
        self._permits = permits or Permits()
        self._has_own_permits = permits is None
        self._changed = threading.Condition()
        self._workers: list[_Worker] = []
        """Without those that were left behind."""
        self._num_started = 0
        self._works: Sequence[Callable[[], Any]] = ()
        self._next = 0
        self._outcomes: dict[int, Any] = {}
        self._needs_help = False
        self._caller = 0
        self._closed = False

    def results(self, works: Sequence[Callable[[], Result]]) -> list[Result | Failure]:
        """What came of each, in their order: the value, or why there is none. Blocks until all are there. In the lanes of the
        threads that make the calls their time is called `user.score`, after the function; the caller's own spans stay open."""
        if self._has_own_permits:
            self._permits.try_again()
        if self._limit_s is None and self._most == 1:
            return [self._own_outcome(work) for work in works]
        if not works:
            return []
        with self._changed:
            self._works, self._next, self._outcomes = works, 0, {}
            self._needs_help = False
            self._caller = threading.get_ident()
            self._fail_the_rest_if_hopeless()
            self._start(1)
            try:
                while len(self._outcomes) < len(works):
                    self._changed.wait(self._patience_s())
                    self._give_up_late_ones()
                    self._start(self._most if self._needs_help else 1)
            finally:  # after an interrupt some are missing, and they are not wanted any more
                self._works = ()
                for worker in [worker for worker in self._workers if worker.index is not None]:
                    self._leave_behind(worker)
            return [self._outcomes[index] for index in range(len(works))]

    def close(self) -> None:
        """End the threads that have nothing to do; one whose call never returns ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + PATIENCE_S
        for worker in list(self._workers):
            worker.thread.join(max(0.0, deadline - time.monotonic()))

    # ── in the caller's thread, which holds the lock ───────────────────────────────────────────────────────────────────

    def _start(self, count: int) -> None:
        """Have at least so many threads, but no more than there is to do."""
        count = min(count, len(self._works) - self._next + sum(worker.index is not None for worker in self._workers))
        while len(self._workers) < count:
            self._num_started += 1
            worker = _Worker()
            name = f"{threading.current_thread().name}/{self._what}" if self._most == 1 else self._what
            name = name.removeprefix("MainThread/") + (f"-{self._num_started}" if self._num_started > 1 else "")
            worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            self._begin(worker.thread)
            self._workers.append(worker)
        self._changed.notify_all()

    def _begin(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            num_stuck = self._num_started - 1 - len(self._workers)
            raise TaskError(
                f"no thread can be started to call `{self._what}`: {error}; {num_stuck} calls were given up",
                "give what it waits for a limit of its own, so that calls end",
            ) from error

    def _patience_s(self) -> float | None:
        if self._limit_s is None:
            return None
        ages = [worker.call.age_s() for worker in self._workers if worker.call]
        return max(0.0, self._limit_s - max(ages, default=0.0))

    def _give_up_late_ones(self) -> None:
        for worker in list(self._workers):
            if self._limit_s is None or worker.call is None or worker.call.age_s() < self._limit_s:
                continue
            assert worker.index is not None
            reason = f"`{self._what}` did not return within {self._limit_s:g} s"
            self._outcomes[worker.index] = Failure(self._stage, reason, worker.call.place(), self._hint)
            if worker.permit:  # a call that outlasts its limit is taken for dead: it is not waited for any more
                worker.permit.end()
            self._leave_behind(worker)
            self._loop.leave_if_blocked()
            self._permits.was_late(worker.thread)
            self._end_if_too_many_are_stuck()
            self._fail_the_rest_if_hopeless()

    def _end_if_too_many_are_stuck(self) -> None:
        num_stuck = self._permits.num_stuck
        if num_stuck > MAX_STUCK:
            raise TaskError(
                f"{num_stuck} calls of `{self._what}` were given up after {self._limit_s:g} s and still run, each in a"
                " thread of its own",
                "give what it waits for a limit of its own, or compute in a process that can be ended, so that calls end",
            )

    def _fail_the_rest_if_hopeless(self) -> None:
        if not self._permits.are_hopeless:
            return
        reason = (
            f"`{self._what}` was not called: the {MAX_LATE_IN_A_ROW} calls before did not return within {self._limit_s:g} s"
        )
        for index in range(self._next, len(self._works)):
            self._outcomes[index] = Failure(self._stage, reason, hint=self._hint)
        self._next = len(self._works)

    @property
    def _hint(self) -> str:
        return f"give what it waits for a limit of its own, or raise {self._limit_key} (null waits for ever)"

    def _leave_behind(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if worker.call:
            forget_call(worker.call)

    # ── in a thread of its own ─────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, worker: _Worker) -> None:
        idle_as("wait.for_calls")
        while self._waits_for_work(worker):
            with span(f"user.{self._what}"):  # for all that it does in one go: there may be thousands of calls in a second
                self._work_through(worker)

    def _waits_for_work(self, worker: _Worker) -> bool:
        """False ends the thread."""
        with self._changed:
            while not self._closed and worker in self._workers:
                if self._next < len(self._works):
                    return True
                self._changed.wait()
            return False

    def _work_through(self, worker: _Worker) -> None:
        began_s, began_computing_s = time.perf_counter(), time.thread_time()
        while True:
            with self._changed:
                if worker not in self._workers or self._next >= len(self._works):
                    return
                index, work = self._next, self._works[self._next]
                self._next += 1
                worker.index = index
            permit = self._permits.take()
            with self._changed:
                worker.permit = permit
                if worker not in self._workers:
                    permit.end()
                    return
            outcome = self._outcome(work, worker)
            permit.end()
            computed_s = time.thread_time() - began_computing_s
            waited_s = time.perf_counter() - began_s - computed_s
            with self._changed:
                if worker not in self._workers:
                    return
                worker.index = worker.call = None
                self._outcomes[index] = outcome
                self._permits.returned()
                self._needs_help = self._most > 1 and (self._needs_help or waited_s > max(HELP_AFTER_S, computed_s))
                if len(self._outcomes) == len(self._works) or (self._needs_help and len(self._workers) < self._most):
                    self._changed.notify_all()

    def _own_outcome(self, work: Callable[[], Result]) -> Result | Failure:
        permit = self._permits.take()
        try:
            return self._outcome(work, None)
        finally:
            permit.end()

    def _outcome(self, work: Callable[[], Result], worker: _Worker | None) -> Result | Failure:
        with calling(self._what, self._caller if worker else None) as call:
            if worker:
                worker.call = call
            with boundary() as caught:
                result = work()
        return result if caught.error is None else failure_of(self._stage, caught.error)


class _Worker:
    """A thread, and the call that it makes."""

    thread: threading.Thread

    def __init__(self) -> None:
        self.index: int | None = None
        """Which of the works it is at."""
        self.call: Call | None = None
        self.permit: Permit | None = None
        """The permit of the call that it makes or made last."""


def failure_of(stage: str, error: BaseException, function: Callable[..., Any] | None = None) -> Failure:
    """The failure that an error becomes, with the place in the user's code where it was raised; where that is none of theirs,
    the place of `function`. A group of errors has the place of the first in it. A long reason is shortened."""
    reason, error = shortened(in_words(error), MAX_REASON), first_inner(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = error.where if isinstance(error, CallError) and error.where else users_place(frames)
    if not where and isinstance(error, RedlineError):
        where = defined_at(function) if function else ""
    elif not where:
        where = place_of(frames)
    return Failure(stage, reason, shortened(where, MAX_PLACE), error.hint if isinstance(error, RedlineError) else "")


def defined_at(function: Callable[..., Any]) -> str:
    """`rewards.py:7, in score`; empty where it is not written in Python."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None:
        return ""
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name, line="")
    return users_place(traceback.StackSummary.from_list([frame]))
