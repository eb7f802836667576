"""A call through the engine: all its prompts at once, answered whole or chunk by chunk.

Whoever stops listening, by cancelling `answer` or closing `chunks`, ends the call's requests in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from redline.engine.stats import EngineStats
from redline.errors import EngineError
from redline.serve import answers
from redline.serve.answers import Choice, Json
from redline.serve.calls import Call
from redline.serve.metrics import ServerMetrics
from redline.serve.vocabulary import Vocabulary
from redline.types import Completion, Delta, GenerateRequest

Item = TypeVar("Item")


class RunningEngine(Protocol):
    """`redline.engine.AsyncEngine`, as far as the server needs it."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...

    async def complete(self, request: GenerateRequest) -> list[Completion]: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None:
        """Why it is not alive any more, where nobody asked it to end."""
        ...


async def answer(call: Call, engine: RunningEngine, vocabulary: Vocabulary, metrics: ServerMetrics) -> Json:
    """The whole answer."""
    try:
        async with asyncio.TaskGroup() as group:  # one refused prompt cancels the others
            tasks = [group.create_task(engine.complete(request)) for request in call.requests]
    except* EngineError as errors:
        raise errors.exceptions[0] from None
    completions = [task.result() for task in tasks]
    for prompt, group_completions in zip(call.prompts, completions, strict=True):
        metrics.generated(len(prompt.ids), group_completions)
    choices = [
        Choice(call, number, index, vocabulary).whole(completion)
        for number, of_prompt in enumerate(completions)
        for index, completion in enumerate(of_prompt)
    ]
    return answers.whole(call, choices, answers.usage(call, completions))


async def chunks(call: Call, engine: RunningEngine, vocabulary: Vocabulary, metrics: ServerMetrics) -> AsyncGenerator[Json]:
    """The answer in pieces; the first comes when the engine has accepted every prompt."""
    choices = {
        (number, index): Choice(call, number, index, vocabulary)
        for number, request in enumerate(call.requests)
        for index in range(request.sampling.n)
    }
    finished: dict[tuple[int, int], Completion] = {}
    is_first = True
    async with aclosing(merged([engine.stream(request) for request in call.requests])) as pieces:
        async for number, delta in pieces:
            if delta.completion:
                finished[number, delta.index] = delta.completion
            choice = choices[number, delta.index].chunk(delta)
            if choice is not None:
                yield answers.chunk(call, [choice], is_first=is_first)
                is_first = False
    completions = [[finished[n, i] for i in range(request.sampling.n)] for n, request in enumerate(call.requests)]
    for prompt, of_prompt in zip(call.prompts, completions, strict=True):
        metrics.generated(len(prompt.ids), of_prompt)
    if call.body.stream_options.include_usage:
        yield answers.chunk(call, [], usage=answers.usage(call, completions))


async def merged(streams: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Items of all streams as they come, each with the number of its stream. Closing it closes them all, and so does an error
    in one."""
    arrived: asyncio.Queue[tuple[int, Item | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[Item]) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((number, item))
        finally:
            arrived.put_nowait((number, None))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            number, item = await arrived.get()
            if item is None:
                num_open -= 1
                await pumps[number]  # raises what ended the stream, if it was not its end
            else:
                yield number, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
