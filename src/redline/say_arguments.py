"""Checks of what an environment hands to `policy.say`: the same in a run, in `redline env check` and in `redline env play`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from redline.errors import TaskError
from redline.types import ReplySoFar, Until

MAX_NAME = 200
"""Characters of the name of a role or of a part of a reward: it is in every row of metrics."""
MESSAGE = '`policy.say([{"role": "user", "content": "..."}])`'


def checked_stop(stop: Any) -> tuple[str, ...]:
    """The stop strings; a text by itself is one. Raises TaskError where one is no text, or is empty."""
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    for one in strings:
        if not isinstance(one, str) or not one or _encodes_not(one):
            raise _wrong("stop", one, 'give texts that end a reply, such as stop=["\\n"], or leave `stop` out')
    return strings


def checked_max_tokens(max_tokens: Any) -> int | None:
    """The most tokens of a reply. Raises TaskError where it is neither a whole number of 1 or more nor None."""
    if max_tokens is None:
        return None
    number = index(max_tokens) if hasattr(type(max_tokens), "__index__") and not isinstance(max_tokens, bool) else 0
    if number < 1:
        raise _wrong("max_tokens", max_tokens, "give a whole number of 1 or more, or leave `max_tokens` out")
    return number


def check_until(until: Any) -> None:
    """Raise TaskError where it is neither something to call nor None, or cannot be asked while the reply is sampled."""
    if until is not None and (not callable(until) or inspect.iscoroutinefunction(until)):
        raise _wrong("until", until, "give a function of the reply so far, such as until=lambda reply: reply.tool_calls")


def ends_reply(until: Until, reply: ReplySoFar) -> bool:
    """What `until` says of a reply so far. Raises TaskError where that is a coroutine, which is true whatever it would say."""
    said = until(reply)
    if isinstance(said, bool):
        return said
    if inspect.iscoroutine(said):
        said.close()
    if inspect.isawaitable(said):
        raise _wrong("until", until, "it is asked between two tokens, and cannot be awaited: give a function that is not async")
    return bool(said)


def check_role(role: Any) -> None:
    """Raise TaskError where the name of a role is no text that can be stored."""
    hint = f"give a text of at most {MAX_NAME} characters, or leave `role` out in a game of one role"
    if not isinstance(role, str) or len(role) > MAX_NAME or _encodes_not(role):
        raise _wrong("role", role, hint)


def check_messages(messages: Any, tools: Any) -> None:
    """Raise TaskError where messages or tools are not lists of mappings, or a message has no role or nothing in it."""
    if not _is_list(messages) or not messages:
        raise _wrong("messages", messages, f"give a list of at least one message: {MESSAGE}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not _has_content(message):
            raise _wrong(f"messages[{number}]", message, f"give each message a role and a content: {MESSAGE}")
    if not _is_list(tools):
        raise _wrong("tools", tools, "give a list of schemas; redline.schema_of makes one of a typed function")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _wrong(f"tools[{number}]", tool, "give a schema; redline.schema_of makes one of a typed function")


def _has_content(message: Mapping[str, Any]) -> bool:
    """A message that calls tools may have no content."""
    content = message.get("content")
    return isinstance(content, str | list | tuple) or (content is None and ("content" in message or "tool_calls" in message))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _encodes_not(text: str) -> bool:
    """Whether it holds half a character, which no file takes."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _wrong(what: str, value: Any, hint: str) -> TaskError:
    text = ascii(value) if isinstance(value, str) else repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return TaskError(f"`policy.say` was given {what} = {shown}, a {type(value).__name__}", hint)
