"""Environments in which the policy calls functions: write the functions and a score, and `play` is there.

    class Shop(ToolEnvironment):
        @tool
        def price(self, article: str) -> str:
            "The price of an article."
            return PRICES[article]

        def score(self, task: Task, answer: str, calls: Sequence[Called]) -> float:
            return float(task.answer in answer)

The model sees each function's name, docstring and arguments (`schemas.py`) in its chat template's own format, and gets what the
function returns. What it raises is its result too: `error: KeyError: 'pear'`. A reply without a call is the answer.

    reply ──► … call complete ──► early tool begins ┄┄┄┄┄┄┄┄┄┄┄► its result
              … call complete ──► `ends_at_call`: the reply ends
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar, cast, overload

from redline.environments.schemas import schema_of
from redline.environments.workers.threads import ThreadWorkers
from redline.errors import TaskError, boundary, in_words
from redline.ports import Policy, Score
from redline.types import Message, ReplySoFar, Task, ToolCall

MARK = "_redline_tool"
NO_ANSWER = ""


@dataclass(slots=True, frozen=True)
class Called:
    """A call that the policy made in an attempt."""

    call: ToolCall
    result: str
    """What the policy was shown."""
    failed: bool
    """Whether the function raised, or there is none of that name."""
    began_early: bool = False
    """Whether it began while the reply with the call was still sampled."""


@dataclass(slots=True, frozen=True)
class Tool:
    """A function that the policy may call."""

    schema: Mapping[str, Any]
    """As `policy.say` takes it."""
    function: Callable[..., Any]
    quick: bool
    """Whether it may be called in the event loop."""
    early: bool = False
    """Whether it may begin before the reply with the call has ended."""


F = TypeVar("F", bound=Callable[..., Any])


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, quick: bool = False, early: bool = False) -> Callable[[F], F]: ...
def tool(function: F | None = None, *, quick: bool = False, early: bool = False) -> F | Callable[[F], F]:
    """Mark a method as one that the policy may call. An `async def` is awaited; any other runs in a thread, with the time limit
    `tool_timeout_s`. With `quick=True` it runs in the event loop itself: for one that never waits and takes microseconds. With
    `early=True` it begins when its call is complete, while the rest of the reply is sampled and before calls that stand in
    front of it are made: for one that changes nothing, since its result is thrown away where the reply ends otherwise."""

    def mark(function: F) -> F:
        setattr(function, MARK, {"quick": quick, "early": early})
        return function

    return mark if function is None else mark(function)


class ToolEnvironment:
    """Implements `ports.Environment`; a subclass has methods marked with `tool`, and `score`."""

    max_calls = 8
    """Calls in one attempt; the reply after them is the answer, whatever it is."""
    ends_at_call = False
    """Whether a reply ends with its first call that is complete. What the policy would have said after it is not sampled."""
    tool_timeout_s: float | None = 60.0
    tool_threads = 8
    """Calls at once of functions that are neither `async` nor quick."""
    system = ""
    """The first message of each conversation, if any."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def score(self, task: Task, answer: str, calls: Sequence[Called]) -> Score:
        """The reward: a number or named parts. `answer` is the reply without a call; empty where none came. May be async."""
        raise NotImplementedError

    def first_messages(self, task: Task) -> list[Message]:
        """What the policy sees first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *task.messages]

    async def play(self, task: Task, policy: Policy) -> Score:
        messages, calls = self.first_messages(task), list[Called]()
        tools = self._tools()
        schemas = [tool.schema for tool in tools.values()]
        while True:
            may_call = len(calls) < self.max_calls
            with EarlyCalls(tools if may_call else {}, partial(self._called, tools), self.ends_at_call) as early:
                turn = await policy.say(messages, tools=schemas, **early.options)
                if not turn.tool_calls and not turn.problem:
                    return await _awaited(self.score(task, turn.text, calls))
                if not may_call:
                    return await _awaited(self.score(task, NO_ANSWER, calls))
                messages.append(turn.message)
                made = [
                    await early.result(i, call) or await self._called(tools, call) for i, call in enumerate(turn.tool_calls)
                ]
            if turn.problem:  # no call that could be answered, so that the words are the user's
                made = [Called(ToolCall("", {}), f"error: {turn.problem}", failed=True)]
                messages.append({"role": "user", "content": made[0].result})
            else:
                messages += [{"role": "tool", "name": done.call.name, "content": done.result} for done in made]
            calls += made

    def close(self) -> None:
        """End the threads of its tools. Blocks for some seconds at most."""
        if (threads := self.__dict__.pop("_threads", None)) is not None:
            threads.close()

    async def _called(self, tools: Mapping[str, Tool], call: ToolCall) -> Called:
        """Make a call. What goes wrong with it is its result."""
        if call.name not in tools:
            return Called(call, f"error: there is no function {call.name}; there are: {', '.join(tools)}", failed=True)
        value = None
        with boundary(lets_close=True) as caught:
            value = await self._value(tools[call.name], call.arguments)
        if caught.error is not None:
            return Called(call, f"error: {in_words(caught.error)}", failed=True)
        return Called(
            call, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False), failed=False
        )

    async def _value(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        arguments = copy.deepcopy(dict(arguments))  # the function may change them, and the reply stays what it was
        if tool.quick or inspect.iscoroutinefunction(tool.function):
            return await _awaited(tool.function(**arguments))
        threads = self.__dict__.setdefault("_threads", None) or self._started_threads()
        return await _awaited(await threads.make_call(tool.function.__name__, partial(tool.function, **arguments)))

    def _started_threads(self) -> ThreadWorkers:
        self.__dict__["_threads"] = threads = ThreadWorkers(self.tool_threads, self.tool_timeout_s)
        return threads

    def _tools(self) -> dict[str, Tool]:
        if (found := self.__dict__.get("_found_tools")) is None:
            members = inspect.getmembers(self, lambda member: callable(member) and hasattr(member, MARK))
            found = {name: Tool(schema_of(method), method, **getattr(method, MARK)) for name, method in members}
            if not found:
                raise TaskError(f"{type(self).__name__} has no tool", "mark a method with @tool")
            self.__dict__["_found_tools"] = found
        return cast(dict[str, Tool], found)


class EarlyCalls:
    """Calls of one reply that begin while it is sampled. Leaving it cancels those whose results nobody has asked for."""

    def __init__(
        self, tools: Mapping[str, Tool], call: Callable[[ToolCall], Coroutine[Any, Any, Called]], ends_at_call: bool
    ) -> None:
        """`tools` are those that may be called now, which `call` does. With `ends_at_call`, the first call ends the reply."""
        self._tools, self._call, self._ends_at_call = tools, call, ends_at_call
        self._begun: dict[int, tuple[ToolCall, asyncio.Task[Called]]] = {}
        """By their place among the calls of the reply."""

    @property
    def options(self) -> dict[str, Any]:
        """For `policy.say`: an `until` that begins them and ends the reply where it should. Empty where there is nothing to do
        before the reply has ended."""
        has_early = any(tool.early for tool in self._tools.values())
        return {"until": self._look} if has_early or self._ends_at_call else {}

    def _look(self, reply: ReplySoFar) -> bool:
        for place, call in enumerate(reply.tool_calls):
            known = self._tools.get(call.name)
            if known is not None and known.early and not self._has_begun(place, call):
                self._cancel(place)
                self._begun[place] = call, asyncio.ensure_future(self._call(call))
        return self._ends_at_call and bool(reply.tool_calls)

    async def result(self, place: int, call: ToolCall) -> Called | None:
        """The result of a call of the reply as it ended; None where that call has not begun."""
        return replace(await self._begun[place][1], began_early=True) if self._has_begun(place, call) else None

    def _has_begun(self, place: int, call: ToolCall) -> bool:
        begun = self._begun[place][0] if place in self._begun else None
        return begun == call or repr(begun) == repr(call)  # a NaN is equal to none, itself included

    def _cancel(self, place: int) -> None:
        if place in self._begun:
            self._begun.pop(place)[1].cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for place in list(self._begun):
            self._cancel(place)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
