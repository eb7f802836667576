"""Packed segments attended to with torch's operations: gathered into a few rectangular blocks of segments of similar size.

Only attention sees the rectangles, the network's products never see a padded token. The index work is done once per batch and
shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention.limits import Limits, capped_attention, hidden_by_window

MAX_PADDING = 1.25
"""A block may hold at most this many times the key positions that its segments need."""
MAX_SCORES = 2**23
"""Scores of one block that may be held for the backward pass, in every layer: 32 MiB each."""


@dataclass(slots=True)
class _Block:
    """Segments of similar size as one rectangle: B of them, Q query columns, N key columns."""

    shape: tuple[int, int, int]
    """B, Q, N."""
    queries: slice
    """Its rows among the gathered queries of all blocks, B · Q of them."""
    keys: slice
    """Its rows among the gathered keys of all blocks, B · N of them."""
    hidden_BQN: Tensor
    """True where a query must not see a key."""
    masks: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)
    """By window, and whether it is added to written-out scores: the same in the form that attention takes, made for the first
    layer that asks."""


@dataclass(slots=True, frozen=True)
class _Uses:
    """Where each packed token went in a gather. Padding is left out: its gradient is zero."""

    once_T: Tensor
    """The row that every token has: its own."""
    shared: list[tuple[Tensor, Tensor]]
    """Tokens [N] of parents with C children, and their rows [N, C] there; one pair for each C."""


class PaddedAttention:
    """Attention of one packed batch, in rectangles."""

    def __init__(self, segments: Segments, device: torch.device | str) -> None:
        self._blocks: list[_Block] = []
        queries, keys = [], []
        layout = _Layout(segments)
        for members in _blocks_of_similar_size(segments):
            queries_BQ, keys_BN, hidden_BQN = _rectangle(segments, members)
            block = layout.add(members, queries_BQ, keys_BN)
            self._blocks.append(_Block(*block, torch.from_numpy(hidden_BQN).to(device)))
            queries.append(queries_BQ.flatten())
            keys.append(keys_BN.flatten())
        self._queries_R = torch.from_numpy(np.concatenate(queries)).to(device)
        self._keys_C = torch.from_numpy(np.concatenate(keys)).to(device)
        self._query_uses, self._key_uses = layout.uses(device)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits) -> Tensor:
        q = _Gather.apply(q_THD, self._queries_R, self._query_uses)
        k = _Gather.apply(k_TKD, self._keys_C, self._key_uses)
        v = _Gather.apply(v_TKD, self._keys_C, self._key_uses)
        outputs = [_attend_block(block, q[block.queries], k[block.keys], v[block.keys], limits) for block in self._blocks]
        return _Ungather.apply(torch.cat(outputs), self._query_uses.once_T)


class _Gather(torch.autograd.Function):
    """Rows of `x` by index. The backward pass gathers too, which is parallel and has a fixed order of sums; torch's own
    would scatter, row by row (benchmarks/LOG.md)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, uses: _Uses) -> Tensor:
        ctx.uses = uses
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_rows,) = grads
        grad = grad_rows.index_select(0, ctx.uses.once_T)
        for tokens_N, rows_NC in ctx.uses.shared:
            children = grad_rows.index_select(0, rows_NC.flatten()).view(*rows_NC.shape, *grad_rows.shape[1:])
            grad[tokens_N] += children.sum(dim=1)
        return grad, None, None


class _Ungather(torch.autograd.Function):
    """Each token's own row out of the padded ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_token)
        ctx.num_rows = len(rows)
        return rows.index_select(0, row_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        (row_of_token,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, row_of_token, grad), None


class _Layout:
    """Collects, block by block, which rows of the gathers belong to which token."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._query_row = np.empty(segments.offsets[-1], dtype=np.int64)
        self._key_row = np.empty(segments.offsets[-1], dtype=np.int64)
        self._children: dict[int, list[int]] = {}
        """Parent segment → the first key row of each child."""
        self._num_queries = self._num_keys = 0

    def add(self, members: list[int], queries_BQ: np.ndarray, keys_BN: np.ndarray) -> tuple[tuple[int, int, int], slice, slice]:
        """Note one block; its shape and its rows."""
        (B, Q), N = queries_BQ.shape, keys_BN.shape[1]
        for b, member in enumerate(members):
            start, end = self._segments.offsets[member], self._segments.offsets[member + 1]
            parent, before = self._segments.parents[member], self._segments.parent_lengths[member]
            self._query_row[start:end] = self._num_queries + b * Q + np.arange(end - start)
            self._key_row[start:end] = self._num_keys + b * N + before + np.arange(end - start)
            if parent != NO_PARENT:
                self._children.setdefault(parent, []).append(self._num_keys + b * N)
        queries = slice(self._num_queries, self._num_queries + B * Q)
        keys = slice(self._num_keys, self._num_keys + B * N)
        self._num_queries, self._num_keys = queries.stop, keys.stop
        return (B, Q, N), queries, keys

    def uses(self, device: torch.device | str) -> tuple[_Uses, _Uses]:
        """How the queries are used, and how the keys and values are."""
        by_count: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for parent, first_rows in self._children.items():
            column = np.arange(self._segments.lengths[parent])
            tokens = self._segments.offsets[parent] + column
            by_count.setdefault(len(first_rows), []).append((tokens, np.array(first_rows) + column[:, None]))
        shared = [
            (
                torch.from_numpy(np.concatenate([t for t, _ in pairs])).to(device),
                torch.from_numpy(np.concatenate([r for _, r in pairs])).to(device),
            )
            for pairs in by_count.values()
        ]
        query_row, key_row = (torch.from_numpy(rows).to(device) for rows in (self._query_row, self._key_row))
        return _Uses(query_row, []), _Uses(key_row, shared)


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


def _attend_block(block: _Block, q_RHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, limits: Limits) -> Tensor:
    """One block's outputs as rows [B · Q, H, D]."""
    (B, Q, N), (_, H, D), K = block.shape, q_RHD.shape, k_CKD.shape[1]
    # The H/K query heads of a key head become rows of one product, so keys are never repeated.
    q = q_RHD.view(B, Q, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, H // K * Q, D)
    k, v = (rows.view(B, N, K, D).transpose(1, 2) for rows in (k_CKD, v_CKD))
    written_out = limits.softcap is not None or (q.device.type == "cpu" and writes_out(H * B * Q * N))
    mask = _mask(block, K, H // K, limits.window, written_out=written_out)
    if limits.softcap is not None:
        q_XQD, k_XND, v_XND = (heads.flatten(0, 1) for heads in (q, k, v))
        out = capped_attention(q_XQD, k_XND, v_XND, mask, limits.softcap)
    else:
        out = _written_out(q, k, v, mask) if written_out else F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.view(B, K, H // K, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, H, D)


def _mask(block: _Block, kv_heads: int, group: int, window: int | None, *, written_out: bool) -> Tensor:
    """Where scores are written out, what is added to them, [B · K, H / K · Q, N]; else True where a query sees a key."""
    if (window, written_out) not in block.masks:
        B, Q, N = block.shape
        hidden_BQN = block.hidden_BQN if window is None else hidden_by_window(block.hidden_BQN, window)
        hidden = hidden_BQN[:, None, None].expand(B, kv_heads if written_out else 1, group, Q, N).flatten(2, 3)
        added = torch.zeros(hidden.shape, device=hidden.device) if written_out else None
        mask = ~hidden if added is None else added.masked_fill_(hidden, float("-inf")).flatten(0, 1)
        block.masks[window, written_out] = mask
    return block.masks[window, written_out]


def writes_out(num_scores: int) -> bool:
    """Whether a CPU holds the scores of a block, so many over all its heads, and multiplies them."""
    return has_batched_products() and num_scores <= MAX_SCORES


@cache
def has_batched_products() -> bool:
    """Whether torch multiplies many small matrices in one call on this machine's CPU. Without MKL it takes them one by one,
    four times as long as its fused attention where answers are short (benchmarks/LOG.md)."""
    return torch.backends.mkl.is_available()


def _written_out(q_BKQD: Tensor, k_BKND: Tensor, v_BKND: Tensor, bias_XQN: Tensor) -> Tensor:
    """Softmax attention as its two products, in float32. On a CPU with MKL, the backward pass of torch's fused kernel takes
    five times as long at a few hundred keys (benchmarks/LOG.md)."""
    q, k, v = (heads.flatten(0, 1).float() for heads in (q_BKQD, k_BKND, v_BKND))
    scores = torch.baddbmm(bias_XQN, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), v).to(q_BKQD.dtype)
