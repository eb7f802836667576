"""Which tokens of a `TrainBatch` its sequences have in common, and which are worth computing once.

A group's attempts begin with the same prompt. In conversations of several turns their prompts may differ after a while; then
they share what comes before. Short answers are often the same altogether: the first of them is the original, and its copies go
through the network with it. Sequences without a trained token are left out: their gradient is zero.

Letters: S originals with a trained token, F families (attempts that share a prompt; a sequence that shares none is its own).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.trainer.batches.cost import CostModel
from redline.types import Flat, TrainBatch

LEFT_OUT = -1
COMPARED = 8
"""Tokens at the end of a sequence that are compared first: those of long answers seldom are the same."""


@dataclass(slots=True, frozen=True)
class Families:
    """The sequences of a batch by what they share."""

    original: np.ndarray
    """int64, for every sequence of the batch: the first one of its group with the same tokens, often itself; `LEFT_OUT` where
    it has no trained token."""
    number_S: np.ndarray
    """int64: of each original in the `TrainBatch`, rising."""
    family_S: np.ndarray
    """int64, rising."""
    own_S: np.ndarray
    """int64: tokens after the shared prompt."""
    prompt_S: np.ndarray
    """int64: tokens of the shared prompt; 0 where a sequence is laid whole."""
    prompt_F: np.ndarray
    """int64, the same."""


def find_families(batch: TrainBatch, cost: CostModel) -> Families:
    """Groups whose prompt is worth sharing are families; the sequences of the others stand alone."""
    number_S, untrained_S = _before_the_first_trained_token(batch)
    group_S = np.repeat(np.arange(len(batch.group_offsets) - 1), np.diff(batch.group_offsets))[number_S]
    original_S = _originals(batch, number_S, group_S, untrained_S)
    original = np.full(batch.num_sequences, LEFT_OUT, dtype=np.int64)
    original[number_S] = original_S
    number_S, group_S, untrained_S = (values[original_S == number_S] for values in (number_S, group_S, untrained_S))
    _, first_G, size_G = np.unique(group_S, return_index=True, return_counts=True)
    prompt_G = np.minimum.reduceat(untrained_S, first_G) if len(first_G) else np.zeros(0, dtype=np.int64)
    starts_S = batch.cu_seqlens[number_S]
    for group in np.flatnonzero(cost.sharing_pays(prompt_G, size_G)):
        starts = starts_S[first_G[group] : first_G[group] + size_G[group]]
        prompt_G[group] = _common_prefix(batch.tokens, starts.tolist(), int(prompt_G[group]))
    prompt_G[~cost.sharing_pays(prompt_G, size_G)] = 0

    prompt_S = np.repeat(prompt_G, size_G)
    begins_S = prompt_S == 0
    begins_S[first_G] = True
    return Families(
        original=original,
        number_S=number_S,
        family_S=np.cumsum(begins_S) - 1,
        own_S=np.diff(batch.cu_seqlens)[number_S] - prompt_S,
        prompt_S=prompt_S,
        prompt_F=prompt_S[begins_S],
    )


def _before_the_first_trained_token(batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """The sequences that have a trained token, and how many tokens come before it."""
    starts = batch.cu_seqlens[:-1]
    assert not batch.loss_mask[starts].any(), "a sequence is trained on its first token, which nothing predicts"
    runs = np.flatnonzero(batch.loss_mask[1:] > batch.loss_mask[:-1]) + 1  # where a run of trained tokens begins
    first_run = np.searchsorted(runs, batch.cu_seqlens)
    number_S = np.flatnonzero(np.diff(first_run))
    return number_S, runs[first_run[number_S]] - starts[number_S]


def _originals(batch: TrainBatch, number_S: np.ndarray, group_S: np.ndarray, untrained_S: np.ndarray) -> np.ndarray:
    """int64[S]: of each sequence the first one of its group with the same tokens, and as many of them before a trained one."""
    original_S, starts, tokens = number_S.copy(), batch.cu_seqlens.tolist(), batch.tokens
    seen: dict[tuple[int, int, int, bytes], list[int]] = {}
    for s, (number, group, untrained) in enumerate(zip(number_S.tolist(), group_S.tolist(), untrained_S.tolist(), strict=True)):
        start, end = starts[number], starts[number + 1]
        ending = bytes(tokens[max(start, end - COMPARED) : end].data)
        alike = seen.setdefault((group, end - start, untrained, ending), [])
        whole = tokens[start:end].data
        for other in alike:
            if tokens[starts[other] : starts[other + 1]].data == whole:
                original_S[s] = other
                break
        else:
            alike.append(number)
    return original_S


def _common_prefix(tokens: Flat, starts: list[int], limit: int) -> int:
    """How many tokens all sequences that begin at `starts` have in common, at most `limit`."""
    prefix = tokens[starts[0] : starts[0] + limit]
    for start in starts[1:]:
        other = tokens[start : start + len(prefix)]
        if other.data != prefix.data:  # faster than to compare arrays, and they are almost always equal
            prefix = prefix[: int(np.argmax(other != prefix))]
    return len(prefix)
