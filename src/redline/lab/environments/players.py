"""Who may play in `redline env play`: a person at the terminal or behind a pipe, or a model that is served somewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from redline.engine.adapters.json_client import JsonClient
from redline.environments.driver import Asked, Reply, Speaker
from redline.errors import EngineError, TaskError
from redline.rollouts.call_formats import UnreadableError
from redline.rollouts.tool_calls import checked_call
from redline.types import FinishReason, Message, Task

CALL = "/call"
HOW_TO_CALL = '/call NAME {"argument": value}'
MAX_TOKENS = 256
"""Most tokens of a served model's reply, where neither the environment nor the command line says how many."""
RETRIES = 2


class EndOfInputError(TaskError):
    """The person has nothing more to say."""


class Player(Protocol):
    """Says what the policy says."""

    def begin(self, task: Task, index: int) -> Speaker:
        """What it says in an attempt at training task `index`."""
        ...

    def close(self) -> None: ...


class Person:
    """A line of text is a reply; `/call NAME {…}` calls a tool."""

    def __init__(self, read_line: Callable[[str], str | None], tell: Callable[[str], None]) -> None:
        """`read_line` is given a prompt and returns a line, or None where there are no more."""
        self._read_line, self._tell = read_line, tell

    def begin(self, task: Task, index: int) -> Speaker:
        return self._reply

    def _reply(self, asked: Asked) -> Reply:
        while True:
            line = self._read_line(f"{asked.role or 'you'}> ")
            if line is None:
                raise EndOfInputError("the input ended before the game did", "give a line for each reply")
            if not line.startswith(CALL):
                return Reply(line)
            try:
                return _called(line, asked)
            except TaskError as error:
                self._tell(f"{error.message}; {error.hint}")

    def close(self) -> None:
        pass


def _called(line: str, asked: Asked) -> Reply:
    """The call that a person has typed, read as a run reads a model's. Raises TaskError where there is no such tool, or its
    arguments are not what it takes."""
    name, _, text = line.removeprefix(CALL).strip().partition(" ")
    known = [function_of(tool).get("name") for tool in asked.tools]
    if name not in known:
        raise TaskError(f"there is no tool {name!r} here", f"there is {', '.join(map(str, known)) or 'none'}")
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise TaskError(f"the arguments are no JSON: {error.msg}", f"write {HOW_TO_CALL}") from error
    if not isinstance(arguments, dict):
        raise TaskError("the arguments are no JSON object", f"write {HOW_TO_CALL}")
    try:
        return Reply("", (checked_call((name, arguments), asked.tools),))
    except UnreadableError as error:
        raise TaskError(f"a run would not make this call: {error}", f"write {HOW_TO_CALL}") from error


class Served:
    """A model behind an OpenAI-compatible API."""

    def __init__(self, client: JsonClient, model: str | None, temperature: float, max_tokens: int | None) -> None:
        """`model` is the name that the server knows it by; None takes the first that it lists."""
        self._client, self._temperature, self._max_tokens = client, temperature, max_tokens or MAX_TOKENS
        self._model = model or _first_model(client)

    def begin(self, task: Task, index: int) -> Speaker:
        return self._reply

    async def _reply(self, asked: Asked) -> Reply:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(as_openai(asked.messages)),
            "max_tokens": min(asked.max_tokens or self._max_tokens, self._max_tokens),
            "temperature": self._temperature,
        }
        body |= {"stop": list(asked.stop)} if asked.stop else {}
        body |= {"tools": list(asked.tools)} if asked.tools else {}
        answer = await asyncio.to_thread(self._client.post, "/chat/completions", body)
        return _read_answer(answer, asked.tools)

    def close(self) -> None:
        pass


def _first_model(client: JsonClient) -> str:
    listed = client.get("/models").get("data") or [{}]
    if "id" not in listed[0]:
        raise EngineError(f"{client.url} lists no model", "give its name with --served-model-name")
    return str(listed[0]["id"])


def _read_answer(answer: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Reply:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the server's answer has no message: {str(answer)[:200]}") from error
    calls, problem = [], ""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            calls.append(checked_call((str(function.get("name", "")), function.get("arguments") or "{}"), tools))
        except UnreadableError as error:
            calls, problem = [], f"the call cannot be read: {error}"
            break
    reason = FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    return Reply(message.get("content") or "", tuple(calls), problem, tokens, reason)


def as_openai(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Messages as the API has them: arguments of calls are text, and a tool's result names its call."""
    calls, results = 0, 0
    for message in messages:
        plain = dict(message)
        if plain.get("tool_calls"):
            plain["tool_calls"] = [
                {
                    "id": f"call_{calls + index}",
                    "type": "function",
                    "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])},
                }
                for index, function in enumerate(function_of(call) for call in plain["tool_calls"])
            ]
            calls += len(plain["tool_calls"])
        if plain.get("role") == "tool":
            plain["tool_call_id"] = f"call_{results}"
            results += 1
        yield plain


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool's schema or of a call, which may be wrapped."""
    found: Mapping[str, Any] = tool.get("function", tool)
    return found
