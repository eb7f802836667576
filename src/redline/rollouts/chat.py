"""Conversations ↔ tokens. The only place where text is tokenised; everything later carries these ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.errors import TaskError, boundary
from redline.rollouts.template import ChatTemplate
from redline.rollouts.tool_calls import THINKS, ReplyReader, ToolUse
from redline.types import Message, Task, ToolCall, plain_copy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPACED = "Is n't it ? I 'm sure , and so 's he ."
"""Some tokenizers take spaces out of what they decode: they would of this."""


THINKS_TOKENS = 16
"""Tokens in which a prompt that ends with `<think>` says so."""


@dataclass(slots=True, frozen=True)
class Said:
    """A reply of the policy, read."""

    text: str
    """Decoded without special tokens."""
    message: Message
    """The assistant's message: its text, with the `answer_prefix` and without calls of tools, and the calls."""
    tool_calls: Sequence[ToolCall] = ()
    problem: str = ""


class Chat:
    """Renders conversations with the model's own chat template, and reads the replies."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None,
        prompt_suffix: str,
        answer_prefix: str = "",
        *,
        keeps_replies: bool = True,
    ) -> None:
        """`answer_prefix` begins each of the assistant's turns, and the policy goes on from there. With `keeps_replies`,
        replies stand in later prompts as they were sampled, and else as the template writes them."""
        self._template = ChatTemplate(tokenizer)
        self.tool_use = ToolUse(self._template)
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._prompt_suffix = prompt_suffix
        self.answer_prefix = answer_prefix
        self.keeps_replies = keeps_replies
        self._decodes_in_bulk = _decodes_in_bulk(tokenizer)

    # ── a task with one reply ──────────────────────────────────────────────────────────────────────────────────────────

    def prompt_ids(self, task: Task) -> np.ndarray:
        """int32[tokens], ready for the assistant to go on."""
        return self.encoded(self.first_messages(task.messages))

    def all_prompt_ids(self, tasks: Sequence[Task]) -> list[np.ndarray | None]:
        """`prompt_ids` of each, encoded together. None where something is wrong: `prompt_ids` raises what it is."""
        texts: list[str | None] = [None] * len(tasks)
        for place, task in enumerate(tasks):
            with boundary():
                texts[place] = self.rendered(self.first_messages(task.messages))
        encoded: list[list[int]] = []
        with boundary() as caught:
            encoded = self._template.encode_all([text for text in texts if text is not None])
        if caught.error is not None:
            return [None] * len(tasks)
        ids = iter(encoded)
        return [None if text is None else np.array(next(ids), dtype=np.int32) for text in texts]

    def shortened_prompt_ids(self, task: Task, limit: int) -> np.ndarray:
        """The same with at most `limit` tokens: the last user message loses its beginning, and keeps its end and the suffix.
        What cannot be made to fit that way comes as short as it gets."""
        prompt = self.prompt_ids(task)
        messages = [_as_text(message) for message in task.messages]
        question = _last_question(messages)
        content = self._tokenizer.encode(question["content"], add_special_tokens=False)
        num_cut = 0
        while len(prompt) > limit and num_cut < len(content):
            # Tokens of a piece of text are not always a piece of its tokens, hence again until it fits.
            num_cut = min(len(content), num_cut + len(prompt) - limit)
            question["content"] = self._tokenizer.decode(content[num_cut:])
            prompt = self.encoded(self.first_messages(messages))
        return prompt

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The conversation with what the recipe adds to it."""
        return self._with_recipe([_as_text(message) for message in task.messages])

    def _with_recipe(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        _last_question(messages)["content"] += self._prompt_suffix
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    # ── a conversation of several replies (`Conversation`) ─────────────────────────────────────────────────────────────

    def first_messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Messages as the template takes them, where they begin a sequence: with the recipe's system prompt, its suffix at the
        last user message, and a description of the tools where the template writes none."""
        plain = self._with_recipe([self._template.plain(_as_text(message)) for message in messages])
        return self.tool_use.described(self.tool_use.shown(plain), tools)

    def prepared(self, messages: Sequence[Message], before: Sequence[Message] = ()) -> list[dict[str, Any]]:
        """Messages as the template takes them, where they go on from those `before`."""
        return self.tool_use.shown([self._template.plain(_as_text(message)) for message in messages], before)

    def rendered(self, prepared: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of a prompt, ready for the assistant to reply."""
        return self._template.render(prepared, self.tool_use.for_template(tools)) + self.answer_prefix

    def encoded(self, prepared: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32[tokens], ready for the assistant to reply."""
        return np.array(self._template.encode(self.rendered(prepared, tools)), dtype=np.int32)

    def rendered_tail(
        self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str | None:
        """The text between a reply to the messages `before` and the next one: the end of its turn, the messages `added`, and
        the beginning of the next turn. None where the template cannot go on from a reply."""
        tail = self._template.tail(before, added, self.tool_use.for_template(tools))
        return None if tail is None else tail + self.answer_prefix

    def encoded_tail(
        self,
        before: Sequence[Message],
        added: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        has_ended: bool,
    ) -> np.ndarray | None:
        """int32[tokens] of `rendered_tail`, without the end of the turn where the reply `has_ended` it with a stop token."""
        tail = self.rendered_tail(before, added, tools)
        return None if tail is None else np.array(self._template.encode_tail(tail, has_ended), dtype=np.int32)

    def reader(self, tools: Sequence[Mapping[str, Any]], prompt_ids: np.ndarray) -> ReplyReader:
        """Reads the reply to a prompt, whose `answer_prefix` it has been given."""
        tail = self._tokenizer.decode(prompt_ids[-THINKS_TOKENS:].tolist(), skip_special_tokens=False)
        reader = self.tool_use.reader(tools, is_thinking=tail.rstrip().endswith(THINKS))
        reader.push(self.answer_prefix)
        return reader

    def said(self, token_ids: np.ndarray, reader: ReplyReader | None, has_ended: bool, num_calls: int) -> Said:
        """Read a reply to a conversation with `num_calls` calls of tools so far; a `reader` where there are tools. Where it
        `has_ended`, its last token is a stop token."""
        [text] = self.texts([token_ids])
        if reader is None:
            return Said(text, {"role": "assistant", "content": self.answer_prefix + text})
        whole = self.decoder(with_special=True)(token_ids[: -1 if has_ended else None].tolist())
        read = reader.finish(self.answer_prefix + whole)
        if not read.calls:
            return Said(text, {"role": "assistant", "content": self.answer_prefix + text}, (), read.problem)
        calls = [
            {
                "id": f"call{num_calls + i:05d}",  # nine letters and digits, as Mistral's templates want them
                "type": "function",
                "function": {"name": call.name, "arguments": plain_copy(dict(call.arguments))},
            }
            for i, call in enumerate(read.calls)
        ]
        message = {"role": "assistant", "content": self._template.without_control_tokens(read.content), "tool_calls": calls}
        return Said(text, message, read.calls)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that a text without special tokens leaves out."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset([*self._tokenizer.all_special_ids, *(number for number, token in added if token.special)])

    def decoder(self, *, with_special: bool) -> Callable[[list[int]], str]:
        """Tokens → text. Some formats of calls are made of special tokens."""
        decode = self._tokenizer.backend_tokenizer.decode if self._decodes_in_bulk else self._tokenizer.decode
        return partial(decode, skip_special_tokens=not with_special)

    def texts(self, completions: Sequence[np.ndarray]) -> list[str]:
        """What each completion says, without special tokens. Many at once take less time than one by one."""
        ids = [completion.tolist() for completion in completions]
        if self._decodes_in_bulk:
            return self._tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=True)
        return [self._tokenizer.decode(one, skip_special_tokens=True) for one in ids]


def _as_text(message: Message) -> dict[str, Any]:
    """A message of its own, whose content is text where it came as parts. Raises TaskError where a part is no text."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or not content or not all(_is_part(part) for part in content):
        return dict(message)
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise TaskError(
                f"a message of role {message.get('role')} has a part of type {part['type']!r}; the policy reads text alone",
                "say in words what the part shows, or leave it out",
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and "type" in value


def _last_question(messages: list[dict[str, str]]) -> dict[str, str]:
    return next((message for message in reversed(messages) if message["role"] == "user"), messages[-1])


def _decodes_in_bulk(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the library beneath says the same by itself: it takes all texts at once, on all cores, and not one by one."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        getattr(kind, "_decode", None) is not PreTrainedTokenizerFast._decode
        or kind.decode is not PreTrainedTokenizerBase.decode
    ):
        return False
    ids = tokenizer.encode(SPACED, add_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
