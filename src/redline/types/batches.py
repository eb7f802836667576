"""What the buffer hands to the trainer, and what the trainer says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from redline.types.flat import Flat
from redline.types.sampling import VersionSpan


@dataclass(slots=True, frozen=True)
class TrainBatch:
    """buffer → trainer: sequences laid end to end, never padded, with the groups they came from.

    Tokens and logprobs are views of the trajectory files, in as many pieces as the groups lie in. An attempt that is not
    trained on (it failed, or has no advantage) stays in view, since leaving it out would mean to copy all others: its loss mask
    is cleared and its advantage 0, and the trainer computes no sequence without a trained token. A batch that was put together
    in memory has no such attempts, and a group of it may be empty. Either way attempts without an advantage count in the means,
    since their gradient is exactly zero; attempts that failed do not, since they say nothing about the policy.
    """

    tokens: Flat
    """int32[T]."""
    cu_seqlens: np.ndarray
    """int64[S + 1]; sequence s is `tokens[cu_seqlens[s]:cu_seqlens[s + 1]]`."""
    group_offsets: np.ndarray
    """int64[groups + 1]; group g holds the sequences from `group_offsets[g]` up to `group_offsets[g + 1]`."""
    loss_mask: np.ndarray
    """bool[T]: True where the policy chose the token and is trained on it; all False in an attempt that is not trained on."""
    old_logprobs: Flat
    """float32[T], from the engine; of no meaning where `loss_mask` is False."""
    advantages: np.ndarray
    """float32[S], of the groups; 0 in an attempt that is not trained on."""
    group_sequences: np.ndarray
    """int64[groups]: sequences of each group that count in the mean over sequences, those left out or masked for want of signal
    included, those of attempts that failed not."""
    group_tokens: np.ndarray
    """int64[groups]: tokens the policy chose in those attempts; they count in the mean over tokens."""
    versions: VersionSpan
    version: int
    """The policy version the batch was assembled for."""
    indices: tuple[int, ...] = ()
    """Indices of the groups, those without signal included."""
    lags: tuple[int, ...] = ()
    """Steps that the policy is ahead of the oldest token of each group."""
    num_attempts: int | None = None
    """Attempts that the counted sequences belong to; None where each sequence is one."""
    routing: Flat | None = None
    """uint8[T · layers with experts · choices]: the experts that each token went to in the engine, as `Completion.routing`,
    token after token; None where no sequence has it."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_groups(self) -> int:
        return len(self.group_offsets) - 1

    @property
    def num_sequences_sampled(self) -> int:
        """Sequences that count in the mean over sequences: the sum of `group_sequences`."""
        return int(self.group_sequences.sum())

    @property
    def num_attempts_sampled(self) -> int:
        """Attempts that those sequences belong to."""
        return self.num_sequences_sampled if self.num_attempts is None else self.num_attempts

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens that count in the mean over tokens: the sum of `group_tokens`."""
        return int(self.group_tokens.sum())

    @property
    def num_tokens_left_out(self) -> int:
        """Sampled tokens without a gradient: num_tokens_sampled less the sum of `loss_mask`."""
        return self.num_tokens_sampled - int(np.count_nonzero(self.loss_mask))

    @property
    def routing_width(self) -> int:
        """Bytes of `routing` for each token: layers with experts · choices; 0 where there is none."""
        return 0 if self.routing is None else len(self.routing) // len(self.tokens)

    @property
    def lag(self) -> int:
        """Steps between the policy being trained and the oldest token in the batch."""
        return self.versions.lag(self.version)


@dataclass(slots=True, frozen=True)
class StepReport:
    """What one step did; every value is a mean over trained tokens unless its name says otherwise."""

    loss: float
    """With several updates per step their mean, as is the gradient norm."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    entropy: float
    """Nats, of the distribution sampled from."""
    clip_fraction: float
    mismatch_kl: float
    """Estimate of KL(engine ‖ trainer) on the sampled tokens, k3: mean of r - 1 - log r with r = π_trainer / π_engine."""
    max_ratio: float
    """Largest r over the batch."""
    num_tokens: int
    """Tokens that went through the network (a group's prompt counts once)."""
    num_trained_tokens: int
    num_micro_batches: int
    imbalance: float = 1.0
    """Cost of the dearest micro-batch over the mean."""
    num_padding_tokens: int = 0
    """Tokens that went through the network for nothing."""
    flops: int = 0
    """Operations that the policy's forward and backward passes need (`models/sizes/flops.py`): no padding, a group's prompt
    once, nothing for what is computed again."""
    skipped: bool = False
    """The loss or the gradient was not finite, and the update of it was not made."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """What only some recipes have: `kl`, `masked` (share of tokens without weight), `value_loss`, …"""
