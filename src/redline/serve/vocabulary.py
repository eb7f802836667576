"""The tokenizer as the server needs it: prompts to ids, ids to text, and each token by itself for logprobs."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateError

from redline.serve.requests.protocol import ApiError, ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 8
"""More than most texts have; see `Vocabulary.encode`."""
SEAM = 16
"""Tokens that the beginning of a text may have more of than the whole: where it is cut, and before it."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TooLongError(Exception):
    """A text has more tokens than the model has positions; the message says how many."""


class Vocabulary:
    """One tokenizer. `decode` leaves special tokens out; `token_text` shows them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes_of_chars = _byte_level_alphabet()
        self.token_bytes = functools.cache(self._token_bytes)
        self.token_text = functools.cache(self._token_text)

    def encode(self, text: str, most: int) -> np.ndarray:
        """int32[tokens], with whatever the tokenizer puts before a text. Raises `TooLongError` beyond `most` tokens."""
        return self._encode(text, most, add_special_tokens=True)

    def render(self, messages: Sequence[ChatMessage], most: int) -> np.ndarray:
        """int32[tokens]: the conversation in the model's own chat template, ready for the assistant's turn. Raises
        `TooLongError` beyond `most` tokens."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "the model has no chat template; use /v1/completions", code="no_chat_template")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error
        return self._encode(text, most, add_special_tokens=False)

    def _encode(self, text: str, most: int, *, add_special_tokens: bool) -> np.ndarray:
        """A text that is far too long is known by its beginning: the work is bounded by what the model could take, not by what
        was sent. The beginnings double, since a few tokens may stand for a lot of text, such as spaces."""
        size = CHARACTERS_PER_TOKEN * (most + SEAM)
        while size < len(text):
            if len(self._tokenizer.encode(text[:size], add_special_tokens=add_special_tokens)) > most + SEAM:
                raise TooLongError(f"of more than {most} tokens")
            size *= 2
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if len(ids) > most:
            raise TooLongError(f"of {len(ids)} tokens")
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _token_bytes(self, token: int) -> bytes:
        """UTF-8, or the part of a character that the token stands for."""
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # rows of the network beyond the tokenizer's last token
            return b""
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        if "\N{REPLACEMENT CHARACTER}" in text and all(char in self._bytes_of_chars for char in piece):
            return bytes(self._bytes_of_chars[char] for char in piece)
        # A decoder drops the space that begins a text, and alone every token begins one.
        return (" " + text if piece.startswith("▁") and not text.startswith(" ") else text).encode()

    def _token_text(self, token: int) -> str:
        """A part of a character is spelled as OpenAI does: `bytes:\\xe2`."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte, as byte-level tokenizers write bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
