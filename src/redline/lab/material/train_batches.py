"""What the trainers are given: random tokens in sequences of the wanted lengths, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from redline.types import TrainBatch, VersionSpan

SPREAD = 1.0
"""Standard deviation of the logarithm of a long-tailed length: of 32 sequences the longest is several times the mean."""
TAIL = 8
"""The longest sequence of a long tail, in average ones, where nothing else is said."""


def long_tailed_lengths(count: int, total: int, shortest: int, longest: int, seed: int) -> np.ndarray:
    """int64[count], log-normal up to `longest`, `total` tokens in all."""
    assert count * shortest <= total <= count * longest
    drawn = np.random.default_rng(seed).lognormal(sigma=SPREAD, size=count)
    low, high = 0.0, total / drawn.min()
    for _ in range(64):
        middle = (low + high) / 2
        scaled = np.clip(drawn * middle, shortest, longest).astype(np.int64)
        low, high = (middle, high) if scaled.sum() <= total else (low, middle)
    lengths = np.clip(drawn * low, shortest, longest).astype(np.int64)
    while missing := total - lengths.sum():  # rounded down, so that a token or so of each sequence is still to be given
        lengths[np.flatnonzero(lengths < longest)[:missing]] += 1
    return lengths


def random_batch(
    lengths: np.ndarray, *, prompt_tokens: int, group_size: int, vocab_size: int, key: Sequence[int]
) -> TrainBatch:
    """Whole sequences of these lengths; all but their prompt is trained on, and the sequences of a group share the prompt.

    The old logprobs are those of a uniform distribution, near enough to random weights that no ratio overflows."""
    sequences = len(lengths)
    offsets = np.arange(0, sequences + 1, group_size, dtype=np.int64)
    return random_groups(lengths, np.full(sequences, prompt_tokens), offsets, vocab_size, key)


def random_groups(
    lengths: np.ndarray, prompt_lengths: np.ndarray, group_offsets: np.ndarray, vocab_size: int, key: Sequence[int]
) -> TrainBatch:
    """The same for groups and prompts of any size, int64[S] and int64[groups + 1]; a group has the prompt of its first
    sequence, which is as long as those of the others."""
    random = np.random.default_rng(list(key))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    lowest = min(10, vocab_size - 1)
    tokens = random.integers(lowest, vocab_size, cu_seqlens[-1], dtype=np.int32)
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    loss_mask = positions >= np.repeat(prompt_lengths, lengths)
    firsts = np.repeat(np.repeat(cu_seqlens[group_offsets[:-1]], np.diff(group_offsets)), lengths)
    tokens = np.where(loss_mask, tokens, tokens[firsts + np.where(loss_mask, 0, positions)])
    return TrainBatch(
        tokens=tokens,
        cu_seqlens=cu_seqlens,
        group_offsets=group_offsets,
        loss_mask=loss_mask,
        old_logprobs=np.where(loss_mask, -math.log(vocab_size), 0).astype(np.float32),
        advantages=random.standard_normal(len(lengths), dtype=np.float32),
        group_sequences=np.diff(group_offsets),
        group_tokens=np.add.reduceat(lengths - prompt_lengths, group_offsets[:-1]),
        versions=VersionSpan(0, 0),
        version=0,
    )
