"""Calls in processes: what happens to the interpreter there, happens to the games there, and the run goes on.

    coroutine ──► queue of one worker ──► its thread ──► its process (`program.py`), on this machine or on a cluster's node
              ◄───────────────────────────────── value, or error

A game lives in one process, which holds many and makes one call at a time. A process that ends by itself, or is ended because a
call took too long, fails the games that lived in it: each gets the reason at its next call. The next game begins another.

There are as many processes as there are games or calls at once, up to a limit: one begins as soon as something has to share
another, and ends when it has had nothing to do for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count as counter
from typing import Any

from redline.environments.workers.held import GameClass
from redline.environments.workers.jobs import PATIENCE_S, Job
from redline.environments.workers.plain import to_plain
from redline.environments.workers.process import WorkerProcess
from redline.environments.workers.worker import Ask, Message, Worker
from redline.errors import TaskError
from redline.telemetry.stalls.calls import Call


@dataclass(slots=True, frozen=True)
class Scale:
    """How the number of processes follows what there is to do."""

    least: int = 1
    """Processes that stay once they have begun."""
    idle_s: float | None = 300.0
    """Seconds after which one beyond these ends that has nothing to do; None keeps all."""


class ProcessWorkers:
    """Makes calls in worker processes. Implements `Workers`."""

    def __init__(
        self, count: int, limit_s: float | None, scale: Scale | None = None, *, name: str = "environment process"
    ) -> None:
        """At most `count` processes. A call may last `limit_s` seconds; None waits for ever. Threads and lanes are called
        `name`, with a number."""
        self._scale = scale or Scale()
        self._workers = [
            Worker(f"{name} {number}", limit_s, self._scale.idle_s, self._may_end, self._hand_on)
            for number in range(1, count + 1)
        ]
        self._ids = counter(1)
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Processes there are now."""
        return [process.pid for worker in self._workers if (process := worker.process) is not None]

    @property
    def num_running(self) -> int:
        """Processes that take calls now."""
        return sum(worker.is_ready for worker in self._workers)

    async def make(self, game: GameClass) -> HeldInProcess:
        held = HeldInProcess(self, self._least_loaded(holds=True), next(self._ids))
        try:
            message = {"do": "make", "id": held.id, "path": game.path, "folder": game.folder}
            message["keywords"] = to_plain(game.keywords)
            first = [_import_of(game.path, game.folder)]
            await held.worker.answer(Ask(game.path.partition(":")[2], message, held, first=first))
        except BaseException:
            held.drop()
            raise
        return held

    async def call(
        self,
        function: str | Callable[..., Any],
        *arguments: Any,
        first: tuple[Any, ...] = (),
        timed: Call | None = None,
    ) -> Any:
        """What a function, named by import path, returns. `first` is what each process does once
        before, in words, and the function, with its arguments, that does it; the time of `timed` counts when the process has
        begun and has done so."""
        if not isinstance(function, str):
            raise TaskError(
                f"{function!r} is called in worker processes, which know functions by their names",
                'name it as "module:function", or set rollouts.environment.run_in=threads',
            )
        before = [_import_of(function, None)]
        if first:
            before.append((first[0], _call_of(*first[1:])))
        ask = Ask(function.partition(":")[2], _call_of(function, *arguments), first=before, timed=timed)
        return await self._least_loaded().answer(ask)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        deadline = time.monotonic() + PATIENCE_S
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    # ── who does what ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _least_loaded(self, *, holds: bool = False) -> Worker:
        with self._lock:
            worker = min(self._workers, key=lambda worker: worker.load)
            worker.num_games += holds
            return worker

    def _may_end(self, worker: Worker) -> bool:
        """Whether the process of a worker may end. It then counts no longer as one that is ready."""
        with self._lock:
            if worker.num_games or self.num_running <= self._scale.least:
                return False
            worker.is_ready = False
            return True

    def _hand_on(self, worker: Worker) -> bool:
        """Give what waits for a process that does not begin to workers whose processes have. Returns whether the process is
        still wanted: there is more to do than there are processes."""
        ready = [other for other in self._workers if other.is_ready]
        for job in worker.take_new_jobs() if ready else ():
            with self._lock:
                other = min(ready, key=lambda other: other.load)
                if isinstance(held := job.work.held, HeldInProcess):
                    held.move_to(other)
            try:
                other.put(job)
            except TaskError as error:  # they are closed
                job.settle(None, error)
        return not ready or sum(other.num_games + other.num_calls for other in ready) > len(ready)

    def leave(self, worker: Worker) -> None:
        """A game has left a worker."""
        with self._lock:
            worker.num_games -= 1


def _import_of(path: str, folder: str | None) -> tuple[str, Message]:
    return f"import of {path}", {"do": "load", "path": path, "folder": folder}


def _call_of(function: str, *arguments: Any) -> Message:
    return {"do": "function", "path": function, "folder": None, "arguments": [to_plain(argument) for argument in arguments]}


class HeldInProcess:
    """Implements `Held`."""

    __slots__ = ("_is_dropped", "_pool", "id", "process", "worker")

    def __init__(self, pool: ProcessWorkers, worker: Worker, number: int) -> None:
        self._pool, self.worker, self.id = pool, worker, number
        self.process: WorkerProcess | None = None
        """The process that it lives in; None until it is made."""
        self._is_dropped = False

    async def call(self, name: str, *arguments: Any) -> Any:
        message = {"do": "call", "id": self.id, "name": name, "arguments": [to_plain(argument) for argument in arguments]}
        return await self.worker.answer(Ask(name, message, self))

    def drop(self) -> None:
        if self._is_dropped:
            return
        self._is_dropped = True
        self._pool.leave(self.worker)
        with suppress(TaskError):  # they are closed: the game is gone
            self.worker.put(Job("close", Ask("close", {"do": "drop", "id": self.id}, self), is_awaited=False))

    def move_to(self, worker: Worker) -> None:
        """Have it made by another worker."""
        if not self._is_dropped:
            self.worker.num_games -= 1
            worker.num_games += 1
        self.worker = worker
