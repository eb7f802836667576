"""How a model writes calls of tools. The format is found by rendering two known calls with the model's chat template and
looking where their names and arguments land, so that templates nobody has heard of work too.

    one JSON object per call     Hermes, Qwen, SmolLM: <tool_call>{"name": …, "arguments": {…}}</tool_call>
                                 Llama 3: {"name": …, "parameters": {…}}          Mistral: [TOOL_CALLS][{…}, {…}]
    a name, then JSON            DeepSeek: <tool_call_begin>function<tool_sep>name ```json {…}```<tool_call_end>
    a name, then tags            Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redline.errors import TaskError
from redline.rollouts.template import MARK, ChatTemplate

NAMES = ("probe_first", "probe_second")
ARGUMENTS: tuple[dict[str, str], ...] = (
    {"key_one": "value one", "key_two": "value two"},
    {"key_one": "value three", "key_two": "value four"},
)
DECODER = json.JSONDecoder(strict=False)
"""Lets a string hold a line break, as models write them."""


class UnreadableError(Exception):
    """A call that cannot be read, and why."""


RawCall = tuple[str, Any]
"""A function's name and its arguments, as written."""


class CallFormat(Protocol):
    """Reads and writes calls."""

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        """What the text says beside its calls, and the calls. Raises UnreadableError."""
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

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        begin, end = self.begin.strip(), self.end.strip()
        if not begin:
            text = text.strip()
            if not text.startswith("{"):
                return text, []
        outside, calls, place = [], list[RawCall](), 0
        while (found := text.find(begin, place)) >= 0 and (begin or found < len(text)):
            outside.append(text[place:found])
            value, place = _json_at(text, found + len(begin), begin or "the beginning")
            calls += [self._call(one) for one in (value if isinstance(value, list) else [value])]
            place = _past(text, place, end)
            if not begin:
                break
        return _joined([*outside, text[place:]]), calls

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

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        begin, middle, end = self.begin.strip(), self.middle.strip(), self.end.strip()
        outside, calls, place = [], list[RawCall](), 0
        while (found := text.find(begin, place)) >= 0:
            outside.append(text[place:found])
            name_at = found + len(begin)
            brace = text.find(middle or "{", name_at)
            if brace < 0:
                raise UnreadableError(f"after {begin} come a name and {middle}, then the arguments as a JSON object")
            value, place = _json_at(text, brace + len(middle), middle or "the name")
            calls.append((text[name_at:brace].strip(), value))
            place = _past(text, place, end)
        return _joined([*outside, text[place:]]), calls

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

    def read(self, text: str) -> tuple[str, list[RawCall]]:
        before, *parts = re.split(_with_any_spaces(self.begin), text)
        ends = re.compile(_with_any_spaces(self.end) or r"\Z")
        after = [part[end.end() :] if (end := ends.search(part)) else "" for part in parts]
        return _joined([before, *after]), [self._call(part) for part in parts]

    def _call(self, text: str) -> RawCall:
        name_end, key_begin, key_end, value_end = (
            re.escape(part.strip()) for part in (self.name_end, self.key_begin, self.key_end, self.value_end)
        )
        stop = name_end or key_begin
        found = re.match(rf"\s*(.*?)\s*(?={stop}|$)", text, re.DOTALL)
        name = found[1] if found else ""
        if not re.fullmatch(r"[\w.\-]+", name):
            raise UnreadableError(f"the name of the function is missing in {_short(text)}")
        pairs = re.findall(rf"{key_begin}\s*(\S+?)\s*{key_end}\n?(.*?)\n?{value_end}", text, re.DOTALL)
        if len(pairs) != len(re.findall(key_begin, text)):
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
    """The format that the model's makers wrote down in its tokenizer, as transformers reads it."""

    parse: Callable[[str], Mapping[str, Any]]
    """A reply → its message. Raises ValueError."""
    written: CallFormat

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


# ── finding a template's format ────────────────────────────────────────────────────────────────────────────────────────


def find_format(template: ChatTemplate) -> CallFormat | None:
    """The format in which a template writes calls; None where it writes none."""
    bodies = [
        body
        for count in (2, 1)
        for content in ("", None)
        for as_text in (False, True)
        if (body := _rendered_calls(template, count, content, as_text)) is not None
    ]
    found = (format_in(body) for format_in in (_json_format, _named_format, _tagged_format) for body in bodies)
    return next((one for one in found if one is not None), None)


def _rendered_calls(template: ChatTemplate, count: int, content: str | None, as_text: bool) -> str | None:
    """What the template writes in place of a reply that is `count` calls; None where it shows no calls."""
    calls = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": NAMES[i], "arguments": json.dumps(ARGUMENTS[i]) if as_text else ARGUMENTS[i]},
        }
        for i in range(count)
    ]
    question = {"role": "user", "content": "q"}
    try:
        said = template.render([question, {"role": "assistant", "content": MARK}], replies=False)
        text = template.render([question, {"role": "assistant", "content": content, "tool_calls": calls}], replies=False)
        begun = template.render([question])
    except TaskError:
        return None
    head, _, tail = said.partition(MARK)
    if any(name not in text for name in NAMES[:count]):
        return None
    shared = next((start for start in (head.rstrip(), begun.rstrip()) if text.startswith(start)), None)
    text = text[len(shared if shared is not None else _common_prefix(head, text)) :]
    return text.rstrip().removesuffix(tail.rstrip()) if tail.strip() else text


def _json_format(body: str) -> JsonFormat | None:
    spans = []
    for name, arguments in zip(NAMES, ARGUMENTS, strict=True):
        for start in (i for i, letter in enumerate(body) if letter == "{"):
            value, end = _json_or_none(body, start)
            name_path, arguments_path = _path_to(value, name), _path_to(value, arguments)
            if name_path and arguments_path:
                spans.append((start, end, name_path, arguments_path))
                break
    if not spans:
        return None
    start, end, name_path, arguments_path = spans[0]
    before, after = body[:start], body[spans[-1][1] :]
    if before.rstrip().endswith("["):
        return JsonFormat(before.rstrip()[:-1], after.lstrip().removeprefix("]"), name_path, arguments_path)
    begin, end_text = _begin_and_end(before, body[end : spans[1][0]] if len(spans) > 1 else None, after)
    return JsonFormat(begin, end_text, name_path, arguments_path)


def _named_format(body: str) -> NamedFormat | None:
    places = []
    for name, arguments in zip(NAMES, ARGUMENTS, strict=True):
        name_at = body.find(name)
        brace = body.find("{", name_at)
        value, end = _json_or_none(body, brace) if name_at >= 0 <= brace else (None, 0)
        if value != arguments:
            break
        places.append((name_at, name_at + len(name), brace, end))
    if not places:
        return None
    name_at, name_end, brace, end = places[0]
    between = body[end : places[1][0]] if len(places) > 1 else None
    begin, end_text = _begin_and_end(body[:name_at], between, body[places[-1][3] :])
    return NamedFormat(begin, body[name_end:brace], end_text) if begin.strip() else None


def _tagged_format(body: str) -> TaggedFormat | None:
    first = re.search(
        rf"{NAMES[0]}(?P<name>.*?)key_one(?P<key>.*?)value one(?P<value>.*?)key_two.*?value two(?P<rest>.*?)(?={NAMES[1]}|\Z)",
        body,
        re.DOTALL,
    )
    if first is None:
        return None
    key_begin = _common_suffix(first["name"], first["value"])
    value_end = first["value"].removesuffix(key_begin)
    rest = first["rest"].removeprefix(value_end)
    before = body[: first.start()]
    if NAMES[1] in body:
        begin = _common_suffix(before, rest)
        before, rest = begin, rest.removesuffix(begin)
    if not key_begin.strip() or not value_end.strip() or not before.strip():
        return None
    return TaggedFormat(before, first["name"].removesuffix(key_begin), key_begin, first["key"], value_end, rest)


def _begin_and_end(before: str, between: str | None, after: str) -> tuple[str, str]:
    """What begins and ends each call, from the text before the first, between two, and after the last."""
    begin = _common_suffix(before, between) if between is not None else before
    if between is None or not begin.strip():
        return before, after
    return begin, between.removesuffix(begin)


# ── small parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _common_prefix(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _common_suffix(one: str, other: str) -> str:
    """The longest text with which both end. It does not begin in the middle of a tag: `<calls><call>` and `</call><call>` share
    `<call>`, and not the `>` before it."""
    suffix = _common_prefix(one[::-1], other[::-1])[::-1]
    tag = re.search(r"[<\[]", suffix)
    return suffix[tag.start() :] if tag and suffix[: tag.start()].strip() else suffix


def _path_to(value: Any, leaf: Any, depth: int = 2) -> tuple[str, ...] | None:
    """The keys that lead to a leaf, which may be written as JSON in a text."""
    if not isinstance(value, Mapping):
        return None
    for key, inner in value.items():
        if inner == leaf or (isinstance(inner, str) and isinstance(leaf, dict) and _json_or_none(inner, 0)[0] == leaf):
            return (key,)
        if depth > 1 and (path := _path_to(inner, leaf, depth - 1)):
            return (key, *path)
    return None


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _json_or_none(text: str, start: int) -> tuple[Any, int]:
    try:
        return DECODER.raw_decode(text, start)
    except ValueError:
        return None, start


def _json_at(text: str, place: int, what: str) -> tuple[Any, int]:
    """The JSON value at a place, and the place behind it."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        return DECODER.raw_decode(text, place)
    except ValueError as error:
        raise UnreadableError(f"after {what} comes no JSON that can be read: {error}") from None


def _past(text: str, place: int, end: str) -> int:
    """The place behind `end`, where it stands there; a call that was stopped at its end lacks it."""
    found = re.compile(r"\s*" + re.escape(end)).match(text, place) if end else None
    return found.end() if found else place


def _with_any_spaces(text: str) -> str:
    """A pattern for a text in which there may be more or fewer spaces and line breaks."""
    return r"\s*".join(re.escape(part) for part in text.split())


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part.strip() for part in parts if part.strip())


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
