"""Tokens → text, token by token, at a cost per token that does not grow with the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
TOKENS_PER_CHARACTER = 4
"""A character may be spread over as many tokens as it has bytes in UTF-8."""
MAX_PENDING = 2 * TOKENS_PER_CHARACTER
"""Tokens held back before some of them are given out as they are. Bytes that never make a character, and tokens without any
text, would otherwise be decoded again with every token that follows."""


class Detokenizer:
    """Holds tokens back until they end with a whole character, but never many."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(context)
        self._context_text = decode(self._context) if self._context else ""
        if self._context_text.endswith(INCOMPLETE):  # the first tokens would change the text before them, and be lost in it
            self._context, self._context_text = [], ""
        self._pending: list[int] = []
        self.num_chars = 0
        """Characters given out so far."""

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that has become certain with these tokens."""
        self._pending += tokens
        text = self._decode(self._context + self._pending)
        if len(text) > len(self._context_text) and not text.endswith(INCOMPLETE):
            return self._give(text)
        if len(self._pending) <= MAX_PENDING:
            return ""
        if text == self._context_text:
            self._pending = []
            return ""
        return self._give_beginning(text)

    def fork(self, decode: Decode) -> Detokenizer:
        """One that goes on from here by itself, with a `decode` that says the same of all tokens so far."""
        other = Detokenizer(decode)
        other._context, other._context_text = list(self._context), self._context_text
        other._pending, other.num_chars = list(self._pending), self.num_chars
        return other

    def flush(self) -> str:
        """Returns what is left at the end, half characters included."""
        return self._give(self._decode(self._context + self._pending)) if self._pending else ""

    def _give_beginning(self, text: str) -> str:
        """Give out all but the last tokens, which may still become a character: the cut is where both sides decode alone to
        what they are together."""
        for size in range(1, TOKENS_PER_CHARACTER + 1):
            head, tail = self._pending[:-size], self._pending[-size:]
            begin = self._decode(self._context + head)
            if begin + self._decode(tail) == text:
                self._pending = head
                given = self._give(begin)
                self._pending = tail
                return given
        return self._give(text)

    def _give(self, text: str) -> str:
        fresh = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        self.num_chars += len(fresh)
        return fresh
