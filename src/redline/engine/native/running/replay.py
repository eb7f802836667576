"""Texts that are drawn whatever the network says: for measurements of what depends on the texts, with a network of any shape.

The network computes every step as ever, and the logprobs are those of the tokens it would have drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.sequence import Sequence as Sequence_

NOT_GIVEN = -1


class Replay:
    """Tokens of the completions that hold rows now."""

    def __init__(self, texts: Mapping[int, np.ndarray], longest: int, num_rows: int, device: torch.device) -> None:
        """`texts` has the tokens, at most `longest`, of the first completion of a request by the request's seed."""
        self._texts = texts
        self._tokens_RN = torch.full((num_rows, longest), NOT_GIVEN, dtype=torch.int32, device=device)

    def enter(self, sequences: Sequence[Sequence_]) -> None:
        """New tenants of rows."""
        for sequence in sequences:
            tokens = np.full(self._tokens_RN.shape[1], NOT_GIVEN, np.int32)
            text = self._texts.get(sequence.request.sampling.seed, tokens[:0])
            tokens[: len(text)] = text
            self._tokens_RN[sequence.row].copy_(torch.from_numpy(tokens))

    def draw(self, rows_B: Tensor, counters_B: Tensor, tokens_B: Tensor) -> None:
        """Put the tokens of these numbers in the place of those that were drawn, where there are any."""
        given_B = self._tokens_RN[rows_B, counters_B.clamp(max=self._tokens_RN.shape[1] - 1)].long()
        tokens_B.copy_(torch.where(given_B == NOT_GIVEN, tokens_B, given_B))
