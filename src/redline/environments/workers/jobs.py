"""Calls that coroutines await and other threads make."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from redline.errors import CallError, TaskError, for_a_future

LIMIT_KEY = "rollouts.environment.call_timeout_s"
PATIENCE_S = 2.0
"""Seconds for threads that have nothing to do, when all is to end."""


class Job:
    """A call that a coroutine awaits, or that nobody does."""

    __slots__ = ("_future", "_loop", "what", "work")

    def __init__(self, what: str, work: Any, *, is_awaited: bool = True) -> None:
        self.what, self.work = what, work
        """The name of the function, and what a worker has to do."""
        self._loop = asyncio.get_running_loop() if is_awaited else None
        self._future: asyncio.Future[Any] | None = self._loop.create_future() if self._loop else None

    @property
    def is_wanted(self) -> bool:
        return self._future is None or not self._future.done()

    async def result(self, waiting: deque[Job], lock: threading.Condition) -> Any:
        """What comes of it. A coroutine that is cancelled takes the job out of `waiting`, if it is still there."""
        assert self._future is not None
        try:
            return await self._future
        except asyncio.CancelledError:
            with lock, suppress(ValueError):
                waiting.remove(self)
            raise

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Give the coroutine what came of the call. Any thread may; what comes second is dropped."""
        if self._loop is not None:
            with suppress(RuntimeError):  # its loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._set, value, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        assert self._future is not None
        if self._future.done():
            return
        if error is None:
            self._future.set_result(value)
        else:
            self._future.set_exception(for_a_future(error))


def late(what: str, limit_s: float, where: str = "") -> CallError:
    """Why a call failed that did not return in time."""
    hint = f"give what it waits for a limit of its own, or raise {LIMIT_KEY} (null waits for ever)"
    return CallError(f"`{what}` did not return within {limit_s:g} s", hint, where)


def late_beginning(what: str, limit_s: float) -> CallError:
    """Why a call failed whose process was not ready for it in time: the call itself had not begun."""
    return CallError(
        f"{what} took more than {limit_s:g} s in a worker process",
        "each process does this once, before its first call, and no key gives it more time: let the module do less while it is"
        " imported, or let the first call do it; in threads (run_in, reward_run_in) it is done once for all",
    )


def is_closed() -> TaskError:
    """Why a call fails that comes after the end, or is under way then."""
    return TaskError("the environment's workers were closed")
