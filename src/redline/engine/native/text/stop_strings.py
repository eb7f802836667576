"""Stop strings: looked for in the text of each new token alone, so that the cost does not grow with the completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redline.models.detokenizer import Detokenizer

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


class StopSearch:
    """Looks for stop strings in one completion as it grows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...], num_unheeded: int = 0) -> None:
        """A string that ends within the first `num_unheeded` tokens is not found."""
        self._detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
        self._stops = stops
        self._num_unheeded = num_unheeded
        self._reach = max(map(len, stops)) - 1
        self._tail = ""
        """The last characters of the text so far: a stop string may begin there."""
        self._num_searched = 0

    def look(self, token_ids: np.ndarray | Sequence[int]) -> tuple[int, str] | None:
        """`token_ids` are the completion's tokens so far. Returns how many of them there are up to and including the one that
        completed a stop string, and that string; None where there is none yet."""
        for end in range(self._num_searched + 1, len(token_ids) + 1):
            fresh = self._detokenizer.push([int(token_ids[end - 1])])
            self._num_searched = end
            if not fresh:
                continue
            text, old = self._tail + fresh, len(self._tail)
            self._tail = text[-self._reach :] if self._reach else ""
            if end <= self._num_unheeded:
                continue
            found = {stop: text.find(stop, max(0, old - len(stop) + 1)) for stop in self._stops}
            begun = {stop: where for stop, where in found.items() if where >= 0}
            if begun:
                return end, min(begun, key=begun.__getitem__)  # what begins first: the text before it holds no other
        return None
