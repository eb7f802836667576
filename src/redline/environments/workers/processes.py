"""Calls in processes: what happens to the interpreter there, happens to the games there, and the run goes on.

    coroutine ──► queue of one worker ──► its thread ──► its process (`program.py`)
              ◄───────────────────────────────── value, or error

A game lives in one process, which holds many and makes one call at a time. A process that ends by itself, or is ended because a
call took too long, fails the games that lived in it: each gets the reason at its next call. The next game begins another.
Processes are started with an interpreter of their own (no fork: the run has threads), when there is something for them to do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count as counter
from typing import Any

from redline.child import Child, ChildError
from redline.environments.workers.held import GameClass
from redline.environments.workers.jobs import PATIENCE_S, Job, is_closed, late
from redline.environments.workers.plain import from_plain, to_plain
from redline.errors import CallError, TaskError, boundary
from redline.telemetry import idle_as, span

PROGRAM = "redline.environments.workers.program"
START_S = 120.0
"""Seconds for a process to begin, and for the import of a game's module: neither counts as a call."""


class ProcessWorkers:
    """Makes calls in worker processes. Implements `Workers`."""

    def __init__(self, count: int, limit_s: float | None) -> None:
        """At most `count` processes. A call may last `limit_s` seconds; None waits for ever."""
        self._workers = [_Worker(number, limit_s) for number in range(1, count + 1)]
        self._ids = counter(1)

    @property
    def pids(self) -> list[int]:
        """Processes there are now."""
        return [child.pid for worker in self._workers if (child := worker.child) is not None]

    async def make(self, game: GameClass) -> HeldInProcess:
        worker = min(self._workers, key=lambda worker: worker.load)
        held = HeldInProcess(worker, next(self._ids))
        worker.num_games += 1
        message = {"do": "make", "id": held.id, "path": game.path, "folder": game.folder, "keywords": to_plain(game.keywords)}
        try:
            await worker.answer(_Ask(game.path.partition(":")[2], message, held))
        except BaseException:
            held.drop()
            raise
        return held

    async def call(self, function: str | Callable[..., Any], *arguments: Any) -> Any:
        if not isinstance(function, str):
            raise TaskError(
                f"{function!r} is called in worker processes, which know functions by their names",
                'name it as "module:function", or set rollouts.environment.run_in=threads',
            )
        worker = min(self._workers, key=lambda worker: worker.load)
        message = {"do": "function", "path": function, "folder": None, "arguments": to_plain(arguments)}
        return await worker.answer(_Ask(function.partition(":")[2], message))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        deadline = time.monotonic() + PATIENCE_S
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))


class HeldInProcess:
    """Implements `Held`."""

    __slots__ = ("_is_dropped", "_worker", "id", "process")

    def __init__(self, worker: _Worker, number: int) -> None:
        self._worker, self.id = worker, number
        self.process: Child | None = None
        """The process that it lives in; None until it is made."""
        self._is_dropped = False

    async def call(self, name: str, *arguments: Any) -> Any:
        message = {"do": "call", "id": self.id, "name": name, "arguments": to_plain(arguments)}
        return await self._worker.answer(_Ask(name, message, self))

    def drop(self) -> None:
        if self._is_dropped:
            return
        self._is_dropped = True
        self._worker.num_games -= 1
        with suppress(TaskError):  # they are closed: the game is gone
            self._worker.put(Job("close", _Ask("close", {"do": "drop", "id": self.id}, self), is_awaited=False))


class _Ask:
    """What a process is asked, and the game that it is about."""

    __slots__ = ("held", "message", "what")

    def __init__(self, what: str, message: Mapping[str, Any], held: HeldInProcess | None = None) -> None:
        self.what, self.message, self.held = what, message, held


class _Worker:
    """A thread that owns a process: it starts it, asks it one thing after the other, and starts another when it has ended.

    The kernel ends a process with the thread that started it (`program.py`), so that none outlives its worker."""

    def __init__(self, number: int, limit_s: float | None) -> None:
        self._number, self._limit_s = number, limit_s
        self.num_games = 0
        self.child: Child | None = None
        self._ends: dict[Child, str] = {}
        """Why each process ended of which a game may still be asked; the newest few."""
        self._changed = threading.Condition()
        self._loaded: set[str] = set()
        """What the process has imported."""
        self._waiting: deque[Job] = deque()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def load(self) -> tuple[int, int, int]:
        """What a new game would share the process with: the least loaded worker takes it."""
        return self.num_games, len(self._waiting), self._number

    async def answer(self, ask: _Ask) -> Any:
        """What comes of it. Raises CallError where it raised there, took too long, or its process has ended."""
        job = Job(ask.what, ask)
        self.put(job)
        try:
            return await job.result()
        except asyncio.CancelledError:
            with self._changed, suppress(ValueError):
                self._waiting.remove(job)
            raise

    def put(self, job: Job) -> None:
        with self._changed:
            if self._closed:
                raise is_closed()
            self._waiting.append(job)
            if self._thread is None:
                name = f"environment process {self._number}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Fail all calls and kill the process; the thread ends by itself."""
        with self._changed:
            self._closed = True
            jobs = [*self._waiting, *([self._job] if self._job else [])]
            self._waiting.clear()
            self._changed.notify()
            child = self.child
        for job in jobs:
            job.settle(None, is_closed())
        if child is not None:
            child.kill()

    def join(self, patience_s: float) -> None:
        if self._thread is not None:
            self._thread.join(patience_s)

    # ── in the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        idle_as("wait.for_calls")
        while (job := self._next()) is not None:
            value = None
            with boundary() as caught, span(f"user.{job.what}"):
                value = self._asked(job.work)
            with self._changed:
                self._job = None
            job.settle(value, caught.error)
            del job, value, caught
        if self.child is not None:
            self.child.close()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._closed:
                while self._waiting:
                    self._job = self._waiting.popleft()
                    if self._job.is_wanted:
                        return self._job
                self._job = None
                self._changed.wait()
            return None

    def _asked(self, ask: _Ask) -> Any:
        child = self._process_for(ask)
        if child is None:
            return None
        if (path := ask.message.get("path")) is not None and path not in self._loaded:
            self._answer(child, {"do": "load", "path": path, "folder": ask.message["folder"]}, START_S, f"import of {path}")
            self._loaded.add(path)
        return self._answer(child, ask.message, self._limit_s, ask.what)

    def _answer(self, child: Child, message: Mapping[str, Any], limit_s: float | None, what: str) -> Any:
        try:
            answer = child.ask(json.dumps(message), limit_s)
        except ChildError as error:
            raise self._lost(child, error, what, limit_s) from None
        if (problem := answer.get("error")) is not None:
            raise CallError(problem["reason"], problem["hint"], problem["where"])
        return from_plain(answer["value"])

    def _process_for(self, ask: _Ask) -> Child | None:
        """The process to ask; None where nothing is left to do. Raises CallError where the game has lost its own."""
        if self.child is not None and not self.child.is_alive:
            self._lost(self.child, ChildError(self.child.code, self.child.last_lines()), "", None)
        is_new = ask.held is None or ask.message["do"] == "make"
        if not is_new and ask.held is not None and ask.held.process is not self.child:
            if ask.message["do"] == "drop":
                return None
            raise CallError(self._ends.get(ask.held.process, "its process ended"), _LOST_HINT)  # type: ignore[arg-type]
        if self.child is None:
            self._start()
        if is_new and ask.held is not None:
            ask.held.process = self.child
        return self.child

    def _start(self) -> None:
        command = [sys.executable, "-m", PROGRAM, str(os.getpid())]
        child = Child(command, {"OMP_NUM_THREADS": "1"}, patience_s=PATIENCE_S, own_group=True)
        with self._changed:
            self.child, self._loaded = child, set()
            if self._closed:
                child.kill()
        try:
            child.read(START_S)
        except ChildError as error:
            raise self._lost(child, error, "a worker process", START_S) from None

    def _lost(self, child: Child, error: ChildError, what: str, limit_s: float | None) -> CallError:
        """The process has ended, or was ended because it was late: why, for the call under way and for all games in it."""
        with self._changed:
            self.child = None
        child.close()
        if error.code is None and limit_s is not None:
            self._remember(child, f"its worker process was ended: `{what}` of another game there took more than {limit_s:g} s")
            return late(what, limit_s)
        reason = _in_words(error)
        self._remember(child, reason)
        return CallError(reason, _LOST_HINT)

    def _remember(self, child: Child, reason: str) -> None:
        self._ends[child] = reason
        while len(self._ends) > 8:
            del self._ends[next(iter(self._ends))]


_LOST_HINT = "a game that lived in the same process may be at fault; the attempt can be made again"


def _in_words(error: ChildError) -> str:
    code = error.code or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"its worker process {how}" + (f": {error.lines[-1]}" if error.lines else "")
