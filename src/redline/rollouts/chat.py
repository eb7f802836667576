"""Conversations ↔ tokens. The only place where text is tokenised; everything later carries these ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from redline.errors import TaskError
from redline.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPACED = "Is n't it ? I 'm sure , and so 's he ."
"""Some tokenizers take spaces out of what they decode: they would of this."""


class Chat:
    """Renders tasks with the model's own chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, prompt_suffix: str, answer_prefix: str = ""
    ) -> None:
        """`answer_prefix` begins the assistant's turn, and the policy goes on from there."""
        if not tokenizer.chat_template:
            hint = "use an instruction-tuned model, or put a chat_template.jinja into its folder"
            raise TaskError("the model's tokenizer has no chat template", hint)
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._prompt_suffix = prompt_suffix
        self.answer_prefix = answer_prefix
        self._decodes_in_bulk = _decodes_in_bulk(tokenizer)

    def prompt_ids(self, task: Task) -> np.ndarray:
        """int32[tokens], ready for the assistant to go on."""
        return self._rendered(self.messages(task))

    def shortened_prompt_ids(self, task: Task, limit: int) -> np.ndarray:
        """The same with at most `limit` tokens: the last user message loses its beginning, and keeps its end and the suffix.
        What cannot be made to fit that way comes as short as it gets."""
        prompt = self.prompt_ids(task)
        message = _last_question([dict(message) for message in task.messages])
        content = self._tokenizer.encode(message["content"], add_special_tokens=False)
        num_cut = 0
        while len(prompt) > limit and num_cut < len(content):
            # Tokens of a piece of text are not always a piece of its tokens, hence again until it fits.
            num_cut = min(len(content), num_cut + len(prompt) - limit)
            prompt = self._rendered(self.messages(task, self._tokenizer.decode(content[num_cut:])))
        return prompt

    def _rendered(self, messages: list[dict[str, str]]) -> np.ndarray:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return np.array(self._tokenizer.encode(text + self.answer_prefix, add_special_tokens=False), dtype=np.int32)

    def messages(self, task: Task, question: str | None = None) -> list[dict[str, str]]:
        """The conversation as the model gets it; with `question` in place of the last user message."""
        messages = [dict(message) for message in task.messages]
        last_question = _last_question(messages)
        if question is not None:
            last_question["content"] = question
        last_question["content"] += self._prompt_suffix
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    def texts(self, completions: Sequence[np.ndarray]) -> list[str]:
        """What each completion says, without special tokens. Many at once take less time than one by one."""
        ids = [completion.tolist() for completion in completions]
        if self._decodes_in_bulk:
            return self._tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=True)
        return [self._tokenizer.decode(one, skip_special_tokens=True) for one in ids]


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
