"""Long work on the event loop in short pieces, with rests between them.

Whatever runs on the loop keeps tokens from every client, and keeps the engine's thread from Python's lock. Work that grows with
what one client asked for is therefore done a few milliseconds at a time, by one request at a time, and rests `REST` times as
long as it ran: all of it together takes no more than 1 / (1 + REST) of the loop's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

PIECE_S = 0.002
REST = 3.0

Result = TypeVar("Result")


class Pace:
    """One per event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def call(self, work: Callable[[], Result]) -> Result:
        """Do work that cannot be divided, and rest before the next."""
        async with self._turn:
            began = time.perf_counter()
            try:
                return work()
            finally:
                await asyncio.sleep(REST * (time.perf_counter() - began))

    async def finish(self, work: Generator[Any, None, Result], *, is_small: bool = False) -> Result:
        """Advance a generator to its end, in pieces; returns what it returns. One that is small does not wait for its turn, and
        only lets others run between two pieces."""
        end: list[Result] = []
        while not end:
            if is_small:
                _advance(work, end)
                await asyncio.sleep(0)
            else:
                await self.call(lambda: _advance(work, end))
        return end[0]

    async def items(self, work: Generator[Result]) -> AsyncGenerator[list[Result]]:
        """What a generator yields, a piece's worth at a time."""
        end: list[None] = []
        while not end:
            yield await self.call(lambda: _advance(work, end))


def _advance(work: Generator[Result, None, Any], end: list[Any]) -> list[Result]:
    """For `PIECE_S` seconds; returns what came. At its end, what it returned is put into `end`."""
    items = []
    deadline = time.perf_counter() + PIECE_S
    while time.perf_counter() < deadline:
        try:
            items.append(next(work))
        except StopIteration as stop:
            end.append(stop.value)
            break
    return items
