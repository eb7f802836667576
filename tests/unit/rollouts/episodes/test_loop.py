"""The event loop of all attempts: how it ends."""

from __future__ import annotations

import asyncio
import inspect

from support.eventually import eventually

from redline.rollouts.episodes.loop import EpisodeLoop


async def attempt() -> None:
    raise AssertionError("it never begins")


def test_an_attempt_that_had_not_begun_when_the_loop_ended_is_let_go_of() -> None:
    """Else Python says of each that it was never awaited."""
    ended: list[BaseException] = []
    loop, coroutine = EpisodeLoop(lambda: False, ended.append), attempt()
    tasks: list[asyncio.Task[None]] = []

    def begin_and_end() -> None:
        tasks.append(loop.loop.create_task(coroutine))
        loop.loop.stop()

    loop.post(begin_and_end)
    eventually(loop.loop.is_closed)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert [str(error).partition("\n")[0] for error in ended] == ["the event loop of the environments has ended"]
    loop.close(0.0)
