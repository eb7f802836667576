"""The updates of a step: which groups of its batch each of them takes.

    batch     groups  0 1 2 3 4 5 6 7
    epoch 0   5 2 7 │ 0 6 1 │ 3 4        three mini-batches, three updates
    epoch 1   1 4 0 │ 7 3 5 │ 6 2        three more, in another order

A mini-batch is the batch with the loss masks of all other groups cleared: no token is copied, and whatever is known of each
token of the batch holds for the mini-batch too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from redline.types import TrainBatch


@dataclass(slots=True, frozen=True)
class UpdatePlace:
    """Which update of a step."""

    number: int
    """From 0."""
    count: int
    """Updates of the step."""

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    @property
    def name(self) -> str:
        """For messages; empty where the step is its only update."""
        return f", update {self.number + 1} of {self.count}" if self.count > 1 else ""


def divide(batch: TrainBatch, mini_batches: int, epochs: int, key: tuple[int, int]) -> list[np.ndarray]:
    """The groups of each update, int64 each, in the order of the updates.

    The order of groups in an epoch follows from `key`, the run's seed and the version, and the epoch: a resumed run divides
    every batch as it was. A mini-batch without a trained token would make no difference but to AdamW's means, and is left out;
    where nothing at all is trained on, one update remains, of all groups.
    """
    everything = np.arange(batch.num_groups)
    if mini_batches * epochs == 1:
        return [everything]
    orders = [np.random.default_rng((*key, epoch)).permutation(everything) for epoch in range(epochs)]
    trained_G = _trained(batch)
    parts = [part for order in orders for part in np.array_split(order, mini_batches) if trained_G[part].any()]
    return parts or [everything]


def part_of(batch: TrainBatch, groups: np.ndarray) -> TrainBatch:
    """The batch as if it had no other groups than these, with every token where it was."""
    if len(groups) == batch.num_groups:
        return batch
    chosen_G = np.zeros(batch.num_groups, dtype=bool)
    chosen_G[groups] = True
    chosen_T = np.repeat(np.repeat(chosen_G, np.diff(batch.group_offsets)), np.diff(batch.cu_seqlens))
    return replace(
        batch,
        loss_mask=batch.loss_mask & chosen_T,
        group_sequences=np.where(chosen_G, batch.group_sequences, 0),
        group_tokens=np.where(chosen_G, batch.group_tokens, 0),
    )


def _trained(batch: TrainBatch) -> np.ndarray:
    """bool[groups]: the group has a token that is trained on."""
    starts = batch.cu_seqlens[batch.group_offsets]
    trained_before = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    return np.diff(trained_before[starts]) > 0
