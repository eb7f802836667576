"""Stop strings: found in the text of the newest tokens, so that the cost of looking does not grow with the completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
TOKENS_PER_CHARACTER = 4
"""A character may be spread over as many tokens as it has bytes in UTF-8."""


def find_stop(
    tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray, num_old: int, stops: tuple[str, ...], num_unheeded: int = 0
) -> tuple[int, str] | None:
    """(tokens up to and including the one that completed a stop string, that string), looking at tokens from `num_old` on.
    A string that ends within the first `num_unheeded` tokens is as good as not there."""
    reach = TOKENS_PER_CHARACTER * max(map(len, stops))
    for end in range(max(num_old, num_unheeded) + 1, len(token_ids) + 1):
        start = max(0, end - reach)
        text = tokenizer.decode(token_ids[start:end], skip_special_tokens=True)
        unheeded = tokenizer.decode(token_ids[start:num_unheeded], skip_special_tokens=True) if start < num_unheeded else ""
        for stop in stops:
            if text.find(stop, max(0, len(unheeded.rstrip(INCOMPLETE)) - len(stop) + 1)) >= 0:
                return end, stop
    return None
