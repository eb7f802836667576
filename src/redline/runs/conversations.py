"""What happened in a stored attempt: for each of its sequences, the messages that the policy saw and the turns it took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.buffer.store.columns import SECONDS
from redline.runs.decoding import Texts

Row = Mapping[str, Any]
POLICY = "policy"
ENVIRONMENT = "environment"
"""What was said between two turns in no message that is recognised."""
PROMPT = "prompt"
"""The same before the first turn."""


@dataclass(slots=True, frozen=True)
class Message:
    """One message of a sequence."""

    by: str
    """`policy` for a turn; else the role that the chat template gives it, or what it is where that cannot be told."""
    text: str
    turn: Row | None = None
    """The stored turn, of the policy's messages."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the turn, all of them trained on where the sequence is; 0 for what others said."""
        return 0 if self.turn is None else self.turn["end"] - self.turn["start"]

    @property
    def calls(self) -> list[str]:
        """Tools that the turn called, as `move(to='e4')`, or what is wrong with a call."""
        return [_shown_call(call) for call in json.loads((self.turn or {}).get("tool_calls") or "[]")]

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, without its `_s`; what was not measured is left out."""
        turn = self.turn or {}
        return {name.removesuffix("_s"): turn[name] for name in SECONDS if turn.get(name)}


@dataclass(slots=True, frozen=True)
class Played:
    """One attempt: its sequences, in the order in which they began."""

    index: int
    rows: Sequence[Row]

    @property
    def by_role(self) -> list[Row]:
        """The first sequence of each role: it has the role's reward, parts and advantage."""
        return list({row["role"]: row for row in reversed(self.rows)}.values())[::-1]

    @property
    def failure(self) -> str | None:
        return self.rows[0]["failure"]

    @property
    def num_turns(self) -> int:
        return sum(len(row["turns"]) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy chose."""
        return sum(sum(row["loss_mask"]) for row in self.rows)

    @property
    def is_single_turn(self) -> bool:
        return len(self.rows) == 1 and self.num_turns <= 1


def played(rows: Sequence[Row]) -> list[Played]:
    """The attempts of a group, from its rows."""
    attempts: dict[int, list[Row]] = {}
    for row in rows:
        attempts.setdefault(row["attempt"], []).append(row)
    return [Played(index, own) for index, own in attempts.items()]


def prompt_tokens(row: Row) -> list[int]:
    """Everything before the first turn."""
    tokens: list[int] = row["token_ids"]
    return tokens[: row["turns"][0]["start"]] if row["turns"] else tokens


def prompt(row: Row, texts: Texts | None) -> list[Message]:
    """What the policy saw before its first turn; nothing where the tokenizer is not at hand."""
    return [] if texts is None else [Message(by, text) for by, text in texts.messages(prompt_tokens(row), PROMPT)]


def conversation(row: Row, texts: Texts | None) -> list[Message]:
    """The turns of a sequence, and between them what the policy was told."""
    turns, tokens = row["turns"], row["token_ids"]
    if len(turns) < 2 or texts is None:
        return [Message(POLICY, row["text"], turns[0] if turns else None)]
    said: list[Message] = []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        said.append(Message(POLICY, texts.said(tokens[turn["start"] : turn["end"]]), turn))
        told = tokens[turn["end"] : following["start"] if following else len(tokens)]
        said += [Message(by, text) for by, text in texts.messages(told, ENVIRONMENT)]
    return said


def _shown_call(call: Row) -> str:
    if "problem" in call:
        return f"unreadable: {call['problem']}"
    return f"{call['name']}({', '.join(f'{name}={value!r}' for name, value in call['arguments'].items())})"
