"""Finds the format in which a chat template writes calls of tools: it renders two known calls and looks where their names and
arguments land, so that templates nobody has heard of work too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redline.errors import TaskError
from redline.rollouts.call_formats import DECODER, CallFormat, JsonFormat, NamedFormat, TaggedFormat, UnreadableError
from redline.rollouts.template import MARK, ChatTemplate

NAMES = ("probe_first", "probe_second")
ARGUMENTS: tuple[dict[str, str], ...] = (
    {"key_one": "value one", "key_two": "value two"},
    {"key_one": "value three", "key_two": "value four"},
)

QUESTION = {"role": "user", "content": "q"}
OFFERED = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
"""Some templates want to know of a tool before they show a call."""


@dataclass(slots=True, frozen=True)
class OwnFormat:
    """How a template takes calls in a message, and writes them."""

    format: CallFormat
    alone: bool
    """Whether it shows calls only in a message whose content is null."""
    as_text: bool
    """Whether it wants arguments as JSON in a text."""


def find_format(template: ChatTemplate) -> OwnFormat | None:
    """The format in which a template writes calls; None where it writes none, or in no way that can be read back."""
    bodies = [
        (body, alone, as_text)
        for count in (2, 1)
        for alone in (False, True)
        for as_text in (False, True)
        if (body := _rendered_calls(template, count, None if alone else "", as_text)) is not None
    ]
    for format_in in (_json_format, _named_format, _tagged_format):
        for body, alone, as_text in bodies:
            if (found := format_in(body)) is not None and _reads(found, body):
                return OwnFormat(found, alone, as_text)
    return None


def _reads(found: CallFormat, body: str) -> bool:
    """Whether a format finds the calls again, those that the template wrote and one of its own."""
    count = sum(name in body for name in NAMES)
    known = list(zip(NAMES, ARGUMENTS, strict=True))[:count]
    written = found.write("other", {"key": "value"})
    try:
        return NAMES[0] not in written and all(
            [(name, _as_mapping(arguments)) for name, arguments in found.read(text)[1]] == calls
            for text, calls in ((body, known), (written, [("other", {"key": "value"})]))
        )
    except UnreadableError:
        return False


def _as_mapping(arguments: Any) -> Any:
    return _json_or_none(arguments, 0)[0] if isinstance(arguments, str) else arguments


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
    said = {"role": "assistant", "content": content, "tool_calls": calls}
    for tools in ([OFFERED], []):
        try:
            shown = template.render([QUESTION, {"role": "assistant", "content": MARK}], tools, replies=False)
            text = template.render([QUESTION, said], tools, replies=False)
            begun = template.render([QUESTION], tools)
        except TaskError:
            continue
        if all(name in text for name in NAMES[:count]):
            return _body(text, shown, begun)
    return None


def _body(text: str, shown: str, begun: str) -> str:
    """The part of a rendering that stands in place of the reply."""
    head, _, tail = shown.partition(MARK)
    before = next((start for start in (head.rstrip(), begun.rstrip()) if text.startswith(start)), None)
    if before is None:
        before = _common_prefix(head, text)
        if (tag := before.rfind("<")) > before.rfind(">"):
            before = before[:tag]  # and not in the middle of a tag
    text = text[len(before) :]
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


def _json_or_none(text: str, start: int) -> tuple[Any, int]:
    try:
        return DECODER.raw_decode(text, start)
    except ValueError:
        return None, start
