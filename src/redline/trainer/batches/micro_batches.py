"""`TrainBatch` → micro-batches under a token budget, each group's prompt once, even in cost over micro-batches and ranks.

    batch        [prompt A · A1][prompt A · A2][prompt A · A3]   as sampled: every sequence whole
    micro-batch  [prompt A][A1][A2][A3]                          the same attention, a third of the tokens

The gradient is the same: each attempt's tokens attend to the one prompt, and the prompt's gradient is the sum over them. So it
is with an attempt that has the very tokens of another: the logprobs of both are read from the one that is laid out.
`shared_prompts.py` says what is shared, `balance.py` what goes together, and here it is laid out.

Letters beyond the usual: R ranks, N micro-batches of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from redline.errors import TrainingError
from redline.kernels.segments import NO_PARENT, Segments
from redline.models.sizes.flops import TrainLoad
from redline.trainer.batches.balance import Bins, deal, fill_bins
from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.shared_prompts import LEFT_OUT, Families, find_families
from redline.trainer.batches.staging import Taken, Values
from redline.types import TrainBatch, records


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """T tokens through the network, M of them trained on. What the batch has of each is not copied before it is sent."""

    tokens: Values
    """int32[T]."""
    segments: Segments
    predicted_from_M: np.ndarray
    """int64: packed index of the token whose hidden state predicts each trained token."""
    targets: Values
    """int32[M]: the trained tokens."""
    old_logprobs: Values
    """float32[M]."""
    index_M: np.ndarray
    """int64: where each trained token is in `TrainBatch.tokens`; takes and puts per-token values of the batch."""
    sequence_M: np.ndarray
    """int64: which sequence of the `TrainBatch` each trained token belongs to."""
    local_sequence_M: np.ndarray
    """int64: the same, counted within the micro-batch from 0; what losses take as `sequence_M`."""
    routing: Values | None = None
    """For each of the T tokens the bytes that the batch has of it (`TrainBatch.routing`), as one value; None where it has
    none."""

    @property
    def tokens_T(self) -> np.ndarray:  # noqa: N802
        """int64, a copy; so are the two below, of which the second is float32."""
        return np.asarray(self.tokens, dtype=np.int64)

    @property
    def targets_M(self) -> np.ndarray:  # noqa: N802
        return np.asarray(self.targets, dtype=np.int64)

    @property
    def old_logprobs_M(self) -> np.ndarray:  # noqa: N802
        return np.asarray(self.old_logprobs)


@dataclass(slots=True, frozen=True)
class MicroBatchPlan:
    """Which sequences go through the network together, on which rank and when."""

    batch: TrainBatch
    original: np.ndarray
    """int64, for every sequence of the batch: the one with the same tokens that is laid out for it (`Families.original`)."""
    prompt_S: np.ndarray
    """int64, for every sequence of the batch: leading tokens that it shares with its group."""
    sequences_RN: tuple[tuple[np.ndarray, ...], ...]
    """Rank → micro-batch → its sequences in the batch, int64, rising; none where a rank is idle (`idle_micro_batch`)."""
    cost_RN: np.ndarray
    """float64, in tokens (`CostModel`)."""
    tokens_RN: np.ndarray
    """int64: tokens of the batch through the network; a prompt counts once for every micro-batch that it is in."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share the batch."""
        return self.cost_RN.shape[0]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank; every rank has as many."""
        return self.cost_RN.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks."""
        return int(self.tokens_RN.sum())

    @property
    def num_padding_tokens(self) -> int:
        """Tokens through the network that are none of the batch: one for each idle micro-batch."""
        return sum(len(sequences) == 0 for rank in self.sequences_RN for sequences in rank)

    @property
    def largest_micro_batch(self) -> int:
        """Tokens."""
        return int(self.tokens_RN.max(initial=0))

    @property
    def longest_sequence(self) -> int:
        """Tokens. A smaller budget makes no micro-batch smaller than this."""
        planned = [number for rank in self.sequences_RN for sequences in rank for number in sequences]
        return int(np.diff(self.batch.cu_seqlens)[planned].max()) if planned else 0

    @property
    def imbalance(self) -> float:
        """Cost of the dearest micro-batch over the mean: 1 is even."""
        return _max_over_mean(self.cost_RN.ravel())

    @property
    def rank_imbalance(self) -> float:
        """Cost of the dearest rank over the mean: 1 is even."""
        return _max_over_mean(self.cost_RN.sum(axis=1))

    @property
    def load(self) -> TrainLoad:
        """What has to be computed for these sequences, however they are dealt out: each group's shared prompt once, and what
        has the same tokens once."""
        chosen = [sequences for rank in self.sequences_RN for sequences in rank]
        planned_S = np.unique(self.original[np.concatenate([np.zeros(0, np.int64), *chosen])])
        before_S = self.prompt_S[planned_S]
        group_S = np.searchsorted(self.batch.group_offsets, planned_S, side="right") - 1
        prompt_F = before_S[np.unique(group_S, return_index=True)[1]]
        own_S = np.diff(self.batch.cu_seqlens)[planned_S] - before_S
        load = TrainLoad.of_families(own_S, before_S, prompt_F, int(np.count_nonzero(self.batch.loss_mask)))
        return replace(load, sampled_tokens=int(np.diff(self.batch.cu_seqlens)[self.original != LEFT_OUT].sum()))

    def in_turn(self, ranks: int) -> MicroBatchPlan:
        """The same micro-batches for fewer ranks: each takes those of as many neighbours, a round after the other."""

        def merged(values_RN: np.ndarray) -> np.ndarray:
            planned, rounds = values_RN.shape
            return values_RN.reshape(ranks, planned // ranks, rounds).swapaxes(1, 2).reshape(ranks, -1)

        order_RN = merged(np.arange(self.cost_RN.size).reshape(self.cost_RN.shape))
        every = [sequences for rank in self.sequences_RN for sequences in rank]
        sequences_RN = tuple(tuple(every[index] for index in row) for row in order_RN)
        return replace(self, sequences_RN=sequences_RN, cost_RN=merged(self.cost_RN), tokens_RN=merged(self.tokens_RN))

    def of_rank(self, rank: int) -> Iterator[MicroBatch]:
        """Its micro-batches, each laid out when it is asked for."""
        for sequences in self.sequences_RN[rank]:
            yield lay_out(self, sequences) if len(sequences) else idle_micro_batch()


def micro_batches(batch: TrainBatch, max_tokens: int) -> Iterator[MicroBatch]:
    """Those of one process on its own."""
    return plan_micro_batches(batch, max_tokens).of_rank(0)


def plan_micro_batches(
    batch: TrainBatch, max_tokens: int, num_ranks: int = 1, cost: CostModel | None = None, max_sequence: int | None = None
) -> MicroBatchPlan:
    """The same number of micro-batches for every rank, each of at most `max_tokens`, as even in cost as they go.

    A sequence longer than the budget goes alone, unless it is longer than `max_sequence`: what the network or the device can
    take at all.
    """
    cost = cost or CostModel()
    families = find_families(batch, cost)
    original = families.original
    prompt_S = np.zeros(batch.num_sequences, dtype=np.int64)
    prompt_S[families.number_S] = families.prompt_S
    prompt_S = np.where(original == LEFT_OUT, 0, prompt_S[original])
    _refuse_too_long(batch, families.number_S, max_sequence)
    if not len(families.number_S):
        nothing = np.zeros((num_ranks, 0))
        return MicroBatchPlan(batch, original, prompt_S, ((),) * num_ranks, nothing, nothing.astype(np.int64))
    bins = fill_bins(families, max_tokens, num_ranks, cost)
    sequences_X = _with_copies(families, bins)
    bins_RN = deal(bins.cost_X, num_ranks)
    sequences_RN = tuple(tuple(sequences_X[number] for number in rank) for rank in bins_RN)
    return MicroBatchPlan(batch, original, prompt_S, sequences_RN, bins.cost_X[bins_RN], bins.tokens_X[bins_RN])


def _with_copies(families: Families, bins: Bins) -> list[np.ndarray]:
    """Bin → its sequences in the batch, int64, rising: a copy goes where its original is."""
    bin_of = np.zeros(len(families.original), dtype=np.int64)
    bin_of[families.number_S] = bins.bin_S
    numbers = np.flatnonzero(families.original != LEFT_OUT)
    bin_of_each = bin_of[families.original[numbers]]
    ends_X = np.cumsum(np.bincount(bin_of_each, minlength=len(bins.cost_X)))
    return np.split(numbers[np.argsort(bin_of_each, kind="stable")], ends_X[:-1])


def lay_out(plan: MicroBatchPlan, sequences_S: np.ndarray) -> MicroBatch:
    """Return these sequences of the batch, in rising order, laid out. Attempts of one group have the first `prompt_S` of their
    tokens once; one that has no other of its group here is a single segment. A copy is laid out as its original alone, which
    has to be among the sequences."""
    batch, is_laid_S = plan.batch, plan.original[sequences_S] == sequences_S
    laid_L = sequences_S[is_laid_S]
    layout = _Layout.of(batch, laid_L, plan.prompt_S[laid_L])
    laid_S = np.searchsorted(laid_L, plan.original[sequences_S])
    starts_S = batch.cu_seqlens[sequences_S] + layout.prompt_L[laid_S]
    lengths_S = batch.cu_seqlens[sequences_S + 1] - starts_S
    before_S = np.cumsum(lengths_S) - lengths_S
    sequence_O = np.repeat(np.arange(len(sequences_S)), lengths_S)  # O: own tokens of all sequences, after what they share
    place_O = np.arange(len(sequence_O)) - before_S[sequence_O]
    trained_M = np.flatnonzero(batch.loss_mask[starts_S[sequence_O] + place_O])
    local_sequence_M, place_M = sequence_O[trained_M], place_O[trained_M]
    index_M, laid_M = starts_S[local_sequence_M] + place_M, laid_S[local_sequence_M]
    return MicroBatch(
        tokens=Taken(batch.tokens, layout.index_T),
        segments=layout.segments,
        predicted_from_M=np.where(place_M == 0, layout.prompt_end_L[laid_M], layout.own_L[laid_M] + place_M - 1),
        targets=Taken(batch.tokens, index_M),
        old_logprobs=Taken(batch.old_logprobs, index_M),
        index_M=index_M,
        sequence_M=sequences_S[local_sequence_M],
        local_sequence_M=local_sequence_M,
        routing=None if batch.routing is None else Taken(records(batch.routing, batch.routing_width), layout.index_T),
    )


@dataclass(slots=True, frozen=True)
class _Layout:
    """L sequences laid end to end, each prompt that they share before the first of its group."""

    segments: Segments
    index_T: np.ndarray
    """int64: where each packed token is in the batch."""
    prompt_L: np.ndarray
    """int64: leading tokens of each sequence that stand in a segment of their own."""
    own_L: np.ndarray
    """int64: the packed index of the first token after those."""
    prompt_end_L: np.ndarray
    """int64: the packed index of the last one of those."""

    @classmethod
    def of(cls, batch: TrainBatch, sequences_L: np.ndarray, prompt_L: np.ndarray) -> _Layout:
        group_L = np.searchsorted(batch.group_offsets, sequences_L, side="right") - 1
        continues_L = np.concatenate([[False], (group_L[1:] == group_L[:-1]) & (prompt_L[1:] > 0)])
        shares_L = continues_L | np.append(continues_L[1:], False)
        prompt_L = np.where(shares_L, prompt_L, 0)
        first_L = shares_L & ~continues_L

        starts_L, ends_L = batch.cu_seqlens[sequences_L], batch.cu_seqlens[sequences_L + 1]
        own_L = np.arange(len(sequences_L)) + np.cumsum(first_L)  # the segment of each sequence: prompts stand in between
        prompts = own_L[first_L] - 1
        num_segments = len(own_L) + len(prompts)
        starts, lengths, parents = (np.full(num_segments, NO_PARENT, dtype=np.int64) for _ in range(3))
        starts[own_L], lengths[own_L] = starts_L + prompt_L, ends_L - starts_L - prompt_L
        starts[prompts], lengths[prompts] = starts_L[first_L], prompt_L[first_L]
        parents[own_L[shares_L]] = prompts[np.cumsum(first_L)[shares_L] - 1]
        segments = Segments(np.concatenate([[0], np.cumsum(lengths)]), parents)
        index_T = np.repeat(starts - segments.offsets[:-1], lengths) + np.arange(segments.offsets[-1])
        prompt_end_L = segments.offsets[parents[own_L] + 1] - 1
        return cls(segments, index_T, prompt_L, segments.offsets[own_L], prompt_end_L)


def idle_micro_batch() -> MicroBatch:
    """One token, not trained on: a rank without work still takes part in what the ranks compute together."""
    nothing_M = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        tokens=np.zeros(1, dtype=np.int32),
        segments=Segments.independent([1]),
        predicted_from_M=nothing_M,
        targets=np.zeros(0, dtype=np.int32),
        old_logprobs=np.zeros(0, dtype=np.float32),
        index_M=nothing_M,
        sequence_M=nothing_M,
        local_sequence_M=nothing_M,
    )


def _refuse_too_long(batch: TrainBatch, numbers_S: np.ndarray, max_sequence: int | None) -> None:
    longest = int(np.diff(batch.cu_seqlens)[numbers_S].max(initial=0))
    if max_sequence is not None and longest > max_sequence:
        raise TrainingError(
            f"a sequence of {longest:,} tokens cannot be trained on: {max_sequence:,} is the most that fits",
            "lower rollouts.max_new_tokens, or shorten the prompts",
        )


def _max_over_mean(cost: np.ndarray) -> float:
    return float(cost.max() / cost.mean()) if cost.any() else 1.0
