"""The prompts with which the sequences of a group begin: rendered and encoded once for all attempts that ask the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from redline.rollouts.chat import Chat
from redline.types import Message, plain_copy

NUM_KNOWN = 32
"""Prompts that a group remembers: those of each role of a large game, and what its attempts ask next."""


class FirstPrompt(NamedTuple):
    """What a sequence begins with."""

    messages: list[dict[str, Any]]
    """As the environment gave them."""
    tools: Sequence[Any]
    prepared: list[dict[str, Any]]
    """As the template gets them."""
    prompt_ids: np.ndarray
    """int32[tokens]."""


class FirstPrompts:
    """Remembers what it has rendered."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: deque[FirstPrompt] = deque(maxlen=NUM_KNOWN)

    def find(self, messages: Sequence[Message], tools: Sequence[Any]) -> FirstPrompt:
        """Render messages, or return what came of the same ones. Raises TaskError where the template refuses them."""
        given = [dict(message) for message in messages]
        tools = list(tools)
        for known in self._known:
            if known.messages == given and known.tools == tools:
                return known
        prepared = self._chat.first_messages(messages, tools)
        found = FirstPrompt(plain_copy(given), plain_copy(tools), prepared, self._chat.encoded(prepared, tools))
        self._known.append(found)
        return found
