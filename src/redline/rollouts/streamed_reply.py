"""A reply that is read while it is sampled.

    pieces of tokens ──► text so far, calls so far ──► until? ──► the cut: so many of the tokens are the reply

Where a reply is cut follows from its tokens alone: they are looked at one by one, in whatever pieces they come, and an engine
that brings a reply whole gives the same one as an engine that is stopped in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from redline.models.detokenizer import Detokenizer
from redline.rollouts.chat import Chat
from redline.rollouts.tool_calls import ReplyReader
from redline.say_arguments import ends_reply
from redline.types import Completion, Delta, ReplySoFar, Until

PIECE = 16
"""Tokens of a piece by which nothing is decided: to read it takes a small part of the time to sample it."""
DECIDING_PIECE = 4
"""The same where `until` may end the reply: what is sampled beyond its end is thrown away."""

MakeReader = Callable[[], ReplyReader | None]


class StreamedReply:
    """Takes the tokens of one reply as they come."""

    def __init__(self, chat: Chat, make_reader: MakeReader, stop_token_ids: Collection[int], until: Until | None) -> None:
        """`make_reader` makes what finds calls of tools, or nothing. `stop_token_ids` end a reply, and are no part of its
        calls."""
        self._chat, self._make_reader = chat, make_reader
        self._stop_token_ids, self._until = frozenset(stop_token_ids), until
        self._apart = self._stop_token_ids | chat.special_token_ids
        """Tokens that are not in both texts."""
        self.seconds = 0.0
        """That it took to read it so far."""
        self._begin()

    def _begin(self) -> None:
        self.reader = self._make_reader()
        """Has read all of the reply that has come."""
        self._for_reader = Detokenizer(self._chat.decoder(with_special=True))
        self._for_until = None if self.reader else Detokenizer(self._chat.decoder(with_special=False))
        """None while what `until` sees is what the reader reads: up to the first special token."""
        self._so_far = ReplySoFar("")
        self._token_ids: list[int] = []
        self._cut: int | None = None
        """How many of the tokens are the reply, once that is known."""

    @property
    def decides(self) -> bool:
        """Whether it may end the reply."""
        return self._until is not None

    @property
    def piece(self) -> int:
        """Tokens that are to come at once."""
        return DECIDING_PIECE if self.decides else PIECE

    @property
    def is_cut(self) -> bool:
        """Whether the reply ends within the tokens that have come."""
        return self._cut is not None

    def take(self, piece: Delta) -> Completion | None:
        """Take what has come. Returns the reply, where the piece has all that was sampled. Raises what `until` raises."""
        if piece.completion is not None:
            return self._finish(piece.completion)
        self._push(piece.token_ids.tolist())
        return None

    def _push(self, token_ids: Sequence[int]) -> None:
        began = time.perf_counter()
        try:
            runs: list[Sequence[int]] = [token_ids] if self._until is None else [[token] for token in token_ids]
            for run in runs:
                self._token_ids += run
                if self._cut is None:
                    self._take(run)
        finally:
            self.seconds += time.perf_counter() - began

    def _finish(self, completion: Completion) -> Completion:
        """The part that is the reply. Where other tokens came before, since the engine that sampled them was lost, all of it is
        read from the beginning."""
        whole, count = completion.token_ids, len(self._token_ids)
        if whole[:count].tolist() != self._token_ids:
            self._begin()
            count = 0
        self._push(whole[count:].tolist())
        return completion if self._cut is None else completion.cut(self._cut)

    def _take(self, token_ids: Sequence[int]) -> None:
        text = self._text(token_ids)
        if self._until is None:
            return
        calls = self.reader.calls if self.reader else ()
        if text or calls != self._so_far.tool_calls:
            self._so_far = ReplySoFar(self._so_far.text + text, calls)
            if ends_reply(self._until, self._so_far):
                self._cut = len(self._token_ids)

    def _text(self, token_ids: Sequence[int]) -> str:
        """Have the reader read what has come. Returns the text that `until` is to see, if there is one."""
        if self.reader is None:
            return self._for_until.push(token_ids) if self._for_until else ""
        if self._until and self._for_until is None and not self._apart.isdisjoint(token_ids):
            self._for_until = self._for_reader.fork(self._chat.decoder(with_special=False))
        of_calls = [token for token in token_ids if token not in self._stop_token_ids]
        text = self._for_reader.push(of_calls) if of_calls else ""
        self.reader.push(text)
        return text if self._for_until is None else self._for_until.push(token_ids)
