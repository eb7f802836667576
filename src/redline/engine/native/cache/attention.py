"""Attention over the paged cache with torch's own operations: the path of the CPU, and the oracle of the others.

Sequences of similar length are gathered into rectangles and handed to torch's fused attention. The index work is done once per
forward pass and shared by all layers.

Letters: B sequences of a rectangle, Q query columns, N block columns, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.engine.native.cache.kv_cache import KVCache
from redline.models.attention.limits import NO_LIMITS, Limits, capped_attention, hidden_by_window

MAX_PADDING = 1.25
"""A rectangle may hold at most this many times the blocks its sequences need."""


@dataclass(slots=True, frozen=True)
class Runs:
    """Consecutive new tokens of S sequences, laid end to end in the packed batch."""

    starts_S: np.ndarray
    """int64: position of each run's first token; what lies before it is in the cache."""
    lengths_S: np.ndarray
    tables_SN: np.ndarray
    """int: the blocks of each sequence; beyond what it needs, any valid block."""

    @property
    def ends(self) -> np.ndarray:
        """int64[S]: tokens each sequence has once these are in."""
        return self.starts_S + self.lengths_S

    @property
    def offsets(self) -> np.ndarray:
        """int64[S + 1]: where each run begins in the packed batch."""
        return np.concatenate([[0], np.cumsum(self.lengths_S)])

    def positions(self) -> np.ndarray:
        """int64[T]."""
        return np.arange(self.lengths_S.sum()) - np.repeat(self.offsets[:-1] - self.starts_S, self.lengths_S)

    def slots(self, block_size: int) -> np.ndarray:
        """int64[T]: where in the cache each token goes."""
        positions, sequences = self.positions(), np.repeat(np.arange(len(self.starts_S)), self.lengths_S)
        return self.tables_SN[sequences, positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(slots=True, frozen=True)
class _Rectangle:
    queries_BQ: Tensor | None
    """Packed token of each query; None where the rectangle is the whole batch, in order."""
    tokens: Tensor
    """Packed tokens, in the order of `cells`."""
    cells: Tensor
    """Their places in the flattened [B, Q]."""
    blocks_BN: Tensor
    bias: Tensor
    """0 where a query sees a key, -inf elsewhere: [B, 1, Q or 1, keys]."""
    num_queries: int
    biases: dict[int, Tensor] = field(default_factory=dict)
    """The same by window, each made for the first layer that asks."""

    def bias_within(self, window: int | None) -> Tensor:
        """`bias` where a window hides what is too far back, too."""
        if window is None:
            return self.bias
        if window not in self.biases:
            hidden = hidden_by_window(self.bias.isinf(), window)
            self.biases[window] = torch.zeros_like(self.bias).masked_fill_(hidden, float("-inf"))
        return self.biases[window]


class GatherAttention:
    """An `Attend` for runs of new tokens; it stores their keys and values before it reads any."""

    def __init__(self, cache: KVCache, runs: Runs, dtype: torch.dtype) -> None:
        device, size = cache.blocks.device, cache.block_size
        self._cache = cache
        self.positions_T = torch.from_numpy(runs.positions()).to(device)
        self.slots_T = torch.from_numpy(runs.slots(size)).to(device)
        self._rectangles = [_rectangle(runs, members, size, device, dtype) for members in _groups(runs, size)]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        self._cache.write(layer, self.slots_T, k_TKD, v_TKD)
        if len(self._rectangles) == 1 and self._rectangles[0].queries_BQ is None:
            return self._attend(layer, self._rectangles[0], q_THD, limits)
        out_THD = torch.empty_like(q_THD)
        for rectangle in self._rectangles:
            assert rectangle.queries_BQ is not None
            rows = self._attend(layer, rectangle, q_THD.index_select(0, rectangle.queries_BQ.flatten()), limits)
            out_THD.index_copy_(0, rectangle.tokens, rows.index_select(0, rectangle.cells))
        return out_THD

    def _attend(self, layer: int, rectangle: _Rectangle, q_RHD: Tensor, limits: Limits) -> Tensor:
        """[B · Q, H, D] → the same."""
        keys, values = self._cache.gather(layer, rectangle.blocks_BN)
        (_, H, D), K, B, Q = q_RHD.shape, keys.shape[1], len(rectangle.blocks_BN), rectangle.num_queries
        # The H/K query heads of a key head are queries of one product, so keys are read once and never repeated.
        q = q_RHD.view(B, Q, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * Q, D)
        bias = rectangle.bias_within(limits.window)
        bias = bias.expand(B, H // K, Q, -1).reshape(B, 1, H // K * Q, -1) if Q > 1 else bias
        if limits.softcap is None:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        else:
            out = capped_attention(q, keys, values, bias, limits.softcap)
        return out.view(B, K, H // K, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, H, D)


def _groups(runs: Runs, block_size: int) -> Iterator[np.ndarray]:
    """Partition the runs so that no rectangle wastes more than `MAX_PADDING` allows. Most keys first."""
    blocks, lengths = -(-runs.ends // block_size), runs.lengths_S
    if len(blocks) * blocks.max() <= MAX_PADDING * blocks.sum() and lengths.max() == 1:
        yield np.arange(len(blocks))
        return
    group: list[int] = []
    needed = 0
    for index in np.lexsort((-lengths, -blocks)).tolist():
        if group:
            first = group[0]
            similar = max(lengths[first], lengths[index]) <= 2 * min(lengths[first], lengths[index])
            if not similar or (len(group) + 1) * blocks[first] > MAX_PADDING * (needed + blocks[index]):
                yield np.array(group)
                group, needed = [], 0
        group.append(index)
        needed += blocks[index]
    yield np.array(group)


def _rectangle(runs: Runs, members: np.ndarray, block_size: int, device: torch.device, dtype: torch.dtype) -> _Rectangle:
    lengths, starts, offsets = runs.lengths_S[members], runs.starts_S[members], runs.offsets[members]
    blocks_B = -(-runs.ends[members] // block_size)
    Q, N = int(lengths.max()), int(blocks_B.max())
    tables_BN = runs.tables_SN[members, :N].astype(np.int64)
    # What fills a table up is read too, if only to be masked: its own first block cannot bring in another sequence's NaN.
    tables_BN = np.where(np.arange(N) < blocks_B[:, None], tables_BN, tables_BN[:, :1])
    real_BQ = np.arange(Q) < lengths[:, None]
    column_BQ = np.where(real_BQ, np.arange(Q), 0)
    queries_BQ = offsets[:, None] + column_BQ
    # A padded query sees what the run's first one sees: a row of -inf alone would be NaN.
    hidden = np.arange(N * block_size) > (starts[:, None] + column_BQ)[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
    is_whole_batch = Q == 1 and len(members) == len(runs.lengths_S)
    return _Rectangle(
        queries_BQ=None if is_whole_batch else torch.from_numpy(queries_BQ).to(device),
        tokens=torch.from_numpy(queries_BQ[real_BQ]).to(device),
        cells=torch.from_numpy(np.flatnonzero(real_BQ)).to(device),
        blocks_BN=torch.from_numpy(tables_BN).to(device),
        bias=bias[:, None].to(device),
        num_queries=Q,
    )
