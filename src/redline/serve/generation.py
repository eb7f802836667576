"""A call through the engine: all its prompts at once, answered whole or chunk by chunk.

A caller that stops listening, by cancelling `answer` or closing `chunks`, ends the call's requests in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from redline.errors import EngineError
from redline.serve import answers
from redline.serve.admission import Place
from redline.serve.answers import Choice, Json
from redline.serve.calls import Call
from redline.serve.metrics import ServerMetrics
from redline.serve.pace import Pace
from redline.serve.vocabulary import Vocabulary
from redline.types import Completion, Delta, EngineStats, GenerateRequest

Item = TypeVar("Item")

SMALL_ANSWER = 2048
"""Tokens and alternatives to them that an answer may show and still be made at once."""
MOST_TOGETHER = 64
"""Pieces that are written to a client at once."""


class RunningEngine(Protocol):
    """`redline.engine.EngineSession`, as far as the server needs it."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]: ...

    async def complete(self, request: GenerateRequest) -> list[Completion]: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def failure(self) -> BaseException | None:
        """Why it is not alive any more, where it was not asked to end."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds that the step under way has lasted; 0 between two steps."""
        ...


async def answer(
    call: Call, place: Place, engine: RunningEngine, vocabulary: Vocabulary, metrics: ServerMetrics, pace: Pace
) -> Json:
    """The whole answer."""

    async def complete(request: GenerateRequest) -> list[Completion]:
        async with place.rows(request.sampling.n):
            return await engine.complete(request)

    try:
        async with asyncio.TaskGroup() as group:  # one refused prompt cancels the others
            tasks = [group.create_task(complete(request)) for request in call.requests]
    except* EngineError as errors:
        raise errors.exceptions[0] from None
    completions = [task.result() for task in tasks]
    for prompt, group_completions in zip(call.prompts, completions, strict=True):
        metrics.generated(len(prompt.ids), group_completions)
    choices = await pace.finish(_whole_choices(call, completions, vocabulary), is_small=call.num_shown <= SMALL_ANSWER)
    return answers.whole(call, choices, answers.usage(call, completions))


def _whole_choices(
    call: Call, completions: Sequence[Sequence[Completion]], vocabulary: Vocabulary
) -> Generator[None, None, list[Json]]:
    """Returns all choices; yields now and then."""
    choices = []
    for number, of_prompt in enumerate(completions):
        for index, completion in enumerate(of_prompt):
            choices.append((yield from Choice(call, number, index, vocabulary).whole(completion)))
    return choices


async def chunks(
    call: Call, place: Place, engine: RunningEngine, vocabulary: Vocabulary, metrics: ServerMetrics
) -> AsyncGenerator[list[Json]]:
    """The answer in pieces, those that arrived together together; the first comes when the engine has accepted every prompt
    that it has room for."""

    async def stream(request: GenerateRequest) -> AsyncGenerator[Delta]:
        async with place.rows(request.sampling.n), aclosing(engine.stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    choices: dict[tuple[int, int], Choice] = {}
    finished: dict[tuple[int, int], Completion] = {}
    is_first = True
    async with aclosing(merged([stream(request) for request in call.requests])) as pieces:
        async for arrived in pieces:
            said = []
            for number, delta in arrived:
                key = number, delta.index
                choice = choices.get(key) or choices.setdefault(key, Choice(call, *key, vocabulary))
                if delta.completion:
                    finished[key] = delta.completion
                    del choices[key]
                json = choice.chunk(delta)
                if json is not None:
                    said.append(answers.chunk(call, [json], is_first=is_first))
                    is_first = False
            if said:
                yield said
    completions = [[finished[n, i] for i in range(request.sampling.n)] for n, request in enumerate(call.requests)]
    for prompt, of_prompt in zip(call.prompts, completions, strict=True):
        metrics.generated(len(prompt.ids), of_prompt)
    if call.body.stream_options.include_usage:
        yield [answers.chunk(call, [], usage=answers.usage(call, completions))]


async def merged(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[list[tuple[int, Item]]]:
    """Items of all streams as they come, each with the number of its stream; at most `MOST_TOGETHER` at once. Closing it closes
    them all, and so does an error in one."""
    arrived: asyncio.Queue[tuple[int, Item | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    arrived.put_nowait((number, item))
        finally:
            arrived.put_nowait((number, None))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            together: list[tuple[int, Item]] = []
            entry: tuple[int, Item | None] | None = await arrived.get()
            while entry is not None:
                number, item = entry
                if item is not None:
                    together.append((number, item))
                elif not together:
                    num_open -= 1
                    await pumps[number]  # raises what ended the stream, if it was not its end
                else:  # first what came before the end
                    arrived.put_nowait(entry)
                    break
                is_more = len(together) < MOST_TOGETHER and not arrived.empty()
                entry = arrived.get_nowait() if is_more else None
            if together:
                yield together
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
