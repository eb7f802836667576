"""Policies without a model: one that says anything, one that says what it is told to, one that knows the answer.

What each says follows from its seed and from how often it was asked, so that an attempt can be played again. A speaker is made
for one attempt.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from redline.environments.driver import Asked, Reply
from redline.types import Task, ToolCall

ODD = ("", " ", "\N{SNOWMAN}" * 3, "<tool_call>{not json</tool_call>", "x" * 5000, "```\n", "None", "-1", "0", "1e309")
"""Replies that a model in training gives sooner or later."""


class RandomSpeaker:
    """Says words of what it was asked, numbers and odd things, and calls tools with arguments of the right kinds."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._asked: Counter[str] = Counter()
        """By role: those that speak at the same time may do so in any order."""

    def __call__(self, asked: Asked) -> Reply:
        draw = random.Random(hashlib.sha256(f"{self._seed}/{asked.role}/{self._asked[asked.role]}".encode()).digest())
        self._asked[asked.role] += 1
        if asked.tools and draw.random() < 0.7:
            return called(draw.choice(list(asked.tools)), draw)
        return Reply(_random_text(asked, draw))


class ScriptedSpeaker:
    """Says the given replies in turn, and the last of them from then on; each role from the beginning."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._replies = replies
        self._asked: Counter[str] = Counter()

    def __call__(self, asked: Asked) -> Reply:
        text = self._replies[min(self._asked[asked.role], len(self._replies) - 1)]
        self._asked[asked.role] += 1
        return Reply(text)


class AnsweringSpeaker:
    """Calls the first tool once, where there is one, and then says the task's answer; numbers, where the task has none."""

    def __init__(self, task: Task) -> None:
        self._answer = task.answer
        self._asked: Counter[str] = Counter()

    def __call__(self, asked: Asked) -> Reply:
        self._asked[asked.role] += 1
        turn = self._asked[asked.role]
        if turn == 1 and asked.tools:
            return called(asked.tools[0], random.Random(0))
        return Reply(self._answer or str(turn))


def called(tool: Mapping[str, Any], draw: random.Random) -> Reply:
    """A call of a tool with arguments that its schema allows."""
    function = tool.get("function", tool)
    schema = function.get("parameters") or {}
    required = set(schema.get("required", ()))
    arguments = {
        name: _value(kind, draw)
        for name, kind in (schema.get("properties") or {}).items()
        if name in required or draw.random() < 0.5
    }
    return Reply("", (ToolCall(str(function.get("name", "")), arguments),))


def _value(schema: Mapping[str, Any], draw: random.Random) -> Any:
    """A value that a JSON schema allows, of the usual kinds."""
    if schema.get("enum"):
        return draw.choice(list(schema["enum"]))
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "array":
        return [_value(schema.get("items") or {}, draw) for _ in range(draw.randint(0, 3))]
    if kind == "object":
        return {name: _value(inner, draw) for name, inner in (schema.get("properties") or {}).items()}
    plain = {"integer": draw.randint(0, 20), "number": draw.uniform(0, 20), "boolean": draw.random() < 0.5, "null": None}
    return plain.get(kind, f"{draw.randint(0, 9)} + {draw.randint(0, 9)}")


def _random_text(asked: Asked, draw: random.Random) -> str:
    if draw.random() < 0.25:
        return draw.choice(ODD)
    words = str(asked.messages[-1].get("content", "")).split() if asked.messages else []
    if words and draw.random() < 0.5:
        start = draw.randrange(len(words))
        return " ".join(words[start : start + draw.randint(1, 6)])
    return str(draw.randint(-10, 100))
