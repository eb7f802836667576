"""Rewards by several threads at once: each takes the next group that waits, and one that never comes holds up no other.

    put ──► waiting ──► worker ──► deliver
                          │
    cancel ───────────────┴── its worker is left behind, and another takes its place

Workers are named `rewards`, `rewards-2`, … in the order in which they are started, and so are their lanes. One that is not
wanted at present waits for completions like one that has nothing to do: if it ended, it would come back as another lane.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from redline.errors import TaskError, boundary
from redline.telemetry import idle_as
from redline.telemetry.workers import forget_worker, watch_worker

Result = TypeVar("Result")


class RewardPool(Generic[Result]):
    """Implements `ports.RewardWorkers`."""

    def __init__(
        self,
        name: str,
        most: int,
        deliver: Callable[[int, Result], None],
        fail: Callable[[Exception], None],
        lock: threading.RLock,
        prepare_thread: Callable[[], None] = lambda: None,
        *,
        finish_thread: Callable[[], None] = lambda: None,
        idle: str = "wait.for_completions",
    ) -> None:
        """Begins with one worker. `deliver` gets the index of what was put in and what came of it; `fail` why a worker ended,
        which none should. Both are called in a worker that holds `lock`. `prepare_thread` is called first in each worker, and
        `finish_thread` last. `idle` names the time of a worker without work."""
        self._name, self.most = name, most
        self._deliver, self._fail = deliver, fail
        self._prepare_thread, self._finish_thread = prepare_thread, finish_thread
        self._idle = idle
        self._changed = threading.Condition(lock)
        self._waiting: deque[_Job[Result]] = deque()
        self._workers: list[_Worker] = []
        """Without those that were left behind."""
        self._num_wanted = 1
        """How many of the workers, from the first, may score."""
        self._num_started = 0
        self._quiet_for = 0
        self._load = _Load()
        self._closed = False
        with self._changed:
            self._start_missing()

    # ── what is to be computed ─────────────────────────────────────────────────────────────────────────────────────────

    def put(self, index: int, work: Callable[[], Result]) -> None:
        with self._changed:
            self._waiting.append(_Job(index, work))
            self._note_load()
            self._changed.notify_all()

    def cancel(self, indices: AbstractSet[int]) -> None:
        """None of them is delivered any more."""
        with self._changed:
            self._waiting = deque(job for job in self._waiting if job.index not in indices)
            for worker in [worker for worker in self._workers if worker.index in indices]:
                self._workers.remove(worker)
                forget_worker(worker.thread.name)
            self._start_missing()
            self._note_load()
            self._changed.notify_all()

    @property
    def num_scoring(self) -> int:
        return sum(worker.index is not None for worker in self._workers)

    @property
    def num_to_score(self) -> int:
        """Those that wait, and those that are computed."""
        return len(self._waiting) + self.num_scoring

    def be_quiet(self, *, quiet: bool) -> None:
        """Begin nothing until as many have taken it back as have asked for it."""
        with self._changed:
            self._quiet_for += 1 if quiet else -1
            self._note_load()
            self._changed.notify_all()

    # ── who computes it ────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, count: int) -> None:
        """So many workers from now on. One too many completes what it is at."""
        with self._changed:
            self._num_wanted = max(1, min(count, self.most))
            self._start_missing()
            self._changed.notify_all()

    def take_load(self) -> tuple[float, ...]:
        with self._changed:
            return self._load.take()

    def close(self) -> None:
        """Workers end as soon as they can; `join` waits for them."""
        with self._changed:
            for worker in self._workers:
                if not worker.has_failed:
                    forget_worker(worker.thread.name)
            self._closed = True
            self._changed.notify_all()

    def join(self, patience_s: float) -> None:
        """No longer than this for all of them. A reward that does not return is left behind, and ends with the process."""
        deadline = time.monotonic() + patience_s
        for worker in list(self._workers):
            worker.thread.join(max(0.0, deadline - time.monotonic()))

    def _start_missing(self) -> None:
        while not self._closed and len(self._workers) < self._num_wanted:
            self._num_started += 1
            name = self._name if self._num_started == 1 else f"{self._name}-{self._num_started}"
            worker = _Worker()
            worker.thread = new_thread(name, partial(self._work, worker), partial(self._ended, worker))
            worker.thread.start()
            self._workers.append(worker)
            watch_worker(name, worker.thread)

    # ── in a worker ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, worker: _Worker) -> None:
        self._prepare_thread()
        try:
            self._work_until_the_end(worker)
        finally:
            self._finish_thread()

    def _work_until_the_end(self, worker: _Worker) -> None:
        idle_as(self._idle)
        while (job := self._next(worker)) is not None:
            result = job.work()
            with self._changed:
                if worker not in self._workers:
                    return
                worker.index = None
                self._note_load()
                self._deliver(job.index, result)
        idle_as(self._idle)  # books the wait until here: the lane of a thread that is gone ends with its last event

    def _next(self, worker: _Worker) -> _Job[Result] | None:
        """None ends the thread."""
        with self._changed:
            while not self._closed and worker in self._workers:
                if self._waiting and not self._quiet_for and worker in self._workers[: self._num_wanted]:
                    job = self._waiting.popleft()
                    worker.index = job.index
                    return job
                self._changed.wait()
            return None

    def _ended(self, worker: _Worker, error: Exception | None) -> None:
        with self._changed:
            if worker in self._workers and error is not None:
                worker.has_failed = True
                self._fail(error)

    def _note_load(self) -> None:
        self._load.change(_Load.QUIET if self._quiet_for else self.num_to_score)


@dataclass(slots=True, frozen=True)
class _Job(Generic[Result]):
    index: int
    work: Callable[[], Result]


class _Worker:
    """A thread, and the index of what it is at."""

    thread: threading.Thread

    def __init__(self) -> None:
        self.index: int | None = None
        self.has_failed = False


class _Load:
    """For how long how much was to be computed."""

    QUIET = -1
    """Stands for a time in which nothing could be computed, however much waited."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._count = 0
        self._since = time.perf_counter()

    def change(self, count: int) -> None:
        now = time.perf_counter()
        self._seconds[self._count] += now - self._since
        self._count, self._since = count, now

    def take(self) -> tuple[float, ...]:
        """Seconds by how much it was, from nothing on, since this was last asked."""
        self.change(self._count)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return tuple(seconds[count] for count in range(max(seconds) + 1))


def new_thread(name: str, work: Callable[[], None], ended: Callable[[Exception | None], None]) -> threading.Thread:
    """One that lives no longer than the process. `ended` is called last in it, whatever happens, with what `work` raised."""

    def run() -> None:
        error: Exception | None = TaskError(
            "a task or its reward ended the thread of the rollouts", "let it raise no SystemExit"
        )
        try:
            with boundary() as caught:
                work()
            error = caught.error
        finally:
            ended(error)

    return threading.Thread(target=run, name=name, daemon=True)
