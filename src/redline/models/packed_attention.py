"""Causal attention over packed segments, where a segment may continue another one.

A group of attempts shares its prompt. Packed as a segment of its own, the prompt goes through the network once, and each
attempt attends to it and to itself:

    packed tokens   [ prompt A ][ A1 ][ A2 ][ A3 ][ prompt B ][ B1 ][ B2 ]
    parent            none        0     0     0     none        4     4

Queries and keys are gathered into a few rectangular blocks of segments of similar size; only attention sees the rectangle,
the network's products never see a padded token. The index work is done once per batch and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NO_PARENT = -1
MAX_PADDING = 1.25
"""A block may hold at most this many times the key positions that its segments need."""


@dataclass(slots=True, frozen=True)
class Segments:
    """Token runs laid end to end."""

    offsets: np.ndarray
    """int64[segments + 1]."""
    parents: np.ndarray
    """int64[segments]: the segment this one continues, which must itself have no parent, or `NO_PARENT`."""

    @classmethod
    def independent(cls, lengths: Sequence[int]) -> Segments:
        """Sequences that share nothing."""
        return cls(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), np.full(len(lengths), NO_PARENT, dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def parent_lengths(self) -> np.ndarray:
        """Tokens before each segment's first one; its positions start here."""
        return np.where(self.parents == NO_PARENT, 0, self.lengths[self.parents])

    def positions(self) -> np.ndarray:
        """int64[T]."""
        starts = np.repeat(self.offsets[:-1] - self.parent_lengths, self.lengths)
        return np.arange(self.offsets[-1], dtype=np.int64) - starts


@dataclass(slots=True, frozen=True)
class _Block:
    """Segments of similar size as one rectangle: B of them, Q query columns, N key columns."""

    queries_BQ: Tensor
    """Packed index of each query; short rows are filled with their first token, whose extra outputs nobody reads."""
    keys_BN: Tensor
    """Packed index of each key: the parent's tokens, then the segment's own."""
    hidden_BQN: Tensor
    """True where a query must not see a key."""


class PackedAttention:
    """An `Attend` for one packed batch."""

    def __init__(self, segments: Segments, device: torch.device | str = "cpu") -> None:
        self.blocks: list[_Block] = []
        row_of_token = np.empty(segments.offsets[-1], dtype=np.int64)
        rows = 0
        for members in _blocks_of_similar_size(segments):
            queries, keys, hidden = _rectangle(segments, members)
            real = np.arange(queries.shape[1]) < segments.lengths[members][:, None]
            row_of_token[queries[real]] = rows + np.flatnonzero(real)
            rows += queries.size
            self.blocks.append(_Block(*(torch.from_numpy(array).to(device) for array in (queries, keys, hidden))))
        self._row_of_token = torch.from_numpy(row_of_token).to(device)
        self.positions_T = torch.from_numpy(segments.positions()).to(device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        outputs = [_attend_block(block, q_THD, k_TKD, v_TKD) for block in self.blocks]
        return torch.cat(outputs).index_select(0, self._row_of_token)


def _blocks_of_similar_size(segments: Segments) -> list[list[int]]:
    """Partition the segments so that no block wastes more than `MAX_PADDING` allows. Longest keys first."""
    own, all_keys = segments.lengths, segments.lengths + segments.parent_lengths
    blocks: list[list[int]] = []
    needed = 0
    for index in sorted(range(len(own)), key=lambda s: (-all_keys[s], -own[s])):
        if own[index] == 0:
            continue
        if blocks:
            first = blocks[-1][0]
            rectangle = (len(blocks[-1]) + 1) * all_keys[first]
            similar_queries = own[index] * 2 >= own[first] and own[index] <= own[first] * 2
            if similar_queries and rectangle <= MAX_PADDING * (needed + all_keys[index]):
                blocks[-1].append(index)
                needed += all_keys[index]
                continue
        blocks.append([index])
        needed = all_keys[index]
    return blocks


def _rectangle(segments: Segments, members: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three arrays of a `_Block`."""
    own, before = segments.lengths[members], segments.parent_lengths[members]
    starts = segments.offsets[:-1]
    column_Q, column_N = np.arange(own.max()), np.arange((own + before).max())
    queries = starts[members][:, None] + np.where(column_Q < own[:, None], column_Q, 0)
    in_parent = column_N < before[:, None]
    own_column = np.clip(column_N - before[:, None], 0, own[:, None] - 1)
    keys = np.where(in_parent, starts[segments.parents[members]][:, None] + column_N, starts[members][:, None] + own_column)
    hidden = column_N > (before[:, None] + column_Q)[:, :, None]
    return queries, keys, hidden


def _attend_block(block: _Block, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """One block's outputs as rows [B · Q, H, D]."""
    (B, Q), (_, N) = block.queries_BQ.shape, block.keys_BN.shape
    (_, H, D), K = q_THD.shape, k_TKD.shape[1]
    q = q_THD.index_select(0, block.queries_BQ.flatten()).view(B, Q, K, H // K, D).permute(0, 2, 3, 1, 4)
    k, v = (t.index_select(0, block.keys_BN.flatten()).view(B, N, K, D).transpose(1, 2) for t in (k_TKD, v_TKD))
    # The H/K query heads of a key head become rows of one product, so keys are never repeated.
    mask = block.hidden_BQN[:, None, None].expand(B, 1, H // K, Q, N).reshape(B, 1, H // K * Q, N)
    out = _softmax_attention(q.reshape(B, K, H // K * Q, D), k, v, mask)
    return out.view(B, K, H // K, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, H, D)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Softmax attention with scores in float32.

    On the CPU the products are written out: the backward pass of torch's fused kernel takes five times as long at the few
    hundred keys that a CPU run has (benchmarks/LOG.md), and float32 costs little there.
    """
    if q.device.type == "cpu":
        scores = torch.matmul(q.float() * q.shape[-1] ** -0.5, k.float().transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1), v.float()).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
