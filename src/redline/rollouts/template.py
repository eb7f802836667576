"""The model's chat template: messages → text → tokens, and the text that it puts after a reply.

Text of a message that spells a control token (`<|im_end|>`) is encoded as the letters it is made of. Only the template, the
recipe and the policy itself write control tokens, so that nothing an environment shows can end a turn or begin one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from redline.errors import TaskError, in_words
from redline.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BREAK = "\ufdd0"
"""Stands inside a control token of a message's text: it is encoded in two pieces there. No character, by Unicode's own word."""
MARK = "\ufdd1reply\ufdd1"
"""Stands for a reply in a rendering that is cut behind it."""
EVERY_ROLE = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "t", "tool_call_id": "call00000"},
    {"role": "user", "content": "u"},
)
"""What a template writes around these are control tokens, whether or not the tokenizer calls them special."""


class ChatTemplate:
    """Renders and encodes with a tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            hint = "use an instruction-tuned model, or put a chat_template.jinja into its folder"
            raise TaskError("the model's tokenizer has no chat template", hint)
        self._tokenizer = tokenizer
        self._encodes_in_bulk = _encodes_in_bulk(tokenizer)

    @property
    def published_parser(self) -> Callable[[str], Mapping[str, Any]] | None:
        """Reads a reply the way that the tokenizer's own `response_template` says; None where it has none."""
        if getattr(self._tokenizer, "response_template", None) is None:
            return None
        return partial(self._tokenizer.parse_response, prefix="")

    # ── text ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, replies: bool = True) -> str:
        """The text of a conversation, with the beginning of the assistant's turn where it `replies`. Raises TaskError where the
        template refuses it."""
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=replies
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TaskError(
                f"{in_words(error)}; the model's chat template refuses the conversation ({roles})",
                "ask in an order of roles that the template knows",
            ) from error

    def tail(self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
        """The text from the end of a reply to where the next one begins: the end of the assistant's turn, the messages `added`,
        and the beginning of its next turn. `before` are the messages that the reply answered; where the template refuses what
        came of them, as it may a result without a call, their beginning stands for them. None where the template does not show
        the reply as it was, or refuses the messages added."""
        first = next((i for i, message in enumerate(before) if message.get("role") == "user"), 0)
        for history in (before, before[: first + 1]):
            try:
                text = self.render([*history, {"role": "assistant", "content": MARK}, *added], tools)
            except TaskError:
                continue
            head, mark, tail = text.rpartition(MARK)
            return tail if mark and MARK not in head else None
        return None

    def plain(self, value: Any) -> Any:
        """A message, or a part of one, whose text cannot become a control token, and can be encoded."""
        if isinstance(value, str):
            if not value.isascii():
                value = value.replace(BREAK, "").replace(MARK[0], "").encode(errors="replace").decode()  # no half characters
            return self._control_tokens.sub(_broken, value)
        if isinstance(value, Mapping):
            return {self.plain(key): self.plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(part) for part in value]
        return value

    def without_control_tokens(self, text: str) -> str:
        """What is left of a reply that was decoded with its special tokens."""
        return self._control_tokens.sub("", text)

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        """Matches special tokens, and the added tokens that the template writes around the turns of a conversation. Not those
        that it writes inside of a reply, such as `<think>`: to speak of them is no forgery, and prompts do."""
        text = ""
        for messages in (EVERY_ROLE, EVERY_ROLE[1:], EVERY_ROLE[1:3], EVERY_ROLE[1:2]):
            try:
                text += self.render(messages, replies=False)
            except TaskError:
                continue
        added = self._tokenizer.added_tokens_decoder.values()
        tokens = [token.content for token in added if token.special or (token.content in text and not token.content.isalnum())]
        longest_first = sorted((token for token in tokens if len(token.strip()) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _end_of_turn(self) -> re.Pattern[str]:
        return re.compile(rf"\s*({self._control_tokens.pattern})")

    # ── tokens ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered conversation."""
        pieces = text.split(BREAK)
        ids = self._encode(pieces[0])
        for piece in pieces[1:]:
            ids += self._encode_further(piece)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each. Many at once take less time than one by one."""
        whole = [text for text in texts if self._encodes_in_bulk and BREAK not in text]
        together = dict(zip(whole, self._encode_in_bulk(whole), strict=True))
        return [together[text] if text in together else self.encode(text) for text in texts]

    def encode_tail(self, tail: str, has_ended: bool) -> list[int]:
        """The tokens of a `tail`. Where the reply has ended its turn with a stop token, that one stands in place of the control
        token with which the template ends it."""
        end = self._end_of_turn.match(tail) if has_ended else None
        if end is None:
            return self._encode_further_pieces(tail)
        rest = self.encode(tail[end.start(1) :])
        if rest[:1] == [self._tokenizer.convert_tokens_to_ids(end[1])]:
            return rest[1:]  # encoded behind the control token, as in the whole conversation
        return self._encode_further_pieces(tail[end.end() :])

    def _encode_further_pieces(self, text: str) -> list[int]:
        return [token for piece in text.split(BREAK) for token in self._encode_further(piece)]

    def _encode_further(self, text: str) -> list[int]:
        """The tokens of a text that does not begin a sequence: without the space that some tokenizers put in front."""
        if not self._adds_a_space:
            return self._encode(text)
        line = self._encode("\n")
        ids = self._encode("\n" + text)
        return ids[len(line) :] if ids[: len(line)] == line else self._encode(text)

    @cached_property
    def _adds_a_space(self) -> bool:
        line = self._encode("\n")
        return self._encode("\nx") != line + self._encode("x")

    def _encode_in_bulk(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _broken(control_token: re.Match[str]) -> str:
    return control_token[0][0] + BREAK + control_token[0][1:]


def _encodes_in_bulk(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it takes many texts at once, on all cores, and makes of each what it makes of it alone."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        getattr(kind, "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
        and kind.encode is PreTrainedTokenizerBase.encode
        and kind.__call__ is PreTrainedTokenizerBase.__call__
    )
