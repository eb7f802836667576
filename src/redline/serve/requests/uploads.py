"""Bodies that are still being sent: bounded by themselves, so that slow clients hold no place of requests that are ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from redline.serve.requests.protocol import ApiError

GRACE_S = 1.0
"""A body that has been on its way for less is not given up for another."""


class Uploads:
    """The bodies that one event loop is reading. Where there are too many, the one begun first is given up: a body takes
    milliseconds to come, unless its client is slow on purpose or its line is."""

    def __init__(self, most: int, limit_s: float) -> None:
        """At most `most` bodies at once, and `limit_s` seconds for each."""
        self._most, self._limit_s = most, limit_s
        self._under_way: dict[asyncio.Timeout, float] = {}
        """When each began, the oldest first."""
        self._given_up: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[None]:
        """Inside, a body may be waited for. Raises `ApiError` where it takes too long, or there is no room for it."""
        loop = asyncio.get_running_loop()
        self._make_room(loop.time())
        deadline = asyncio.timeout(self._limit_s)
        try:
            async with deadline:
                self._under_way[deadline] = loop.time()
                yield
        except TimeoutError as error:
            raise self._too_slow(deadline) from error
        finally:
            self._under_way.pop(deadline, None)
            self._given_up.discard(deadline)

    def _make_room(self, now: float) -> None:
        if len(self._under_way) < self._most:
            return
        oldest, began = next(iter(self._under_way.items()))
        if now - began < GRACE_S:
            raise ApiError(
                429,
                f"the server is busy: {self._most} bodies are being sent at once (serve.max_uploads is the limit); try again in"
                " 1 s",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        del self._under_way[oldest]
        self._given_up.add(oldest)
        oldest.reschedule(now)

    def _too_slow(self, deadline: asyncio.Timeout) -> ApiError:
        reason = f"the body did not arrive within {self._limit_s:g} s"
        if deadline in self._given_up:
            reason = f"the body came too slowly: more than {self._most} are being sent, and the one begun first is given up"
        return ApiError(408, reason, headers={"connection": "close"})
