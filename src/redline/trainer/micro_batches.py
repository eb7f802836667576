"""`TrainBatch` → micro-batches under a token budget, each group's prompt once.

    batch        [prompt A · A1][prompt A · A2][prompt A · A3]   as sampled: every sequence whole
    micro-batch  [prompt A][A1][A2][A3]                          the same attention, a third of the tokens

The gradient is the same: each attempt's tokens attend to the one prompt, and the prompt's gradient is the sum over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from redline.models.packed_attention import NO_PARENT, Segments
from redline.types import TrainBatch


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """T tokens through the network, M of them trained on."""

    tokens_T: np.ndarray
    """int64."""
    segments: Segments
    predicted_from_M: np.ndarray
    """int64: packed index of the token whose hidden state predicts each trained token."""
    targets_M: np.ndarray
    """int64: the trained tokens."""
    old_logprobs_M: np.ndarray
    """float32."""
    sequence_M: np.ndarray
    """int64: which sequence of the `TrainBatch` each trained token belongs to."""


@dataclass(slots=True)
class _Builder:
    tokens: list[np.ndarray] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    predicted_from: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    old_logprobs: list[np.ndarray] = field(default_factory=list)
    sequences: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0

    def add_segment(self, tokens: np.ndarray, parent: int) -> int:
        """Append a segment; its index."""
        self.tokens.append(tokens)
        self.parents.append(parent)
        self.num_tokens += len(tokens)
        return len(self.parents) - 1

    def add_sequence(self, batch: TrainBatch, sequence: int, prompt_length: int, prompt_segment: int, prompt_end: int) -> None:
        """Append what follows the shared prompt, whose last token sits at packed index `prompt_end`."""
        start, end = batch.cu_seqlens[sequence] + prompt_length, batch.cu_seqlens[sequence + 1]
        first = self.num_tokens
        self.add_segment(batch.tokens[start:end].astype(np.int64), prompt_segment)
        trained = np.flatnonzero(batch.loss_mask[start:end])
        self.predicted_from.append(np.where(trained == 0, prompt_end, first + trained - 1))
        self.targets.append(self.tokens[-1][trained])
        self.old_logprobs.append(batch.old_logprobs[start:end][trained])
        self.sequences.append(np.full(len(trained), sequence, dtype=np.int64))

    def build(self) -> MicroBatch:
        lengths = [len(tokens) for tokens in self.tokens]
        return MicroBatch(
            tokens_T=np.concatenate(self.tokens),
            segments=Segments(np.concatenate([[0], np.cumsum(lengths)]), np.array(self.parents, dtype=np.int64)),
            predicted_from_M=np.concatenate(self.predicted_from),
            targets_M=np.concatenate(self.targets),
            old_logprobs_M=np.concatenate(self.old_logprobs),
            sequence_M=np.concatenate(self.sequences),
        )


def micro_batches(batch: TrainBatch, max_tokens: int) -> Iterator[MicroBatch]:
    """Sequences in order, as many as fit; a group cut in two has its prompt in both. A longer sequence goes alone."""
    builder = _Builder()
    for group_start, group_end in zip(batch.group_offsets[:-1], batch.group_offsets[1:], strict=True):
        prompt_length = _shared_prompt_length(batch, group_start, group_end)
        prompt_segment = prompt_end = NO_PARENT
        for sequence in range(group_start, group_end):
            start = batch.cu_seqlens[sequence]
            rest = batch.cu_seqlens[sequence + 1] - start - prompt_length
            needed = rest + (prompt_length if prompt_segment == NO_PARENT else 0)
            if builder.num_tokens and builder.num_tokens + needed > max_tokens:
                yield builder.build()
                builder, prompt_segment = _Builder(), NO_PARENT
            if prompt_segment == NO_PARENT:
                prompt = batch.tokens[start : start + prompt_length].astype(np.int64)
                prompt_segment = builder.add_segment(prompt, NO_PARENT)
                prompt_end = builder.num_tokens - 1
            builder.add_sequence(batch, sequence, prompt_length, prompt_segment, prompt_end)
    if builder.num_tokens:
        yield builder.build()


def _shared_prompt_length(batch: TrainBatch, group_start: int, group_end: int) -> int:
    """Leading tokens that all sequences of the group share and none is trained on; at least 1, since a first token is never
    chosen by the policy."""
    starts, ends = batch.cu_seqlens[group_start:group_end], batch.cu_seqlens[group_start + 1 : group_end + 1]
    untrained = min(int(np.argmax(batch.loss_mask[s:e])) for s, e in zip(starts, ends, strict=True))
    first = batch.tokens[starts[0] : starts[0] + untrained]
    assert untrained > 0, "a sequence is trained on its first token, which nothing predicts"
    assert all(np.array_equal(first, batch.tokens[s : s + untrained]) for s in starts), (
        "a group's attempts differ in their prompt"
    )
    return untrained
