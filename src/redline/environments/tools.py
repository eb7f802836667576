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
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast, overload

from redline.environments.schemas import schema_of
from redline.environments.workers.threads import ThreadWorkers
from redline.errors import TaskError, boundary, in_words
from redline.ports import Policy, Score
from redline.types import Message, Task, ToolCall

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


@dataclass(slots=True, frozen=True)
class Tool:
    """A function that the policy may call."""

    schema: Mapping[str, Any]
    """As `policy.say` takes it."""
    function: Callable[..., Any]
    quick: bool
    """Whether it may be called in the event loop."""


F = TypeVar("F", bound=Callable[..., Any])


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, quick: bool) -> Callable[[F], F]: ...
def tool(function: F | None = None, *, quick: bool = False) -> F | Callable[[F], F]:
    """Mark a method as one that the policy may call. An `async def` is awaited; any other runs in a thread, with the time limit
    `tool_timeout_s`. With `quick=True` it runs in the event loop itself: for one that never waits and takes microseconds."""

    def mark(function: F) -> F:
        setattr(function, MARK, quick)
        return function

    return mark if function is None else mark(function)


class ToolEnvironment:
    """Implements `ports.Environment`; a subclass has methods marked with `tool`, and `score`."""

    max_calls = 8
    """Calls in one attempt; the reply after them is the answer, whatever it is."""
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
            turn = await policy.say(messages, tools=schemas)
            if not turn.tool_calls and not turn.problem:
                return await _awaited(self.score(task, turn.text, calls))
            if len(calls) >= self.max_calls:
                return await _awaited(self.score(task, NO_ANSWER, calls))
            messages.append(turn.message)
            made = [await self._called(tools, call) for call in turn.tool_calls]
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
            found = {name: Tool(schema_of(method), method, getattr(method, MARK)) for name, method in members}
            if not found:
                raise TaskError(f"{type(self).__name__} has no tool", "mark a method with @tool")
            self.__dict__["_found_tools"] = found
        return cast(dict[str, Tool], found)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
