"""Threads that wait for the answers of a server. They end with the process: a server that never answers holds up nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from redline.errors import boundary

Result = TypeVar("Result")
Order = tuple[Future[Any], Callable[[], Any]]
Waiting = queue.SimpleQueue[Order | None]


class CallThreads:
    """Makes calls in at most `most` threads, which begin when they are needed. At its exit the process would wait for the
    threads of a `ThreadPoolExecutor`; these are left behind."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._waiting: Waiting = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Counts threads that wait for a call."""
        self._num_threads = 0

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Have a thread make the call. Returns at once. For one thread at a time."""
        future: Future[Result] = Future()
        self._waiting.put((future, call))
        if not self._idle.acquire(blocking=False) and self._num_threads < self._most:
            self._num_threads += 1
            name = f"{self._name}-{self._num_threads}"
            threading.Thread(target=_work, args=(self._waiting, self._idle), name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """Make no further call, and end the threads once those under way are over. Does not wait for them."""
        with suppress(queue.Empty):
            while (order := self._waiting.get_nowait()) is not None:
                order[0].cancel()
        for _ in range(self._num_threads):
            self._waiting.put(None)

    def __del__(self) -> None:
        """Leave no threads behind where nobody has closed them: they do not know this object."""
        self.close()


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Make one call in a thread of its own, which ends with it, or with the process. Returns at once."""
    future: Future[Result] = Future()
    threading.Thread(target=_make, args=(future, call), name=name, daemon=True).start()
    return future


def _work(waiting: Waiting, idle: threading.Semaphore) -> None:
    while (order := _next(waiting, idle)) is not None:
        _make(*order)
        del order  # or the last call would keep its caller alive


def _next(waiting: Waiting, idle: threading.Semaphore) -> Order | None:
    with suppress(queue.Empty):
        return waiting.get_nowait()
    idle.release()
    return waiting.get()


def _make(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    result = None
    with boundary() as caught:
        result = call()
    if caught.error is None:
        future.set_result(result)
    else:
        future.set_exception(caught.error)
