"""What the trainers are given: random tokens in sequences of the wanted lengths, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from redline.types import TrainBatch, VersionSpan

SPREAD = 1.0
"""Standard deviation of the logarithm of a long-tailed length: of 32 sequences the longest is several times the mean."""


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
    random = np.random.default_rng(list(key))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    lowest = min(10, vocab_size - 1)
    tokens = random.integers(lowest, vocab_size, cu_seqlens[-1], dtype=np.int32)
    prompt_columns = np.arange(prompt_tokens)
    firsts = np.repeat(cu_seqlens[:-1:group_size], group_size)
    tokens[cu_seqlens[:-1, None] + prompt_columns] = tokens[firsts[:, None] + prompt_columns]
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    loss_mask = positions >= prompt_tokens
    return TrainBatch(
        tokens=tokens,
        cu_seqlens=cu_seqlens,
        group_offsets=np.arange(0, len(lengths) + 1, group_size, dtype=np.int64),
        loss_mask=loss_mask,
        old_logprobs=np.where(loss_mask, -math.log(vocab_size), 0).astype(np.float32),
        advantages=random.standard_normal(len(lengths), dtype=np.float32),
        num_sequences_sampled=len(lengths),
        versions=VersionSpan(0, 0),
        version=0,
    )
