"""Functions of the user's that are `async def`: all their coroutines run in one event loop, in a thread of its own.

One loop, since a client that was opened in a loop works in no other.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any

from redline.errors import no_end_of_the_program
from redline.telemetry.stalls.calls import current_call

ANSWERS_WITHIN_S = 1.0
"""A loop that does not is blocked by a call that does not await."""


class EventLoop:
    """Begins with the first coroutine, and is left behind for a new one where something blocks it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def result(self, value: Any) -> Any:
        """The value; if it is a coroutine or anything else that can be awaited, what comes of it. Blocks until then."""
        if not inspect.isawaitable(value):
            return value
        future = asyncio.run_coroutine_threadsafe(_awaited(value), self._running())
        call = current_call()
        if call is not None:
            call.coroutine, call.cancel = value, future.cancel
        return future.result()

    def leave_if_blocked(self) -> None:
        """Something in it does not return. Blocks for a second at most."""
        answered = threading.Event()
        with self._lock:
            if self._loop is None:
                return
            self._loop.call_soon_threadsafe(answered.set)
        if not answered.wait(ANSWERS_WITHIN_S):
            with self._lock:
                self._loop = None

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="coroutines", daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped. Coroutines that have not ended then may still be cancelled, and keep it open."""
    loop.run_forever()
    if not asyncio.all_tasks(loop):
        loop.close()


async def _awaited(value: Awaitable[Any]) -> Any:
    """What comes of it. An end of the program that it asks for would end the loop, and be lost."""
    try:
        return await value
    except (KeyboardInterrupt, SystemExit) as error:
        raise no_end_of_the_program(error) from None
