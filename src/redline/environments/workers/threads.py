"""Calls in threads: one that does not return is given up, and its thread left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from redline.environments.workers.held import GameClass
from redline.environments.workers.jobs import PATIENCE_S, Job, is_closed, late
from redline.environments.workers.program import imported
from redline.errors import CallError, TaskError, boundary
from redline.telemetry import idle_as, span
from redline.telemetry.stalls.calls import Call, calling, forget_call

MAX_STUCK = 64
"""Calls that were given up and still run, each in a thread of its own: with more of them no further call is made."""


class ThreadWorkers:
    """Makes calls in threads: any of them may call any game. Implements `Workers`."""

    def __init__(self, count: int, limit_s: float | None) -> None:
        """At most `count` calls at once. A call may last `limit_s` seconds; None waits for ever."""
        self._count, self._limit_s = count, limit_s
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._threads: list[_Thread] = []
        """Without those that were left behind."""
        self._stuck: list[threading.Thread] = []
        self._watch: threading.Thread | None = None
        self._num_started = 0
        self._closed = threading.Event()

    async def make(self, game: GameClass) -> HeldInThreads:
        return HeldInThreads(self, await self.make_call(game.path.partition(":")[2], game.make))

    async def call(self, function: str | Callable[..., Any], *arguments: Any) -> Any:
        found = imported(function, None) if isinstance(function, str) else function
        return await self.make_call(getattr(found, "__name__", "call"), partial(found, *arguments))

    async def make_call(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, in one of the threads; raises what it raises, or CallError where it takes too long."""
        job = Job(what, work)
        self.put(job)
        return await job.result(self._waiting, self._changed)

    def put(self, job: Job) -> None:
        """Have a thread do this. Raises where that is not possible any more."""
        with self._changed:
            if self._closed.is_set():
                raise is_closed()
            self._refuse_where_too_many_are_stuck(job)
            self._waiting.append(job)
            if len(self._waiting) > sum(thread.job is None for thread in self._threads):
                self._start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed.set()
            jobs = [*self._waiting, *(thread.job for thread in self._threads if thread.job)]
            self._waiting.clear()
            for call in [thread.call for thread in self._threads if thread.call]:
                forget_call(call)  # it may never end, and is not waited for
            self._changed.notify_all()
        for job in jobs:
            job.settle(None, is_closed())
        deadline = time.monotonic() + PATIENCE_S
        for thread in [*(thread.thread for thread in self._threads), *([self._watch] if self._watch else [])]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _refuse_where_too_many_are_stuck(self, job: Job) -> None:
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) > MAX_STUCK:
            raise TaskError(
                f"`{job.what}` was not called: {len(self._stuck)} calls were given up after {self._limit_s:g} s and still run",
                "set rollouts.environment.run_in=processes, where a call that hangs can be ended",
            )

    def _start(self) -> None:
        if len(self._threads) >= self._count:
            return
        self._num_started += 1
        thread = _Thread()
        thread.thread = threading.Thread(
            target=self._work, args=(thread,), name=f"environment-{self._num_started}", daemon=True
        )
        self._threads.append(thread)
        thread.thread.start()
        if self._watch is None and self._limit_s is not None:
            self._watch = threading.Thread(target=self._watch_limits, name="environment limits", daemon=True)
            self._watch.start()

    # ── in a thread that calls ─────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, thread: _Thread) -> None:
        idle_as("wait.for_calls")
        while (job := self._next(thread)) is not None:
            value = None
            with span(f"user.{job.what}"), calling(job.what) as call, boundary() as caught:
                self._begin(thread, call)
                value = job.work()
            with self._changed:
                thread.job = thread.call = None
            job.settle(value, caught.error)
            del job, value, caught  # this thread keeps no game alive

    def _next(self, thread: _Thread) -> Job | None:
        """Block until there is a call to make. None ends the thread."""
        with self._changed:
            while not self._closed.is_set() and thread in self._threads:
                if self._waiting:
                    thread.job = self._waiting.popleft()
                    return thread.job
                self._changed.wait()
            return None

    def _begin(self, thread: _Thread, call: Call) -> None:
        """A call begins. Raises TaskError where all was closed meanwhile, and it is not wanted any more."""
        with self._changed:
            if self._closed.is_set():
                raise is_closed()
            thread.call = call

    # ── in the thread that watches limits ──────────────────────────────────────────────────────────────────────────────

    def _watch_limits(self) -> None:
        assert self._limit_s is not None
        idle_as("wait.for_calls")
        patience_s = self._limit_s
        while not self._closed.wait(patience_s):
            with self._changed:
                for thread in list(self._threads):
                    if thread.call is not None and thread.call.age_s() >= self._limit_s:
                        self._leave_behind(thread, thread.call, self._limit_s)
                ages = [thread.call.age_s() for thread in self._threads if thread.call is not None]
            # Until the oldest is late. A call that begins meanwhile is late after that.
            patience_s = max(0.001, self._limit_s - max(ages, default=0.0))

    def _leave_behind(self, thread: _Thread, call: Call, limit_s: float) -> None:
        assert thread.job is not None
        thread.job.settle(None, late(thread.job.what, limit_s, call.place()))
        self._threads.remove(thread)
        self._stuck.append(thread.thread)
        forget_call(call)
        if self._waiting:
            self._start()


class _Thread:
    """A thread, and the call that it makes."""

    thread: threading.Thread

    def __init__(self) -> None:
        self.job: Job | None = None
        self.call: Call | None = None


class HeldInThreads:
    """Implements `Held`."""

    __slots__ = ("_game", "_is_stuck", "_workers")

    def __init__(self, workers: ThreadWorkers, game: Any) -> None:
        self._workers, self._game = workers, game
        self._is_stuck = False
        """A call did not return: its thread may still be in the game."""

    async def call(self, name: str, *arguments: Any) -> Any:
        try:
            return await self._workers.make_call(name, partial(getattr(self._game, name), *arguments))
        except (CallError, asyncio.CancelledError):
            self._is_stuck = True
            raise

    def drop(self) -> None:
        if not self._is_stuck and callable(getattr(self._game, "close", None)):
            with suppress(TaskError):  # they are closed: the game goes with them
                self._workers.put(Job("close", self._game.close, is_awaited=False))
