"""What one process does of a micro-batch that several work on together: a run of its tokens, and the logprobs they predict.

Losses want whole sequences, so logprobs are gathered before the loss. Every process then computes the same loss of all M
trained tokens, and its backward pass follows only the logprobs it made itself. Gradients are summed over processes anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from redline.models.attention.ulysses import UlyssesAttention
from redline.models.decoder import Attend


class SequenceShare:
    """This process's part of one micro-batch; with a single rank, all of it."""

    def __init__(
        self,
        num_tokens: int,
        predicted_from_M: np.ndarray,
        rank: int = 0,
        ranks: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        bounds = [num_tokens * r // ranks for r in range(ranks + 1)]
        start, end = bounds[rank], bounds[rank + 1]
        self.tokens = slice(start, end)
        """The packed tokens that go through the network here."""
        self.trained: np.ndarray | slice = slice(None)
        """Which of the M trained tokens are predicted here: all, or int64."""
        self.predicted_from = predicted_from_M
        """int64: the tokens that predict them, counted from the first one here."""
        if ranks > 1:
            self.trained = np.flatnonzero((start <= predicted_from_M) & (predicted_from_M < end))
            self.predicted_from = predicted_from_M[self.trained] - start
        self._lengths = np.diff(bounds).tolist()
        self._num_trained = len(predicted_from_M)
        self._group = group if ranks > 1 else None

    def attend(self, attend: Attend) -> Attend:
        """For the tokens that are here, out of the attention over all of them."""
        return attend if self._group is None else UlyssesAttention(attend, self._lengths, self._group)

    def gather(self, values: Tensor) -> Tensor:
        """One value for each of the M trained tokens, from those of `trained`."""
        if self._group is None:
            return values
        trained = torch.from_numpy(self.trained).to(values.device)
        return _Gather.apply(values, trained, self._num_trained, self._group)


class _Gather(torch.autograd.Function):
    """A sum in which every value has one summand that is not zero: exact, and free of any order of the processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        gathered = values.new_zeros(count, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None, None
