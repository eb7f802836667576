"""One worker: a thread that owns a process. It starts the process when there is something to do, asks it one thing after the
other, starts another when it has ended, and ends it when it has had nothing to do for long.

A job is `new` where any process may do it: it makes a game, or calls a function. A new job whose process is lost is given to
another process once. Every other job belongs to a game, and fails with the process that the game lived in.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from redline.environments.workers.jobs import Job, is_closed, late, late_beginning
from redline.environments.workers.plain import from_plain
from redline.environments.workers.process import START_S, EndedError, WorkerProcess, start_process
from redline.errors import CallError, boundary
from redline.telemetry import idle_as, span
from redline.telemetry.stalls.calls import Call

LOOK_S = 1.0
"""Seconds between two looks at a process that begins."""
LATE_S = 10.0
"""Seconds after which what waits for a process that has not begun is given to others: a cluster may have no room for it."""
AGAIN_S = 60.0
"""Seconds during which a worker that could not begin gets nothing new, where another can take it."""
ENDS_KEPT = 8
"""Processes of which the reason of their end is remembered."""


class Living(Protocol):
    """What a worker knows of a game that lives in its process."""

    process: WorkerProcess | None
    """None until it is made."""


Message = Mapping[str, Any]
"""What a process is told (`program.py`)."""
WhyLate = Callable[[str, float], CallError]
"""Why a call failed that took more than so many seconds."""


class Ask:
    """What a process is asked, and the game that it is about."""

    __slots__ = ("first", "held", "message", "timed", "was_lost", "what")

    def __init__(
        self,
        what: str,
        message: Message,
        held: Living | None = None,
        *,
        first: Sequence[tuple[str, Message]] = (),
        timed: Call | None = None,
    ) -> None:
        self.what, self.message, self.held = what, message, held
        self.first = first
        """What a process must have done before, in words (`import of game:Game`) and as it is told: no part of the call."""
        self.timed = timed
        """The call of the run whose time is that of this one: put off until the process is asked."""
        self.was_lost = False
        """Whether the process that it was given to was lost."""

    @property
    def is_new(self) -> bool:
        """Whether any process may do it."""
        return self.held is None or self.message["do"] == "make"


class LostCall(CallError):  # noqa: N818  named for what happened
    """The process of a call has ended, and not because the call was late."""


class Worker:
    """A thread that owns a process.

    The kernel ends a local process with the thread that started it (`program.py`), so that none outlives its worker."""

    def __init__(
        self,
        name: str,
        limit_s: float | None,
        idle_s: float | None,
        may_end: Callable[[Worker], bool],
        hand_on: Callable[[Worker], bool],
    ) -> None:
        """A call may last `limit_s` seconds; None is for ever. After `idle_s` seconds without a game the process ends, if
        `may_end` says so, which then counts it no longer. `hand_on` is called again and again while the process does not
        begin, and says whether it is still wanted."""
        self.name = name
        self._limit_s, self._idle_s, self._may_end, self._hand_on = limit_s, idle_s, may_end, hand_on
        self.num_games = 0
        self.process: WorkerProcess | None = None
        self.is_ready = False
        """Whether the process takes messages."""
        self._late_until = 0.0
        self._ends: dict[WorkerProcess, str] = {}
        """Why each process ended of which a game may still be asked; the newest few."""
        self._changed = threading.Condition()
        self._prepared: set[str] = set()
        """What the process has done of what comes first."""
        self._waiting: deque[Job] = deque()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def load(self) -> tuple[bool, int, int, bool]:
        """What a new job would share the process with: the least loaded worker takes it, of several one that has begun."""
        return self.is_late, self.num_games, self.num_calls, not self.is_ready

    @property
    def num_calls(self) -> int:
        """Calls that wait for the process, and the one that it makes."""
        return len(self._waiting) + (self._job is not None)

    @property
    def is_late(self) -> bool:
        """Whether its process has not begun in time, lately."""
        return not self.is_ready and time.monotonic() < self._late_until

    async def answer(self, ask: Ask) -> Any:
        """What comes of it. Raises CallError where it raised there, took too long, or its process has ended."""
        if ask.timed is not None:
            ask.timed.put_off()
        job = Job(ask.what, ask)
        self.put(job)
        return await job.result(self._waiting, self._changed)

    def put(self, job: Job) -> None:
        with self._changed:
            if self._closed:
                raise is_closed()
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def take_new_jobs(self) -> list[Job]:
        """Take from it the jobs that another worker may do."""
        with self._changed:
            found = [job for job in self._waiting if job.work.is_new]
            for job in found:
                self._waiting.remove(job)
            return found

    def close(self) -> None:
        """Fail all calls and kill the process; the thread ends by itself."""
        with self._changed:
            self._closed = True
            jobs = [*self._waiting, *([self._job] if self._job else [])]
            self._waiting.clear()
            self._changed.notify()
            process = self.process
        for job in jobs:
            job.settle(None, is_closed())
        if process is not None:
            process.kill()

    def join(self, patience_s: float) -> None:
        if self._thread is not None:
            self._thread.join(patience_s)

    # ── in the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        idle_as("wait.for_calls")
        while (job := self._first()) is not None:
            if job.work.is_new and not self._has_process():
                continue
            if (job := self._taken()) is not None:
                self._do(job)
            del job
        if self.process is not None:
            self.process.close()

    def _first(self) -> Job | None:
        """Block until there is something to do, and leave it where it is; None after `close`."""
        while True:
            with self._changed:
                while self._waiting and not self._waiting[0].is_wanted:
                    self._waiting.popleft()
                if self._closed or self._waiting:
                    return None if self._closed else self._waiting[0]
                idle = self._rest()
            if idle is not None:
                idle.close()

    def _rest(self) -> WorkerProcess | None:
        """Wait for news. Returns the process where it has had no game for `idle_s` seconds and is not needed any more."""
        idles = self.process is not None and not self.num_games
        is_news = self._changed.wait(self._idle_s if idles else None)
        if is_news or not idles or self._waiting or self._closed or not self._may_end(self):
            return None
        process, self.process = self.process, None
        return process

    def _taken(self) -> Job | None:
        """The first job that is wanted; None where another worker, or nobody, has it now."""
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if job.is_wanted and not self._closed:
                    self._job = job
                    return job
            return None

    def _do(self, job: Job) -> None:
        value = None
        with boundary() as caught, span(f"user.{job.what}"):
            value = self._asked(job.work)
        with self._changed:
            self._job = None
            if isinstance(caught.error, LostCall) and job.work.is_new and not job.work.was_lost and not self._closed:
                job.work.was_lost = True
                if job.work.timed is not None:
                    job.work.timed.put_off()
                self._waiting.appendleft(job)
                return
        job.settle(value, caught.error)

    def _asked(self, ask: Ask) -> Any:
        process = self.process
        if not ask.is_new and ask.held is not None and (process is None or ask.held.process is not process):
            if ask.message["do"] == "drop":
                return None
            raise CallError(self._ends.get(ask.held.process, "its process ended"), _LOST_HINT)  # type: ignore[arg-type]
        assert process is not None
        if ask.is_new and ask.held is not None:
            ask.held.process = process
        for what, message in ask.first:
            if (key := json.dumps(message, sort_keys=True)) not in self._prepared:
                self._answer(process, message, START_S, what, late_beginning)
                self._prepared.add(key)
        if ask.timed is not None:
            ask.timed.begin()
        return self._answer(process, ask.message, self._limit_s, ask.what, late)

    def _answer(self, process: WorkerProcess, message: Message, limit_s: float | None, what: str, why_late: WhyLate) -> Any:
        try:
            answer = process.ask(message, limit_s)
        except EndedError as error:
            if error.is_late and limit_s is not None:
                of_another = f"`{what}` of another game there took more than {limit_s:g} s"
                self._lost(process, f"its worker process was ended: {of_another}")
                raise why_late(what, limit_s) from None
            self._lost(process, error.reason)
            raise LostCall(error.reason, _LOST_HINT) from None
        if (problem := answer.get("error")) is not None:
            raise CallError(problem["reason"], problem["hint"], problem["where"])
        return from_plain(answer["value"])

    # ── its process ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _has_process(self) -> bool:
        """Have a process that takes messages, begun now where there is none. Returns False where it does not begin: what waited
        for it has failed, or was given to others."""
        if self.process is not None and (why := self.process.why_ended()):
            self._lost(self.process, why)
        if self.process is not None:
            return True
        with boundary() as caught:
            self._begin(start_process(self.name))
        if caught.error is None:
            return not self._closed
        error = CallError(f"no worker process begins: {caught.error}", _START_HINT)
        self._late_until = time.monotonic() + AGAIN_S
        for job in self.take_new_jobs():
            job.settle(None, error)
        return False

    def _begin(self, process: WorkerProcess) -> None:
        """Block until the process takes messages. Raises EndedError where it does not within its time."""
        began = time.monotonic()
        with self._changed:
            self.process, self._prepared = process, set()
        try:
            while not self._closed and not process.wait_until_ready(LOOK_S):
                waited_s = time.monotonic() - began
                if waited_s > LATE_S:
                    self._late_until = time.monotonic() + AGAIN_S
                # What others can take goes to them also where all of its time has passed since the last look.
                is_wanted = not self.is_late or self._hand_on(self)
                if waited_s > process.start_s or not is_wanted:
                    raise EndedError(f"it had {process.start_s:g} s")
        except BaseException:
            with self._changed:
                self.process = None
            process.kill()
            process.close()
            raise
        with self._changed:
            self.is_ready = True
            if self._closed:
                process.kill()

    def _lost(self, process: WorkerProcess, reason: str) -> None:
        """The process has ended, or was ended: remember why, for all games in it."""
        with self._changed:
            self.process, self.is_ready = None, False
        process.close()
        self._ends[process] = reason
        while len(self._ends) > ENDS_KEPT:
            del self._ends[next(iter(self._ends))]


_LOST_HINT = "a game that lived in the same process may be at fault; the attempt can be made again"
_START_HINT = "see what it says; rollouts.environment.run_in=threads needs no processes"
