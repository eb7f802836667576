"""Tools, shown to the model and called by it as its own chat template does.

A template that does not describe tools gets a description in the system message. One that shows no calls gets them in the
format of Hermes, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and the results as the user's `<tool_response>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from redline.errors import TaskError
from redline.rollouts.call_formats import HERMES, CallFormat, PublishedFormat, RawCall, UnreadableError
from redline.rollouts.call_reader import reader_of
from redline.rollouts.find_format import OwnFormat, find_format
from redline.rollouts.template import ChatTemplate
from redline.types import ToolCall

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions."""

DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, write the function's name and its arguments as a JSON object, like this:
{example}"""
TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
}

THINKS, HAS_THOUGHT = "<think>", "</think>"
PROBE = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(slots=True, frozen=True)
class ReadReply:
    """A reply, taken apart: either calls, or a problem with them, or neither."""

    content: str
    """What it says beside its calls; everything, where there is a problem."""
    calls: Sequence[ToolCall] = ()
    problem: str = ""


class ToolUse:
    """What a chat template makes of tools. It is looked at when tools are first used."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    @cached_property
    def format(self) -> CallFormat | PublishedFormat:
        written = self._own_format.format if self._own_format else HERMES
        parse = self._template.published_parser
        return PublishedFormat(parse, written) if parse and self._own_format else written

    @cached_property
    def _own_format(self) -> OwnFormat | None:
        return find_format(self._template)

    @cached_property
    def are_described(self) -> bool:
        """Whether the template itself describes tools to the model. Where it does, and shows no calls that can be read, the
        description is ours too, so that the model is told the format that is read."""
        shown = self._or_nothing([{"role": "user", "content": "q"}], [PROBE])
        return self._own_format is not None and "probe_tool" in shown

    @cached_property
    def _has_results(self) -> bool:
        """Whether the template shows what a tool returned."""
        if self._own_format is None:
            return False
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "probe result"}
        for said in ({"content": "", "tool_calls": [call]}, {"content": "a"}):
            messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", **said}, result]
            if "probe result" in self._or_nothing(messages, [PROBE]):
                return True
        return False

    @cached_property
    def _has_system(self) -> bool:
        return "probe system" in self._or_nothing(
            [{"role": "system", "content": "probe system"}, {"role": "user", "content": "q"}]
        )

    def _or_nothing(self, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
        try:
            return self._template.render(messages, tools)
        except TaskError:
            return ""

    # ── to the model ───────────────────────────────────────────────────────────────────────────────────────────────────

    def for_template(self, tools: Tools) -> Tools:
        """What the template is given; none where it would not show them."""
        return [_function(tool) for tool in tools] if tools and self.are_described else ()

    def described(self, messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """The messages with a description of the tools, where the template writes none."""
        if not tools or self.are_described:
            return messages
        text = DESCRIPTION.format(
            tools="\n".join(json.dumps(self._template.plain(_function(tool)), ensure_ascii=False) for tool in tools),
            example=self.format.write("<function-name>", {"<argument-name>": "<value>"}),
        )
        if not self._has_system:
            first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
            return [
                *messages[:first],
                messages[first] | {"content": f"{text}\n\n{messages[first]['content']}"},
                *messages[first + 1 :],
            ]
        if messages[0].get("role") == "system":
            return [messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def shown(self, messages: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Messages as the template takes them: each result names its call, and a template that knows no calls gets their text.
        `before` are messages that came earlier, which may have the calls."""
        shown: list[dict[str, Any]] = []
        open_calls = _open_calls(before)
        for message in messages:
            if message.get("tool_calls"):
                open_calls = list(message["tool_calls"])
                shown.append(self._with_calls(message))
            elif message.get("role") == "tool":
                call = open_calls.pop(0) if open_calls else {}
                self._append_result(shown, message, call)
            else:
                shown.append(dict(message))
        return shown

    def _with_calls(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message with calls, which a template that cannot show them beside its text gets as a part of the text."""
        calls, own, content = [_call(call) for call in message["tool_calls"]], self._own_format, message.get("content")
        if own is None or (own.alone and content):
            written = [self.format.write(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            shown = {key: value for key, value in message.items() if key != "tool_calls"}
            return shown | {"content": "\n".join([*([content] if content else []), *written])}
        for call in calls if own.as_text else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return dict(message) | {"tool_calls": calls, "content": None if own.alone else content or ""}

    def _append_result(self, shown: list[dict[str, Any]], result: Mapping[str, Any], call: Mapping[str, Any]) -> None:
        if self._has_results:
            named = {"tool_call_id": call.get("id", "call00000"), "name": call.get("function", call).get("name", "")}
            shown.append({**named, **result})
            return
        text = f"<tool_response>\n{result['content']}\n</tool_response>"
        if shown and shown[-1].get("role") == "user" and shown[-1]["content"].endswith("</tool_response>"):
            text = f"{shown.pop()['content']}\n{text}"  # the results of one reply are one message
        shown.append({"role": "user", "content": text})

    # ── from the model ─────────────────────────────────────────────────────────────────────────────────────────────────

    def reader(self, tools: Tools, *, is_thinking: bool = False) -> ReplyReader:
        """Reads one reply. `is_thinking`: it begins in the middle of a thought."""
        return ReplyReader(self.format, tools, is_thinking=is_thinking)


class ReplyReader:
    """Finds the calls in a reply that is decoded with its special tokens, as it comes. What it thinks is not searched."""

    def __init__(self, format: CallFormat | PublishedFormat, tools: Tools, *, is_thinking: bool = False) -> None:
        self._format, self._tools, self._is_thinking = format, tools, is_thinking
        self._functions = _by_name(tools)
        self._begin()

    def _begin(self) -> None:
        self._text = ""
        self._thought = 0
        """Where the last thought ends."""
        self._calls = reader_of(self._format)

    @property
    def calls(self) -> Sequence[ToolCall]:
        """Those that are complete so far. None where one cannot be read, and while the policy thinks."""
        found = self._calls.calls
        if not found or (self._is_thinking and not self._thought) or THINKS in self._text[self._thought :]:
            return ()
        try:
            return [_checked(call, self._functions) for call in found]
        except UnreadableError:
            return ()

    def push(self, text: str) -> None:
        """The reply goes on."""
        before = len(self._text)
        self._text += text
        ended = self._text.rfind(HAS_THOUGHT, max(self._thought, before - len(HAS_THOUGHT) + 1))
        if ended >= 0:
            self._thought = ended + len(HAS_THOUGHT)
            self._calls, text = reader_of(self._format), self._text[self._thought :]
        self._calls.push(text)

    def finish(self, text: str) -> ReadReply:
        """The reply has ended with this `text`: take what is left of it, or all of it where other text was pushed."""
        if not text.startswith(self._text):
            self._begin()
        self.push(text[len(self._text) :])
        thought, rest = text[: self._thought], text[self._thought :]
        is_thinking = THINKS in rest or (self._is_thinking and not self._thought)
        if not self._tools or is_thinking:
            return ReadReply(text)
        try:
            content, found = self._calls.finish()
            calls = [_checked(call, self._functions) for call in found]
        except UnreadableError as error:
            return ReadReply(text, (), f"the call cannot be read: {error}")
        return ReadReply(thought + content, calls) if calls else ReadReply(text)


def checked_call(call: RawCall, tools: Tools) -> ToolCall:
    """The call with its arguments as the function's schema has them. Raises `UnreadableError` where there is no such function,
    or its arguments are not what it takes."""
    return _checked(call, _by_name(tools))


def _by_name(tools: Tools) -> dict[str, Mapping[str, Any]]:
    return {function["name"]: function for function in (_function(tool)["function"] for tool in tools)}


def _open_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Calls of the last assistant's message that have no result yet."""
    results = 0
    for message in reversed(messages):
        if message.get("role") == "assistant":
            return list(message.get("tool_calls") or ())[results:]
        results += message.get("role") == "tool"
    return []


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in a message, with its arguments as a mapping. Others' messages have them as JSON in a text."""
    function = dict(call.get("function", call))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise TaskError(
            f"the arguments of a call of {function.get('name')} are no JSON object", "append `turn.message` as it is"
        )
    named = {"name": str(function.get("name", "")), "arguments": dict(arguments)}
    return {"type": "function", "id": call.get("id", "call00000"), "function": named}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool as templates take it, also where only the function's own was given."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _checked(call: RawCall, functions: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    name, arguments = call
    if name not in functions:
        raise UnreadableError(f"there is no function {name}; there are: {', '.join(functions)}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"the arguments of {name} are no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise UnreadableError(f"the arguments of {name} are no JSON object")
    schema = functions[name].get("parameters") or {}
    missing = [key for key in schema.get("required", ()) if key not in arguments]
    if missing:
        raise UnreadableError(f"{name} needs the argument {', '.join(missing)}")
    properties = schema.get("properties", {})
    return ToolCall(name, {key: _typed(name, key, value, properties.get(key, {})) for key, value in arguments.items()})


def _typed(name: str, key: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """The value of an argument. A text is read as JSON where the schema wants another type: formats with tags know texts
    alone."""
    wanted = TYPES.get(schema.get("type", "")) if isinstance(schema.get("type"), str) else None
    if wanted is None:
        return value
    if isinstance(value, str) and wanted is not str:
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    is_right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not is_right and not (value is None and schema.get("nullable")):
        raise UnreadableError(f"the argument {key} of {name} is of type {schema['type']}, and not {json.dumps(value)}")
    return value
