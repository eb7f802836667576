"""A call through the engine: all its prompts at once, answered whole or chunk by chunk.

A caller that stops listening, by cancelling `answer` or closing `chunks`, ends the call's requests in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from redline.errors import EngineError
from redline.serve.answers import documents
from redline.serve.answers.documents import Choice, Json
from redline.serve.metrics import ServerMetrics
from redline.serve.pace import Pace
from redline.serve.requests.admission import Place
from redline.serve.requests.calls import Call
from redline.serve.vocabulary import Vocabulary
from redline.types import Completion, Delta, EngineStats, GenerateRequest

Item = TypeVar("Item")
Work = Callable[[Callable[[Item], None]], Awaitable[None]]
"""Gets a function, and calls it with each item that it makes."""

SMALL_ANSWER = 2048
"""Tokens and alternatives to them that an answer may show and still be made at once."""
MOST_PORTIONS = 8
"""Times that a prompt is computed which is scored as well."""
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
        return [completion for part in await in_portions(place, request, engine.complete) for completion in part]

    with _first_engine_error():
        async with asyncio.TaskGroup() as group:  # one refused prompt cancels the others
            tasks = [group.create_task(complete(request)) for request in call.requests]
    completions = [task.result() for task in tasks]
    for prompt, group_completions in zip(call.prompts, completions, strict=True):
        metrics.generated(len(prompt.ids), group_completions)
    choices = await pace.finish(_whole_choices(call, completions, vocabulary), is_small=call.num_shown <= SMALL_ANSWER)
    return documents.whole(call, choices, documents.usage(call, completions))


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

    def stream(request: GenerateRequest) -> Work[Delta]:
        async def work(put: Callable[[Delta], None]) -> None:
            async def run(part: GenerateRequest) -> None:
                async with aclosing(engine.stream(part)) as deltas:
                    async for delta in deltas:
                        put(delta)

            await in_portions(place, request, run)

        return work

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
                    said.append(documents.chunk(call, [json], is_first=is_first))
                    is_first = False
            if said:
                yield said
    completions = [[finished[n, i] for i in range(request.sampling.n)] for n, request in enumerate(call.requests)]
    for prompt, of_prompt in zip(call.prompts, completions, strict=True):
        metrics.generated(len(prompt.ids), of_prompt)
    if call.body.stream_options.include_usage:
        yield [documents.chunk(call, [], usage=documents.usage(call, completions))]


async def in_portions(
    place: Place, request: GenerateRequest, run: Callable[[GenerateRequest], Coroutine[Any, Any, Item]]
) -> list[Item]:
    """Run a request's choices as the place gets rows for them: all at once where there are as many, else in several requests
    for the same prompt, which the engine finds computed. Returns what came of each of these, in order. A prompt that is scored
    as well is computed every time: then a portion is no smaller than n / `MOST_PORTIONS`."""
    sampling = request.sampling
    least = -(-sampling.n // MOST_PORTIONS) if sampling.prompt_logprobs else 1
    count = await place.take(sampling.n, least)
    if count == sampling.n:
        try:
            return [await run(request)]
        finally:
            place.give(count)
    tasks, first = list[asyncio.Task[Item]](), 0
    with _first_engine_error():
        async with asyncio.TaskGroup() as group:
            while True:
                part = replace(request, sampling=replace(sampling, n=count, first_index=first))
                tasks.append(group.create_task(run(part)))
                # Not in the task: one that is cancelled before it begins does nothing at its end.
                tasks[-1].add_done_callback(partial(_give, place, count))
                first += count
                if first == sampling.n:
                    break
                count = await place.take(sampling.n - first, min(least, sampling.n - first))
    return [task.result() for task in tasks]


def _give(place: Place, count: int, task: asyncio.Task[Any]) -> None:
    place.give(count)


@contextmanager
def _first_engine_error() -> Generator[None]:
    """Raise what the engine said rather than a group of errors."""
    try:
        yield
    except* EngineError as errors:
        raise errors.exceptions[0] from None


async def merged(works: Sequence[Work[Item]]) -> AsyncGenerator[list[tuple[int, Item]]]:
    """Items that all works put down as they come, each with the number of its work; at most `MOST_TOGETHER` at once. Closing it
    cancels them all, and so does an error in one."""
    arrived: asyncio.Queue[tuple[int, Item | None]] = asyncio.Queue()

    async def pump(number: int, work: Work[Item]) -> None:
        try:
            await work(lambda item: arrived.put_nowait((number, item)))
        finally:
            arrived.put_nowait((number, None))

    pumps = [asyncio.create_task(pump(number, work)) for number, work in enumerate(works)]
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
                    await pumps[number]  # raises what ended the work, if it was not its end
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
