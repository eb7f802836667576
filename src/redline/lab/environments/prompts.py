"""Whether the prompts of an attempt go on from what was said before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from redline.lab.environments.trials import Trials

MOST_TURNS = 1000
"""Of an attempt, that are looked at: each is compared with all before it, and an attempt without end has 100,000 and more."""


def prompts(trials: Trials) -> tuple[int, int, list[str]]:
    """Turns that go on from an earlier one of their role, turns that begin a conversation anew, and what nearly goes on: an
    earlier message that was changed, or a reply that is not as it was said."""
    stable = begun = 0
    broken: dict[str, None] = {}
    for trial in trials.trials:
        said: dict[str, list[tuple[Sequence[Any], Any]]] = {}
        for turn, exchange in enumerate(trial.alone.exchanges[:MOST_TURNS], start=1):
            earlier = said.setdefault(exchange.asked.role, [])
            now = exchange.asked.messages
            if any(_goes_on(now, messages, reply) for messages, reply in earlier):
                stable += 1
            elif earlier:
                begun += 1
                broken |= dict.fromkeys(_nearly(trial.name, turn, now, *earlier[-1]))
            earlier.append((now, exchange.turn.message))
    return stable, begun, list(broken)


def _goes_on(now: Sequence[Any], messages: Sequence[Any], reply: Any) -> bool:
    size = len(messages)
    return len(now) > size and list(now[:size]) == list(messages) and _says(now[size], reply)


def _says(message: Any, reply: Any) -> bool:
    """Whether a message is the reply, or says the same in the assistant's name."""
    return message == reply or (message.get("role") == "assistant" and message.get("content") == reply.get("content"))


def _nearly(name: str, turn: int, now: Sequence[Any], messages: Sequence[Any], reply: Any) -> Iterator[str]:
    size = len(messages)
    if len(now) > size and list(now[:size]) == list(messages) and now[size].get("role") == "assistant":
        yield (
            f"{name}, turn {turn}: the reply before it is in the messages, but not as it was said: its tokens are made"
            " anew, and the turn begins a new sequence; append `turn.message`"
        )
    elif any(_says(message, reply) for message in now):
        index = next((index for index, (a, b) in enumerate(zip(now, messages, strict=False)) if a != b), len(now))
        yield (
            f"{name}, turn {turn}: message {index} is not what it was in the turn before: the whole prompt is computed again,"
            " and the turn begins a new sequence; only add messages at the end"
        )
