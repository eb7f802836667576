"""Stop strings: found in the text of the newest tokens, so that the cost of looking does not grow with the completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_CHARACTER = 4
"""A character may be spread over as many tokens as it has bytes in UTF-8."""


def find_stop(
    tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray, num_old: int, stops: tuple[str, ...]
) -> tuple[int, str] | None:
    """(tokens up to and including the one that completed a stop string, that string), looking at tokens from `num_old` on."""
    reach = TOKENS_PER_CHARACTER * max(map(len, stops))
    for end in range(num_old + 1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[max(0, end - reach) : end], skip_special_tokens=True)
        for stop in stops:
            if stop in text:
                return end, stop
    return None
