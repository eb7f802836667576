"""Attention over packed segments and its gradients, for training on a GPU.

Queries, keys and values are read where the projection wrote them, and their gradients are written as one tensor of its shape.
A segment reads its parent's keys in place. No sum depends on timing: the gradient of a block of queries is one program's, that
of a block of keys one program's or that of a few, added up afterwards.
This module needs triton; only code that runs on a CUDA device may import it.

Letters: M queries and N keys of a tile, G query heads of a key head, X = H + 2 · K heads of the projection, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.attention_plan import key_blocks, part_size, query_blocks
from redline.kernels.launches import ALIGNMENT, launch
from redline.kernels.segments import Segments

_Rotary = tuple[Tensor | None, Tensor | None]


@dataclass(slots=True, frozen=True)
class Tile:
    """How a kernel divides its work."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Per thread, where fewer let another program run on the same multiprocessor."""

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


@dataclass(slots=True, frozen=True)
class Tiles:
    """The tiles of one head size, chosen by measurement (benchmarks/LOG.md)."""

    forward: Tile
    of_queries: Tile
    of_keys: Tile
    key_programs: int
    """Programs of the keys' gradients that fit on a multiprocessor."""


TILES = {
    64: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3, 168), 3),
    128: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), 2),
}
COLUMNS = 16
"""Columns of what a key needs to know about a query: the least that a product of matrices takes."""
SUM_ROWS = 16


class AttentionKernels:
    """A `ManualAttend` for one packed batch, whose children must follow their parents (`attention_plan.children_follow`)."""

    def __init__(self, segments: Segments, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._segments, self._device = segments, device
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._tiles = tiles = TILES[head_dim]
        lists = {size: query_blocks(segments, size) for size in {tiles.forward.queries, tiles.of_queries.queries}}
        self._query_blocks = dict(zip(lists, _upload(list(lists.values()), device), strict=True))

    @cached_property
    def _key_blocks(self) -> tuple[Tensor, Tensor, int]:
        """Parts, sums and slots. Made when the backward pass begins, while the device still has the forward pass to do."""
        num_heads, num_kv_heads, _ = self._shape
        on_cuda = self._device.type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count if on_cuda else 1
        tile, places = self._tiles.of_keys, multiprocessors * self._tiles.key_programs
        most_units = partial(part_size, copies=num_kv_heads, places=places)
        blocks = key_blocks(self._segments, tile.keys, tile.queries, num_heads // num_kv_heads, most_units)
        parts, sums = _upload([blocks.parts, blocks.sums], self._device)
        return parts, sums, blocks.num_slots

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """The output [T, H, D] and the logarithm of every query's sum, float32[H, T]."""
        T, H, D = q_THD.shape
        out_THD = q_THD.new_empty(T, H, D)
        logsumexp_HT = torch.empty(H, T, dtype=torch.float32, device=q_THD.device)
        tile = self._tiles.forward
        blocks = self._query_blocks[tile.queries]
        if T:
            tensors = (q_THD, k_TKD, v_TKD, out_THD, logsumexp_HT, blocks)
            constants = (*_strides(q_THD, k_TKD, v_TKD), *self._shape, tile.queries, tile.keys)
            launch(_forward, (len(blocks) * H,), tensors, (T,), constants, **tile.options)
        return out_THD, (logsumexp_HT,)

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        kept: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Gradients of queries, keys and values side by side, [T, X, D]; with cosines and sines [T, 1, D / 2], of what they
        were before queries and keys were rotated."""
        (logsumexp_HT,) = kept
        (T, H, D), K = q_THD.shape, k_TKD.shape[1]
        assert all(tensor.is_contiguous() for tensor in (grad_THD, out_THD, *(rotary or ())))
        grad_TXD = q_THD.new_empty(T, H + 2 * K, D)
        if T:
            inputs = (q_THD, k_TKD, v_TKD, grad_THD)
            rows_HTC = self._queries_backward(inputs, out_THD, logsumexp_HT, rotary or (None, None), grad_TXD)
            self._keys_backward(inputs, rows_HTC, rotary or (None, None), grad_TXD)
        return grad_TXD

    def _queries_backward(
        self, inputs: tuple[Tensor, ...], out_THD: Tensor, logsumexp_HT: Tensor, rotary: _Rotary, grad_TXD: Tensor
    ) -> Tensor:
        """What the keys need to know of every query, [H, T, COLUMNS]."""
        H, T = logsumexp_HT.shape
        rows_HTC = out_THD.new_empty(H, T, COLUMNS)
        tile = self._tiles.of_queries
        blocks = self._query_blocks[tile.queries]
        tensors = (*inputs, out_THD, logsumexp_HT, rows_HTC, *rotary, grad_TXD, blocks)
        constants = (*_strides(*inputs[:3]), *self._shape, tile.queries, tile.keys, COLUMNS)
        launch(_queries_backward, (len(blocks) * H,), tensors, (T,), constants, **tile.options)
        return rows_HTC

    def _keys_backward(self, inputs: tuple[Tensor, ...], rows_HTC: Tensor, rotary: _Rotary, grad_TXD: Tensor) -> None:
        tile = self._tiles.of_keys
        T, K, D = inputs[1].shape
        parts, sums, num_slots = self._key_blocks
        partial_sums = torch.empty(num_slots, K, 2, tile.keys, D, dtype=torch.float32, device=grad_TXD.device)
        tensors = (*inputs, rows_HTC, *rotary, grad_TXD, partial_sums, parts)
        constants = (*_strides(*inputs[:3]), *self._shape, tile.queries, tile.keys, COLUMNS)
        launch(_keys_backward, (len(parts) * K,), tensors, (T,), constants, **tile.options)
        if len(sums):
            grid = (len(sums), tile.keys // SUM_ROWS, 2 * K)
            constants = (*self._shape, tile.keys, SUM_ROWS)
            launch(_sum_parts, grid, (partial_sums, *rotary, grad_TXD, sums), (), constants, num_warps=4)


def _strides(*heads: Tensor) -> tuple[int, ...]:
    """Elements from one token to the next."""
    assert all(part.stride(2) == 1 and part.stride(1) == part.shape[2] for part in heads)
    return tuple(part.stride(0) for part in heads)


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """In one copy. Each begins at a multiple of `ALIGNMENT`."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT // array.itemsize for array in arrays]
    flat = np.zeros(sum(sizes), dtype=np.int32)
    for part, array in zip(np.split(flat, np.cumsum(sizes)[:-1]), arrays, strict=True):
        part[: array.size] = array.ravel()
    uploaded = torch.from_numpy(flat)
    if device.type == "cuda":
        uploaded = uploaded.pin_memory().to(device, non_blocking=True)
    parts = uploaded.split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


# ── the kernels ────────────────────────────────────────────────────────────────────────────────────────────────────────

LOG2_E = tl.constexpr(math.log2(math.e))
"""Exponentials are powers of two, one instruction each."""


@triton.jit
def _key_rows(j_N, parent, before, own):  # type: ignore[no-untyped-def]
    """The packed tokens of a segment's keys by their position: the parent's, then its own."""
    return tl.where(j_N < before, parent + j_N, own + j_N)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_MD, k, v, peak_M, total_M, sum_MD, seen_M, start, stop, parent, before, own,
    MASKED: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Continue a running softmax over the keys start … stop - 1. Scores are in units of log 2."""
    SCALE: tl.constexpr = D**-0.5 * LOG2_E
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    for first in range(start, stop, N):
        j_N = first + n
        if MASKED:
            row_N = _key_rows(tl.minimum(j_N, stop - 1), parent, before, own)
        else:
            row_N = _key_rows(j_N, parent, before, own)
        k_ND = tl.load(k + row_N[:, None] * KX + d[None, :])
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if MASKED:
            score_MN = tl.where(j_N[None, :] <= seen_M[:, None], score_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, axis=1) * SCALE)
        fade_M = tl.exp2(peak_M - new_peak_M)
        weight_MN = tl.exp2(score_MN * SCALE - new_peak_M[:, None])
        v_ND = tl.load(v + row_N[:, None] * VX + d[None, :])
        total_M = total_M * fade_M + tl.sum(weight_MN, axis=1)
        sum_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, sum_MD * fade_M[:, None], input_precision="ieee")
        peak_M = new_peak_M
    return peak_M, total_M, sum_MD


@triton.jit(do_not_specialize=["T"])
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, logsumexp, blocks, T,
    QX: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One block of queries, one head."""
    block, head = blocks + tl.program_id(0) // H * 5, tl.program_id(0) % H
    first, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    parent, before = tl.load(block + 3), tl.load(block + 4)
    own = begin - before
    token_M = first + tl.arange(0, M)
    d = tl.arange(0, D)
    q_MD = tl.load(q + tl.minimum(token_M, end - 1)[:, None] * QX + head * D + d[None, :])
    k += head // (H // K) * D
    v += head // (H // K) * D
    seen_M = token_M - own
    # Key 0 is seen by all, so that a row's peak is finite from the first tile on.
    full = (first - own + 1) // N * N
    stop = tl.minimum(first + M, end) - own
    peak_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sum_MD = tl.zeros([M, D], tl.float32)
    peak_M, total_M, sum_MD = _attend(
        q_MD, k, v, peak_M, total_M, sum_MD, seen_M, 0, full, parent, before, own, False, KX, VX, D, N
    )
    peak_M, total_M, sum_MD = _attend(
        q_MD, k, v, peak_M, total_M, sum_MD, seen_M, full, stop, parent, before, own, True, KX, VX, D, N
    )
    inside_M = token_M < end
    tl.store(logsumexp + head * T + token_M, (peak_M + tl.log2(total_M)) / LOG2_E, mask=inside_M)
    out_MD = (sum_MD / total_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + token_M[:, None] * (H * D) + head * D + d[None, :], out_MD, mask=inside_M[:, None])


@triton.jit
def _store_gradient(  # type: ignore[no-untyped-def]
    grad, grad_MD, token_M, end, head, cos, sin, X: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):
    """What reaches one head of some tokens, rotated back if it had been rotated."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = grad.dtype.element_ty
    inside = (token_M < end)[:, None]
    if cos is None:
        d = tl.arange(0, D)
        tl.store(grad + token_M[:, None] * (X * D) + head * D + d[None, :], grad_MD.to(dtype), mask=inside)
    else:
        d = tl.arange(0, HALF)
        first_MD, second_MD = tl.split(tl.permute(tl.reshape(grad_MD, [M, 2, HALF]), (0, 2, 1)))
        at_MD = token_M[:, None] * HALF + d[None, :]
        cos_MD = tl.load(cos + at_MD, mask=inside, other=0.0).to(tl.float32)
        sin_MD = tl.load(sin + at_MD, mask=inside, other=0.0).to(tl.float32)
        at = grad + token_M[:, None] * (X * D) + head * D + d[None, :]
        tl.store(at, (first_MD * cos_MD + second_MD * sin_MD).to(dtype), mask=inside)
        tl.store(at + HALF, (second_MD * cos_MD - first_MD * sin_MD).to(dtype), mask=inside)


@triton.jit
def _add_to_queries(  # type: ignore[no-untyped-def]
    q_MD, grad_out_MD, k, v, grad_MD, logsumexp_M, delta_M, seen_M, start, stop, parent, before, own,
    MASKED: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    for first in range(start, stop, N):
        j_N = first + n
        if MASKED:
            row_N = _key_rows(tl.minimum(j_N, stop - 1), parent, before, own)
        else:
            row_N = _key_rows(j_N, parent, before, own)
        k_ND = tl.load(k + row_N[:, None] * KX + d[None, :])
        v_ND = tl.load(v + row_N[:, None] * VX + d[None, :])
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        weight_MN = tl.exp2(score_MN * (D**-0.5 * LOG2_E) - logsumexp_M[:, None])
        if MASKED:
            weight_MN = tl.where(j_N[None, :] <= seen_M[:, None], weight_MN, 0.0)
        grad_weight_MN = tl.dot(grad_out_MD, tl.trans(v_ND), input_precision="ieee")
        grad_score_MN = weight_MN * (grad_weight_MN - delta_M[:, None])
        grad_MD = tl.dot(grad_score_MN.to(k_ND.dtype), k_ND, grad_MD, input_precision="ieee")
    return grad_MD


@triton.jit
def _columns(value_M, c, first: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 as the sum of three columns of half its width."""
    high_M = value_M.to(dtype)
    rest_M = value_M - high_M.to(tl.float32)
    middle_M = rest_M.to(dtype)
    low_M = (rest_M - middle_M.to(tl.float32)).to(dtype)
    others_MC = tl.where(c == first + 1, middle_M[:, None], tl.where(c == first + 2, low_M[:, None], 0.0))
    return tl.where(c == first, high_M[:, None], others_MC).to(dtype)


@triton.jit(do_not_specialize=["T"])
def _queries_backward(  # type: ignore[no-untyped-def]
    q, k, v, grad_out, out, logsumexp, rows, cos, sin, grad, blocks, T,
    QX: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One block of queries, one head: w = softmax(q·k),  dq = Σ w · (g·v - δ) · k  with δ = g·out, kept for the keys."""
    block, head = blocks + tl.program_id(0) // H * 5, tl.program_id(0) % H
    first, begin, end = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    parent, before = tl.load(block + 3), tl.load(block + 4)
    own = begin - before
    token_M = first + tl.arange(0, M)
    row_M = tl.minimum(token_M, end - 1)
    d = tl.arange(0, D)
    q_MD = tl.load(q + row_M[:, None] * QX + head * D + d[None, :])
    at_MD = row_M[:, None] * (H * D) + head * D + d[None, :]
    grad_out_MD = tl.load(grad_out + at_MD)
    delta_M = tl.sum(grad_out_MD.to(tl.float32) * tl.load(out + at_MD).to(tl.float32), axis=1)
    logsumexp_M = tl.load(logsumexp + head * T + row_M) * LOG2_E
    k += head // (H // K) * D
    v += head // (H // K) * D
    seen_M = token_M - own
    full = (first - own + 1) // N * N
    stop = tl.minimum(first + M, end) - own
    grad_MD = tl.zeros([M, D], tl.float32)
    grad_MD = _add_to_queries(
        q_MD, grad_out_MD, k, v, grad_MD, logsumexp_M, delta_M, seen_M, 0, full, parent, before, own, False, KX, VX, D, N
    )
    grad_MD = _add_to_queries(
        q_MD, grad_out_MD, k, v, grad_MD, logsumexp_M, delta_M, seen_M, full, stop, parent, before, own, True, KX, VX, D, N
    )
    _store_gradient(grad, grad_MD * D**-0.5, token_M, end, head, cos, sin, H + 2 * K, D, M)

    c = tl.arange(0, C)[None, :]
    dtype: tl.constexpr = rows.dtype.element_ty
    rows_MC = _columns(logsumexp_M * -(D**0.5 / LOG2_E), c, 0, dtype) + _columns(-delta_M, c, 3, dtype)
    tl.store(rows + (head * T + token_M)[:, None] * C + c, rows_MC, mask=(token_M < end)[:, None])


@triton.jit
def _add_to_keys(  # type: ignore[no-untyped-def]
    q, k_ND, v_ND, grad_out, rows, grad_k_ND, grad_v_ND, token_N, first, stop, from_unit, to_unit, T,
    MASKED: tl.constexpr, QX: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A query's logsumexp and δ would be loaded by every thread for itself, four bytes at a time. As columns beside the query,
    multiplied by one, they are taken off scores and gradients by the products that make those."""
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    c = tl.arange(0, C)
    of_logsumexp_NC = tl.where(c < 3, 1.0, 0.0)[None, :].broadcast_to(N, C).to(k_ND.dtype)
    of_delta_NC = tl.where((c >= 3) & (c < 6), 1.0, 0.0)[None, :].broadcast_to(N, C).to(k_ND.dtype)
    for unit in range(from_unit, to_unit):
        token_M = first + unit // G * M + m
        head = unit % G
        # Zeros for what is beyond the last query: they add nothing to the sums.
        inside = (token_M < stop)[:, None]
        q_MD = tl.load(q + token_M[:, None] * QX + head * D + d[None, :], mask=inside, other=0.0)
        grad_out_MD = tl.load(grad_out + token_M[:, None] * (H * D) + head * D + d[None, :], mask=inside, other=0.0)
        rows_MC = tl.load(rows + (head * T + token_M)[:, None] * C + c[None, :], mask=inside, other=0.0)
        score_NM = tl.dot(of_logsumexp_NC, tl.trans(rows_MC), input_precision="ieee")
        score_NM = tl.dot(k_ND, tl.trans(q_MD), score_NM, input_precision="ieee")
        weight_NM = tl.exp2(score_NM * (D**-0.5 * LOG2_E))
        if MASKED:
            weight_NM = tl.where(token_N[:, None] <= token_M[None, :], weight_NM, 0.0)
        grad_v_ND = tl.dot(weight_NM.to(grad_out_MD.dtype), grad_out_MD, grad_v_ND, input_precision="ieee")
        grad_weight_NM = tl.dot(of_delta_NC, tl.trans(rows_MC), input_precision="ieee")
        grad_weight_NM = tl.dot(v_ND, tl.trans(grad_out_MD), grad_weight_NM, input_precision="ieee")
        grad_score_NM = weight_NM * grad_weight_NM
        grad_k_ND = tl.dot(grad_score_NM.to(q_MD.dtype), q_MD, grad_k_ND, input_precision="ieee")
    return grad_k_ND, grad_v_ND


@triton.jit(do_not_specialize=["T"])
def _keys_backward(  # type: ignore[no-untyped-def]
    q, k, v, grad_out, rows, cos, sin, grad, partial, parts, T,
    QX: tl.constexpr, KX: tl.constexpr, VX: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Part of the queries of one block of keys, one key/value head:  dv = Σ w · g,  dk = Σ w · (g·v - δ) · q."""
    G: tl.constexpr = H // K
    part, kv_head = parts + tl.program_id(0) // K * 6, tl.program_id(0) % K
    first, end, stop = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    from_unit, to_unit, slot = tl.load(part + 3), tl.load(part + 4), tl.load(part + 5)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    token_N = first + n
    row_N = tl.minimum(token_N, end - 1)
    k_ND = tl.load(k + row_N[:, None] * KX + kv_head * D + d[None, :])
    v_ND = tl.load(v + row_N[:, None] * VX + kv_head * D + d[None, :])
    q += kv_head * G * D
    grad_out += kv_head * G * D
    rows += kv_head * G * T * C
    grad_k_ND = tl.zeros([N, D], tl.float32)
    grad_v_ND = tl.zeros([N, D], tl.float32)
    # Only the queries among the keys themselves come before some of them.
    masked: tl.constexpr = (N + M - 1) // M * G
    grad_k_ND, grad_v_ND = _add_to_keys(
        q, k_ND, v_ND, grad_out, rows, grad_k_ND, grad_v_ND, token_N, first, stop,
        from_unit, tl.minimum(to_unit, masked), T, True, QX, G, H, D, M, N, C,
    )  # fmt: skip
    grad_k_ND, grad_v_ND = _add_to_keys(
        q, k_ND, v_ND, grad_out, rows, grad_k_ND, grad_v_ND, token_N, first, stop,
        tl.maximum(from_unit, masked), to_unit, T, False, QX, G, H, D, M, N, C,
    )  # fmt: skip
    grad_k_ND *= D**-0.5
    if slot < 0:
        _store_gradient(grad, grad_k_ND, token_N, end, H + kv_head, cos, sin, H + 2 * K, D, N)
        _store_gradient(grad, grad_v_ND, token_N, end, H + K + kv_head, None, None, H + 2 * K, D, N)
    else:
        tile_ND = partial + (slot * K + kv_head).to(tl.int64) * (2 * N * D) + n[:, None] * D + d[None, :]
        tl.store(tile_ND, grad_k_ND)
        tl.store(tile_ND + N * D, grad_v_ND)


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    partial, cos, sin, grad, sums, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr
):
    """Some keys of a block in several parts, one head, for keys or for values."""
    block, n, which = sums + tl.program_id(0) * 4, tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(2)
    kv_head, is_value = which % K, which // K
    token_N, end = tl.load(block) + n, tl.load(block + 1)
    d = tl.arange(0, D)
    total_ND = tl.zeros([ROWS, D], tl.float32)
    for slot in range(tl.load(block + 2), tl.load(block + 3)):
        tile = partial + ((slot * K + kv_head) * 2 + is_value).to(tl.int64) * (N * D)
        total_ND += tl.load(tile + n[:, None] * D + d[None, :])
    if is_value:
        _store_gradient(grad, total_ND, token_N, end, H + K + kv_head, None, None, H + 2 * K, D, ROWS)
    else:
        _store_gradient(grad, total_ND, token_N, end, H + kv_head, cos, sin, H + 2 * K, D, ROWS)
