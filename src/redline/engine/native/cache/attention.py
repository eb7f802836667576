"""Attention over the paged cache with torch's own operations: the path of the CPU, and the oracle of the others.

Sequences of similar length are gathered into rectangles and handed to torch's fused attention. The index work is done once per
forward pass and shared by all layers. A large rectangle, as that of a long prompt, is attended to piece by piece: what is
hidden from whom, a number for each query and key, would take more memory than the rest of the engine.

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
MOST_PAIRS = 1 << 25
"""Queries times keys that are attended to at once: 128 MiB in float32, as often as there are query heads of a key head."""


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
    last_BQ: Tensor
    """int64: the last key that each query sees."""
    num_keys: int
    dtype: torch.dtype
    biases: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, each made for the first layer that asks, where one piece is all."""

    def pieces(self) -> list[slice]:
        """Columns of queries that are attended to at once."""
        B, Q = self.last_BQ.shape
        most = max(1, MOST_PAIRS // (B * self.num_keys))
        return [slice(first, min(first + most, Q)) for first in range(0, Q, most)]

    def bias(self, columns: slice, window: int | None) -> Tensor:
        """0 where a query sees a key, -inf elsewhere: [B, 1, columns, keys]."""
        if window in self.biases:
            return self.biases[window]
        last = self.last_BQ[:, None, columns, None]
        hidden = torch.arange(self.num_keys, device=last.device) > last
        hidden = hidden if window is None else hidden_by_window(hidden, window)
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=last.device).masked_fill_(hidden, float("-inf"))
        if bias.shape[2] == self.last_BQ.shape[1]:
            self.biases[window] = bias
        return bias


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
        (_, H, D), K, (B, Q) = q_RHD.shape, keys.shape[1], rectangle.last_BQ.shape
        q_BQKGD = q_RHD.view(B, Q, K, H // K, D)
        parts = [
            _attend(q_BQKGD[:, columns], keys, values, rectangle.bias(columns, limits.window), limits.softcap)
            for columns in rectangle.pieces()
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(B * Q, H, D)


def _attend(q_BQKGD: Tensor, keys: Tensor, values: Tensor, bias: Tensor, softcap: float | None) -> Tensor:
    """[B, Q, K, G, D]. The G query heads of a key head are queries of one product, so keys are read once and never repeated."""
    B, Q, K, G, D = q_BQKGD.shape
    q = q_BQKGD.permute(0, 2, 3, 1, 4).reshape(B, K, G * Q, D)
    bias = bias.expand(B, G, Q, -1).reshape(B, 1, G * Q, -1) if Q > 1 else bias
    if softcap is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    else:
        out = capped_attention(q, keys, values, bias, softcap)
    return out.view(B, K, G, Q, D).permute(0, 3, 1, 2, 4)


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
    is_whole_batch = Q == 1 and len(members) == len(runs.lengths_S)
    return _Rectangle(
        queries_BQ=None if is_whole_batch else torch.from_numpy(queries_BQ).to(device),
        tokens=torch.from_numpy(queries_BQ[real_BQ]).to(device),
        cells=torch.from_numpy(np.flatnonzero(real_BQ)).to(device),
        blocks_BN=torch.from_numpy(tables_BN).to(device),
        # A padded query sees what the run's first one sees: a row of -inf alone would be NaN.
        last_BQ=torch.from_numpy(starts[:, None] + column_BQ).to(device),
        num_keys=N * block_size,
        dtype=dtype,
    )
