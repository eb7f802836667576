"""Tokens → text, piece by piece, for one completion.

A piece never holds half a character, and never text that may turn out to be the beginning of a stop string. Put together,
the pieces are the text that the same tokens give at once, cut before the stop string that ended them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redline.models.detokenizer import Decode, Detokenizer

CONTEXT = 4
"""Prompt tokens decoded along with the first new ones: some tokenizers drop the space that begins a text."""


class CompletionText:
    """The text of a completion. Stop tokens have none, and stop strings cut it."""

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        stop_token_ids: Iterable[int] = (),
        *,
        with_offsets: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids[-CONTEXT:])
        self._with_offsets = with_offsets
        self._stop = stop
        self.is_one_by_one = with_offsets or bool(stop)
        """Whether it looks at each token by itself, which takes longer than all at once: to know where it begins, or to find a
        stop string with the very token with which the engine found it."""
        self._silent = frozenset(stop_token_ids)
        self._held = ""
        """Text not given out yet."""
        self._newest = 0
        """Where in `_held` the text of the newest token begins."""
        self.offsets: list[int] = []
        """Where in the text each token begins, if asked for."""

    def push(self, tokens: list[int]) -> str:
        """The text that no later token can take back."""
        for run in [[token] for token in tokens] if self.is_one_by_one else [tokens]:
            if self._with_offsets:
                self.offsets.append(self._detokenizer.num_chars)
            visible = [token for token in run if token not in self._silent]
            if visible:
                self._newest = len(self._held)
                self._held += self._detokenizer.push(visible)
        return self._give(self._first_doubt())

    def finish(self, stop: str | None) -> str:
        """The rest; `stop` is the string that ended the completion, if one did."""
        self._held += self._detokenizer.flush()
        end = self._completed(stop) if stop else -1
        return self._give(len(self._held) if end < 0 else end)

    def _give(self, end: int) -> str:
        given, self._held = self._held[:end], self._held[end:]
        self._newest = max(0, self._newest - end)
        return given

    def _first_doubt(self) -> int:
        """Where in `_held` the first text begins that is, or may become, a stop string."""
        return min((self._doubt(stop) for stop in self._stop), default=len(self._held))

    def _doubt(self, stop: str) -> int:
        complete = self._completed(stop)
        if complete >= 0:
            return complete
        longest = min(len(stop) - 1, len(self._held))
        overlaps = (size for size in range(longest, 0, -1) if self._held.endswith(stop[:size]))
        return len(self._held) - next(overlaps, 0)

    def _completed(self, stop: str) -> int:
        """Where a stop string begins that the newest token completed, or -1. One that an earlier token completed did not end
        the completion, so it is ordinary text."""
        return self._held.find(stop, max(0, self._newest - len(stop) + 1))
