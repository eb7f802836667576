"""How models write calls of tools (`find_format.py` finds a template's own).

one JSON object per call     Hermes, Qwen, SmolLM: <tool_call>{"name": …, "arguments": {…}}</tool_call>
                             Llama 3: {"name": …, "parameters": {…}}          Mistral: [TOOL_CALLS][{…}, {…}]
a name, then JSON            DeepSeek: <tool_call_begin>function<tool_sep>name ```json {…}```<tool_call_end>
a name, then tags            Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>

A format finds the next call from a place on. That is all there is to reading: a whole reply is read by asking until there is no
further call, and a reply that is being sampled by asking whenever it has grown (`call_reader.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from redline.rollouts.json_ends import JsonEnds, past_spaces

PROBE_ID = r"call0000\d"
"""The ids of calls that a template is tried with: a model writes others in their place."""
DECODER = json.JSONDecoder(strict=False)
"""Lets a string hold a line break, as models write them."""


class UnreadableError(Exception):
    """A call that cannot be read, and why."""


RawCall = tuple[str, Any]
"""A function's name and its arguments, as written."""


@dataclass(slots=True, frozen=True)
class FoundCalls:
    """The next call in a text, or several that stand in one list."""

    before: str
    """The text between the place where the search began and them."""
    calls: list[RawCall]
    place: int
    """Behind them."""
    is_settled: bool = True
    """Whether nothing that follows changes what they say."""


class CallFormat(Protocol):
    """Reads and writes calls."""

    def find(self, text: str, place: int, ends: JsonEnds | None = None) -> FoundCalls | None:
        """The next calls from a place on; None where there are none. With `ends`, the text may go on, and calls are found once
        they are complete, the end of their format included. Raises UnreadableError for what cannot be read however the text
        goes on."""
        ...

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        """What a whole text says beside its calls, and the calls. Raises UnreadableError."""
        ...

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one call."""
        ...


@dataclass(slots=True, frozen=True)
class JsonFormat:
    """A JSON object, or a list of them, that has the name and the arguments."""

    begin: str
    end: str
    name_path: tuple[str, ...] = ("name",)
    arguments_path: tuple[str, ...] = ("arguments",)

    def find(self, text: str, place: int, ends: JsonEnds | None = None) -> FoundCalls | None:
        begin, end = self.begin.strip(), self.end.strip()
        found = text.find(begin, place) if begin else _object_at_the_beginning(text, place)
        if found < 0 or (ends is not None and not _has_closed(ends, text, found + len(begin), end)):
            return None
        value, behind = _json_at(text, found + len(begin), begin or "the beginning")
        calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        return FoundCalls(text[place:found], calls, _past(text, behind, end))

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        return _read(self, text)

    def _call(self, value: Any) -> RawCall:
        name = _at(value, self.name_path)
        arguments = _at(value, self.arguments_path)
        if arguments is None and isinstance(value, Mapping):
            arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(name, str):
            raise UnreadableError(f"a call is an object with {' and '.join(self._keys())}, and this is {_short(value)}")
        return name, arguments

    def _keys(self) -> tuple[str, str]:
        return f'"{self.name_path[-1]}"', f'"{self.arguments_path[-1]}"'

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        value: dict[str, Any] = {}
        for path, leaf in ((self.name_path, name), (self.arguments_path, dict(arguments))):
            inner = value
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = leaf
        return self.begin + json.dumps(value, ensure_ascii=False) + self.end


@dataclass(slots=True, frozen=True)
class NamedFormat:
    """The name, and then the arguments as a JSON object."""

    begin: str
    middle: str
    end: str

    def find(self, text: str, place: int, ends: JsonEnds | None = None) -> FoundCalls | None:
        found = _begin_at(self.begin, text, place, is_whole=ends is None)
        if found is None:
            return None
        named = re.compile(rf"\s*([\w.\-]+?)\s*{_any_like(self.middle)}\s*(?={{)").match(text, found.end())
        if ends is not None and (named is None or not _has_closed(ends, text, named.end(), self.end)):
            return None
        if named is None:
            raise UnreadableError(f"after {found[0]} come a name, {self.middle.strip()} and the arguments as a JSON object")
        value, behind = _json_at(text, named.end(), named[1])
        return FoundCalls(text[place : found.start()], [(named[1], value)], _past(text, behind, self.end))

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        return _read(self, text)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.begin + name + self.middle + json.dumps(dict(arguments), ensure_ascii=False) + self.end


@dataclass(slots=True, frozen=True)
class TaggedFormat:
    """The name, and then each argument between tags. Every value is a text."""

    begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_end: str
    end: str

    def find(self, text: str, place: int, ends: JsonEnds | None = None) -> FoundCalls | None:
        """A call goes on to the next one, and whatever stands there is searched for arguments. In a text that grows, one
        without its end is not complete, nor is what follows it."""
        found = _begin_at(self.begin, text, place, is_whole=ends is None)
        if found is None:
            return None
        following = re.compile(_any_like(self.begin)).search(text, found.end())
        part = text[found.end() : following.start() if following else len(text)]
        end = re.compile(_any_like(self.end) or r"\Z").search(part)
        behind = found.end() + (end.end() if end else len(part))
        before = text[place : found.start()]
        if ends is None or (following and end):
            return FoundCalls(before, [self._call(part)], behind)
        if following:
            return None
        try:  # it may turn out to be a part of an argument
            return FoundCalls(before, [self._call(part)], behind, is_settled=False) if end and self.end.strip() else None
        except UnreadableError:
            return None

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        return _read(self, text)

    def _call(self, text: str) -> RawCall:
        name_end, key_begin, key_end, value_end = (
            re.escape(part.strip()) for part in (self.name_end, self.key_begin, self.key_end, self.value_end)
        )
        stop = name_end or key_begin
        found = re.match(rf"\s*(.*?)\s*(?={stop}|$)", text, re.DOTALL)
        name = found[1] if found else ""
        if not re.fullmatch(r"[\w.\-]+", name):
            raise UnreadableError(f"the name of the function is missing in {_short(text)}")
        num_keys, pairs = text.count(self.key_begin.strip()), []
        if text.count(self.value_end.strip()) >= num_keys:  # without an end for each, the search takes long to find nothing
            pairs = re.findall(rf"{key_begin}\s*(\S+?)\s*{key_end}\n?(.*?)\n?{value_end}", text, re.DOTALL)
        if len(pairs) != num_keys:
            raise UnreadableError(f"an argument of {name} does not end with {self.value_end.strip()}")
        return name, dict(pairs)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        pairs = (
            self.key_begin + key + self.key_end + (value if isinstance(value, str) else json.dumps(value)) + self.value_end
            for key, value in arguments.items()
        )
        return self.begin + name + self.name_end + "".join(pairs) + self.end


@dataclass(slots=True, frozen=True)
class PublishedFormat:
    """The format that the model's makers wrote down in its tokenizer, as transformers reads it: whole replies alone."""

    parse: Callable[[str], Mapping[str, Any]]
    """A reply → its message. Raises ValueError."""
    written: CallFormat
    """The template's own."""

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        try:
            message = self.parse(text)
        except ValueError as error:
            raise UnreadableError(" ".join(str(error).split())) from None
        functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
        calls = [(str(function.get("name")), function.get("arguments")) for function in functions]
        return message.get("content") or "", calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self.written.write(name, arguments)


HERMES = JsonFormat("<tool_call>\n", "\n</tool_call>")
"""For templates that have no format of their own."""


# ── small parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read(format: CallFormat, text: str) -> tuple[str, list[RawCall]]:
    outside, calls, place = [], list[RawCall](), 0
    while found := format.find(text, place):
        outside.append(found.before)
        calls += found.calls
        place = found.place
    return joined([*outside, text[place:]]), calls


def _object_at_the_beginning(text: str, place: int) -> int:
    """Where a text begins with an object, spaces left aside; -1 where it does not, or where the search has gone on."""
    start = len(text) - len(text.lstrip())
    return start if place == 0 and text.startswith("{", start) else -1


def _begin_at(begin: str, text: str, place: int, *, is_whole: bool) -> re.Match[str] | None:
    """The next beginning of a call, with other spaces, numbers and ids; None also where a text that goes on may add to it."""
    first = re.split(rf"{PROBE_ID}|\d|\s", begin.strip())[0]
    if text.find(first, place) < 0:  # a pattern takes longer to say so
        return None
    found = re.compile(_any_like(begin)).search(text, place)
    return None if found is None or (not is_whole and found.end() == len(text)) else found


def _has_closed(ends: JsonEnds, text: str, start: int, end: str) -> bool:
    """Whether the JSON object or list that begins at `start`, or after spaces there, is complete and `end` follows it."""
    behind = ends.find(text, start)
    found = None if behind is None else re.compile(r"\s*" + _any_like(end)).match(text, behind)
    may_say_more = end.strip()[-1:].isdigit()  # `_any_like` takes in as many digits as there are
    return found is not None and not (may_say_more and found.end() == len(text))


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _json_at(text: str, place: int, what: str) -> tuple[Any, int]:
    """The JSON value at a place, and the place behind it."""
    try:
        return DECODER.raw_decode(text, past_spaces(text, place))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"after {what} comes no JSON that can be read: {error}") from None


def _past(text: str, place: int, end: str) -> int:
    """The place behind `end`, where it stands there; a call that was stopped at its end lacks it."""
    found = re.compile(r"\s*" + _any_like(end)).match(text, place)
    return found.end() if found else place


@lru_cache(maxsize=256)
def _any_like(text: str) -> str:
    """A pattern for a text in which there may be more or fewer spaces and line breaks, other numbers, and other ids."""
    parts = (re.split(rf"({PROBE_ID}|\d+)", part) for part in text.split())
    loosened = ([_loosened(piece) if i % 2 else re.escape(piece) for i, piece in enumerate(part)] for part in parts)
    return r"\s*".join("".join(part) for part in loosened)


def _loosened(piece: str) -> str:
    return r"\d+" if piece.isdigit() else r"[\w\-]*"


def joined(parts: Sequence[str]) -> str:
    return "\n".join(part.strip() for part in parts if part.strip())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
