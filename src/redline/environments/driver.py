"""Plays attempts with a policy that is a function, without an engine: for `redline env check`, `redline env play` and tests.

    driver = Driver(environment)
    episode = driver.play(task, lambda asked: Reply("42"), limit_s=10)
    episode.score, episode.error, [exchange.asked.messages for exchange in episode.exchanges]

All attempts of a driver run in one event loop in a thread of its own, as they do in a run. What does not return in time is left
behind with that thread, and the next attempt gets another: nothing here hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from redline.errors import CallError, boundary, for_a_future
from redline.ports import Environment
from redline.say_arguments import check_messages, check_role, check_until, checked_max_tokens, checked_stop, ends_reply
from redline.telemetry.stalls.calls import suspended_frames
from redline.telemetry.stalls.stacks import current_frames, users_place
from redline.types import FinishReason, Message, ReplySoFar, Task, ToolCall, Turn, Until, VersionSpan

BEAT_S = 0.005
"""How often the loop is asked whether something holds it up."""
STILL_S = 5.0
"""How often it is told that an attempt has not ended."""
LOOKS = 20
"""How often it is looked for the place of an attempt that others take turns with: at most moments the loop is elsewhere."""


@dataclass(slots=True, frozen=True)
class Asked:
    """What an environment asked the policy, as it was at that moment."""

    messages: Sequence[Message]
    role: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    stop: Sequence[str] = ()
    max_tokens: int | None = None
    until: Until | None = None


@dataclass(slots=True, frozen=True)
class Reply:
    """What a policy without tokens says: a text, and calls after it."""

    text: str
    tool_calls: Sequence[ToolCall] = ()
    problem: str = ""
    """As `Turn.problem`: why a call in the text could not be read."""
    num_tokens: int | None = None
    """Tokens of the text, where they were counted."""
    finish_reason: FinishReason = FinishReason.STOP


Speaker = Callable[[Asked], Reply | Turn | Awaitable[Reply | Turn]]
"""A policy: what it says to what an environment asks. One that waits is `async`; all others are called in the event loop. A
`Reply` is cut here where `until` ends it; who returns a `Turn` has sampled it so."""


@dataclass(slots=True, frozen=True)
class Exchange:
    """One turn: what was asked, and the reply."""

    asked: Asked
    turn: Turn
    environment_s: float
    """Seconds that the environment took to ask, since the attempt began or the last reply of any role was there."""
    policy_s: float


@dataclass(slots=True)
class Episode:
    """One attempt, as it was played."""

    task: Task
    exchanges: list[Exchange] = field(default_factory=list)
    score: Any = None
    """What `play` returned; whatever it is."""
    error: Exception | None = None
    """What `play` raised, or that it did not return in time."""
    end_s: float = 0.0
    """Seconds from the last reply to the end."""
    seconds: float = 0.0

    @property
    def roles(self) -> tuple[str, ...]:
        """Who spoke, sorted; one empty name in a game without roles."""
        return tuple(sorted({exchange.asked.role for exchange in self.exchanges}))


class Driver:
    """Plays attempts at tasks in an environment, one by one or many at once."""

    def __init__(
        self,
        environment: Environment,
        watch: Callable[[Exchange], None] | None = None,
        still: Callable[[Episode, float], None] = lambda episode, seconds: None,
    ) -> None:
        """`watch` is called after each turn, in the event loop; `still` every `STILL_S` seconds about an attempt that is waited
        for, with the seconds so far."""
        self._environment, self._watch, self._still = environment, watch, still
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        """Of the loop."""
        self.longest_hold_s = 0.0
        """The longest time for which one attempt kept the event loop from all others."""

    def play(self, task: Task, speak: Speaker, limit_s: float | None) -> Episode:
        """Play one attempt. Blocks for `limit_s` seconds at most, or for ever; never raises what the environment does."""
        return self.play_all([(task, speak)], limit_s)[0]

    def play_all(self, attempts: Sequence[tuple[Task, Speaker]], limit_s: float | None) -> list[Episode]:
        """Play several attempts at once: each is asked for its first turn before any gets a reply. Blocks until all have ended,
        for `limit_s` seconds at most."""
        loop, all_are_there = self._running(), asyncio.Event()
        policies = [_RecordedPolicy(Episode(task), speak, self._watch) for task, speak in attempts]
        futures = [asyncio.run_coroutine_threadsafe(self._played(policy, all_are_there), loop) for policy in policies]
        loop.call_soon_threadsafe(all_are_there.set)
        began = time.perf_counter()
        return [self._ended(policy, future, began, limit_s) for policy, future in zip(policies, futures, strict=True)]

    def close(self) -> None:
        """End the event loop. Does not block."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _ended(self, policy: _RecordedPolicy, future: Future[None], began: float, limit_s: float | None) -> Episode:
        episode = policy.episode
        while True:
            passed_s = time.perf_counter() - began
            left_s = STILL_S if limit_s is None else max(0.0, min(STILL_S, limit_s - passed_s))
            try:
                future.result(left_s)
                return episode
            except TimeoutError:
                passed_s = time.perf_counter() - began
                if limit_s is None or passed_s < limit_s:
                    self._still(episode, passed_s)
                    continue
            where = policy.place(self._thread)
            future.cancel()
            self._loop = None  # it may be blocked for ever
            late = CallError(f"did not end within {limit_s:g} s", "give it more time, or find what it waits for", where)
            return Episode(episode.task, list(episode.exchanges), error=late, seconds=limit_s)

    async def _played(self, policy: _RecordedPolicy, begin: asyncio.Event) -> None:
        await begin.wait()
        episode, policy.since, policy.task = policy.episode, time.perf_counter(), asyncio.current_task()
        began = time.perf_counter()
        with boundary() as caught:
            episode.score = await _result(self._environment, episode.task.own_copy(), policy)
        now = time.perf_counter()
        episode.error, episode.end_s, episode.seconds = caught.error, now - policy.since, now - began

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="environments", daemon=True)
            self._thread.start()
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        beat = loop.create_task(self._beat())
        loop.run_forever()
        beat.cancel()
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(beat)
        if not asyncio.all_tasks(loop):  # an attempt that was left behind may still speak to it
            loop.close()

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self.longest_hold_s = max(self.longest_hold_s, time.perf_counter() - began - BEAT_S)


async def _result(environment: Environment, task: Task, policy: _RecordedPolicy) -> Any:
    """What `play` returns. One that is not `async` is called in a thread, where `say` blocks."""
    if inspect.iscoroutinefunction(environment.play):
        value: Any = await environment.play(task, policy)
        return await value if inspect.isawaitable(value) else value
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    blocking = _BlockingPolicy(policy, loop)

    def end(value: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(for_a_future(error))
        else:
            future.set_result(value)

    def call() -> None:
        value = None
        with boundary() as caught:
            value = environment.play(task, blocking)  # type: ignore[arg-type] # `say` is not async there
        loop.call_soon_threadsafe(end, value, caught.error)

    policy.thread = threading.Thread(target=call, name="environment", daemon=True)
    policy.thread.start()
    value = await future
    return await value if inspect.isawaitable(value) else value


def _place_of(thread: threading.Thread | None) -> str:
    frame = current_frames().get(thread.ident or 0) if thread else None
    return users_place(traceback.extract_stack(frame)) if frame else ""


class _RecordedPolicy:
    """The policy of one attempt. Implements `ports.Policy`."""

    def __init__(self, episode: Episode, speak: Speaker, watch: Callable[[Exchange], None] | None) -> None:
        self.episode, self._speak, self._watch = episode, speak, watch
        self.since = time.perf_counter()
        self.task: asyncio.Task[Any] | None = None
        self.thread: threading.Thread | None = None
        """Of a `play` that is not `async`."""

    def place(self, loop: threading.Thread | None) -> str:
        """The place in the user's code where the attempt is; empty where that cannot be told. `loop` is the thread of the event
        loop, which an attempt that awaits nothing keeps to itself. Blocks for a moment."""
        for _ in range(LOOKS):
            frames = suspended_frames(self.task.get_coro()) if self.task else ()
            if found := users_place(traceback.StackSummary.extract(iter(frames))) or _place_of(self.thread or loop):
                return found
            time.sleep(0.01)
        return ""

    async def say(
        self,
        messages: Sequence[Message],
        *,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        until: Until | None = None,
    ) -> Turn:
        asked_at = time.perf_counter()
        check_role(role)
        check_messages(messages, tools)
        check_until(until)
        asked = Asked(list(messages), role, list(tools), checked_stop(stop), checked_max_tokens(max_tokens), until)
        reply = self._speak(asked)
        if inspect.isawaitable(reply):
            reply = await reply
        else:
            await asyncio.sleep(0)  # as with an engine, others go on meanwhile
        turn = turn_of(cut(reply, until)) if isinstance(reply, Reply) else reply
        now = time.perf_counter()
        exchange = Exchange(asked, turn, asked_at - self.since, now - asked_at)
        self.episode.exchanges.append(exchange)
        self.since = now
        if self._watch is not None:
            self._watch(exchange)
        return turn


class _BlockingPolicy:
    """The same for an environment that is not `async`: `say` returns the turn itself."""

    def __init__(self, policy: _RecordedPolicy, loop: asyncio.AbstractEventLoop) -> None:
        self._policy, self._loop = policy, loop

    def say(self, messages: Sequence[Message], **options: Any) -> Turn:
        return asyncio.run_coroutine_threadsafe(self._policy.say(messages, **options), self._loop).result()


def turn_of(reply: Reply) -> Turn:
    """The turn that a reply without tokens becomes: its tokens are numbered from 0."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in reply.tool_calls]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return Turn(
        text=reply.text,
        start=0,
        end=reply.num_tokens if reply.num_tokens is not None else about_tokens(reply.text),
        versions=VersionSpan(0, 0),
        finish_reason=reply.finish_reason,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        message=message,
        tool_calls=tuple(reply.tool_calls),
        problem=reply.problem,
    )


def cut(reply: Reply, until: Until | None) -> Reply:
    """The reply up to where `until` ends it, as if its text came letter by letter, and its calls after the text."""
    if until is None:
        return reply
    for length in range(1, len(reply.text) + 1):
        if ends_reply(until, ReplySoFar(reply.text[:length])):
            return replace(reply, text=reply.text[:length], tool_calls=(), problem="", finish_reason=FinishReason.STOP)
    for count in range(1, len(reply.tool_calls) + 1):
        if ends_reply(until, ReplySoFar(reply.text, reply.tool_calls[:count])):
            return replace(reply, tool_calls=reply.tool_calls[:count], finish_reason=FinishReason.STOP)
    return reply


def about_tokens(text: str) -> int:
    """Tokens of a text, as a rule of thumb: four characters each."""
    return -(-len(text) // 4)
