"""The tokens of one role's conversation in one attempt. What the policy sampled is never encoded again.

    ask(messages) ──► the prompt ┄┄ the engine ┄┄ replied(tokens) ──► the message ──► ask(messages + [message, …]) ──► …

    prompt 1 │ reply 1 │ end of turn, new messages, beginning of turn │ reply 2 │ …
    └─────────────────────────── prompt 2 ───────────────────────────┘

A conversation goes on where the messages begin with those of the last ask, then say what the policy replied. Messages are
compared by what they say and not by which object they are: an environment may copy its messages, and one that changes an
earlier message in place is noticed. Then only what is new is rendered and encoded, and the prompt begins with the tokens that
the engine has seen, thinking included, also where the template would leave the thinking of earlier turns out. Everything else
begins a new sequence of tokens, and so does every turn where the recipe does not keep replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redline.rollouts.chat import Chat
from redline.rollouts.first_prompts import FirstPrompts
from redline.rollouts.tool_calls import ReplyReader
from redline.types import Message, ToolCall, plain_copy

NO_TOKENS = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, frozen=True)
class Asked:
    """What the engine is to reply to."""

    prompt_ids: np.ndarray
    """int32[tokens]: the whole prompt."""
    starts_anew: bool
    """Whether it begins a new sequence: it does not go on from the last reply."""


@dataclass(slots=True, frozen=True)
class Reply:
    """What the policy said."""

    text: str
    """Decoded without special tokens, and without the recipe's `answer_prefix`."""
    message: Message
    """The assistant's message: what the environment appends to go on."""
    tool_calls: Sequence[ToolCall]
    problem: str
    """Why a call in it could not be read; empty where nothing is wrong."""
    start: int
    """The first of its tokens in the sequence."""
    end: int
    """One past the last of them."""


@dataclass(slots=True)
class TokenSequence:
    """Tokens as the engine saw them, of a conversation that went on."""

    token_ids: np.ndarray = field(default_factory=NO_TOKENS.copy)
    """int32[tokens]: the last prompt and the reply to it."""
    replies: list[tuple[int, int]] = field(default_factory=list)
    """Where the policy's tokens are: start and end of each reply."""


@dataclass(slots=True)
class _Ask:
    """An ask that has no reply yet."""

    prompt_ids: np.ndarray
    starts_anew: bool
    given: list[Message]
    """As the environment gave them."""
    messages: list[Message]
    """The same, each reply as it was read; and the reply to this ask, once it is there."""
    prepared: list[Message]
    """As the template gets them."""
    tools: list[Mapping[str, Any]]


class Conversation:
    """Turns messages into prompts, and sampled tokens into messages, for one role in one attempt."""

    def __init__(self, chat: Chat, stop_token_ids: Sequence[int], first_prompts: FirstPrompts | None = None) -> None:
        """A reply that ends with one of `stop_token_ids` has ended its turn by itself. Conversations that often begin alike
        share `first_prompts`."""
        self._chat = chat
        self._first_prompts = first_prompts or FirstPrompts(chat)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._asked: _Ask | None = None
        """The last ask that has a reply, and after it the reply."""
        self._open: _Ask | None = None
        """The last ask, while it has no reply."""
        self._said = ""
        """The text of the last reply."""
        self.sequences: list[TokenSequence] = []
        """All that was said; the last is the one that goes on. A new one is there after its first reply."""

    def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Asked:
        """The prompt for the engine. An ask that got no reply leaves nothing behind: it may be asked again. Raises TaskError
        where the template refuses the messages."""
        self._open = self._further(messages, list(tools)) or self._anew(messages, list(tools))
        return Asked(self._open.prompt_ids, self._open.starts_anew)

    def reader(self) -> ReplyReader | None:
        """Reads the reply to the last ask while it is sampled; None where the ask had no tools."""
        assert self._open is not None, "nothing was asked"
        return self._chat.reader(self._open.tools, self._open.prompt_ids) if self._open.tools else None

    def replied(self, token_ids: np.ndarray, reader: ReplyReader | None = None) -> Reply:
        """Take the tokens that the engine sampled for the last ask. A `reader` that was given their text so far has only the
        rest to read."""
        reader = reader or self.reader()
        ask, self._open = self._open, None
        assert ask is not None, "nothing was asked"
        if ask.starts_anew:
            self.sequences.append(TokenSequence())
        sequence = self.sequences[-1]
        start, end = len(ask.prompt_ids), len(ask.prompt_ids) + len(token_ids)
        sequence.token_ids = np.concatenate([ask.prompt_ids, token_ids]).astype(np.int32, copy=False)
        sequence.replies.append((start, end))
        num_calls = sum(len(message.get("tool_calls") or ()) for message in ask.messages)
        said = self._chat.said(token_ids, reader, self._has_ended(token_ids), num_calls)
        ask.messages.append(plain_copy(said.message))
        ask.prepared += self._chat.prepared([said.message])
        self._asked, self._said = ask, said.text
        return Reply(said.text, said.message, said.tool_calls, said.problem, start, end)

    def _anew(self, messages: Sequence[Message], tools: list[Mapping[str, Any]]) -> _Ask:
        first = self._first_prompts.find(messages, tools)
        given = _copies(messages)
        return _Ask(first.prompt_ids, True, given, [*given], [*first.prepared], plain_copy(tools))

    def _further(self, messages: Sequence[Message], tools: list[Mapping[str, Any]]) -> _Ask | None:
        """None where the messages do not go on from the last reply, or the template cannot."""
        last = self._asked
        if last is None or not self.goes_on(messages, tools):
            return None
        said, *added = _copies(messages[len(last.given) :])
        prepared = self._chat.prepared(added, last.messages)
        tokens = self.sequences[-1].token_ids
        start, end = self.sequences[-1].replies[-1]
        tail = self._chat.encoded_tail(last.prepared[:-1], prepared, tools, self._has_ended(tokens[start:end]))
        if tail is None:
            return None
        prompt = np.concatenate([tokens, tail])
        given = [*last.given, said, *added]
        return _Ask(prompt, False, given, [*last.messages, *added], [*last.prepared, *prepared], last.tools)

    def _has_ended(self, reply: np.ndarray) -> bool:
        return len(reply) > 0 and int(reply[-1]) in self._stop_token_ids

    def goes_on(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether messages begin with those of the last ask and then say what the policy replied, so that its tokens are
        kept."""
        if self._asked is None or not self._chat.keeps_replies or list(tools) != self._asked.tools:
            return False
        given, count = self._asked.given, len(self._asked.given)
        if len(messages) <= count or list(messages[:count]) != given:
            return False
        return self._is_the_reply(messages[count], self._asked.messages[-1])

    def _is_the_reply(self, message: Message, reply: Message) -> bool:
        """Whether a message says what the policy replied: as `turn.message` does, or with `turn.text`, and no other calls."""
        if message == reply:
            return True
        is_text = message.get("role") == "assistant" and message.get("content") == self._said
        return is_text and (not message.get("tool_calls") or message["tool_calls"] == reply.get("tool_calls"))


def _copies(messages: Sequence[Message]) -> list[Message]:
    """Messages that stay as they are, whatever the environment does to its own."""
    return [plain_copy(dict(message)) for message in messages]
