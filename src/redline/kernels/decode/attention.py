"""Attention of one decode step over paged keys and values, from the fused projection to the heads' outputs.

A program serves one row of the batch, one key/value head and one split of the row's context. It norms and rotates the row's G
query heads and its new key, writes the new key and value to their page, and attends to what the cache held before. The new
token does not make the round trip through memory: its column closes the running softmax.

    one split                  _decode ─────────────────────────────────────► out
    several splits             _decode ──► parts ──────────────────► _merge ► out
    rows that share a prefix   _decode ──► parts, queries
                               shared_prefix ──► parts ────────────► _merge ► out

A part is an unfinished softmax: the peak of its scores, their total weight under that peak, and the weighted sum of values.
Rows of one prompt stand side by side in the batch, so programs that run together read the same pages out of the L2 cache.

Only the contents of tensors vary: a launch depends on shapes, on `num_splits` and on the sizes in `SharedPrefixes`, so it can
be captured in a CUDA graph and replayed with other positions, tables and groups.

N are cached tokens of one tile, Q the G query heads of a key/value head, R lines of the block table, M blocks of a line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from redline.kernels.decode.few_rows import launched
from redline.kernels.decode.paged_softmax import attend, pages, split_bounds
from redline.kernels.decode.rotary import angles, rotated
from redline.kernels.decode.shared_prefix import SharedPrefixes, shared_prefix

MIN_ROWS = 16
"""Query rows of a tile: the fewest that tensor cores take."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Enough tiles in flight to keep device memory busy; more splits would only add parts to merge."""
MIN_TILES_PER_SPLIT = 4
"""A shorter split would take longer to start than to run."""
SHARED_ROWS = 64
"""Query rows of one program over a shared prefix."""


class Tile(NamedTuple):
    """How a kernel is cut and compiled."""

    tokens: int
    """Cached tokens per turn of the loop."""
    warps: int
    stages: int
    """Depth of the software pipeline: tiles in flight, counting the one in use."""


TILES = {16: Tile(64, 1, 3), 32: Tile(64, 1, 3), 64: Tile(32, 1, 3), 128: Tile(32, 2, 3), 256: Tile(32, 4, 2)}
"""By head size; these are the sizes that `decode_attention` takes."""
SOME_HEADS_TILES = TILES | {64: Tile(64, 4, 3)}
"""The same where there are fewer programs than keep memory busy by themselves: each asks for more at once."""
FEW_HEADS_TILES = TILES | {64: Tile(128, 4, 2)}
"""The same where there are fewer still; they end last, and so are the longest."""
FEW_ROWS_TILES = TILES | {64: Tile(128, 8, 1)}
"""The same for so few rows that one tile takes longer than all are worth: as many tokens as there are threads for."""
SOME_HEADS, FEW_HEADS, FEW_ROWS = 400, 128, 16
"""Key/value heads of all rows up to which, and rows up to which, those are the faster ones on an H200."""
SHARED_TILES = {16: Tile(64, 4, 3), 32: Tile(64, 4, 3), 64: Tile(64, 4, 3), 128: Tile(64, 4, 2), 256: Tile(32, 4, 2)}
"""The same for shared prefixes."""


@dataclass(slots=True, frozen=True)
class DecodeBatch:
    """Where the rows of a decode step stand; the same for all layers."""

    positions_B: Tensor
    """int64: position of each row's new token, or -1 for a row that is not live."""
    rows_B: Tensor
    """int32: each row's line of the block table."""
    block_table_RM: Tensor
    """int32: the blocks that hold a line's tokens, in order. Entries beyond a position are not read."""
    num_splits: int = 1
    """Programs that divide each row's context among them."""
    prefixes: SharedPrefixes | None = None
    """Groups of rows whose common prefix is to be read once."""

    @property
    def num_parts(self) -> int:
        """Unfinished softmaxes per row and head; a single one is finished where it is made."""
        return self.num_splits + (self.prefixes.num_splits if self.prefixes else 0)


def choose_splits(batch: int, kv_heads: int, max_tokens: int, head_dim: int, multiprocessors: int = 132) -> int:
    """As many as fill the device: 1 for a large batch, more for a small one, but none shorter than a few tiles. A power of two:
    a kernel is compiled for each number."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // (batch * kv_heads)
    possible = max_tokens // (MIN_TILES_PER_SPLIT * TILES[head_dim].tokens)
    return 1 << (max(1, min(wanted, possible)).bit_length() - 1)


def choose_tile(batch: int, kv_heads: int, head_dim: int) -> Tile:
    """By how many programs there will be."""
    heads = batch * kv_heads
    if batch <= FEW_ROWS:
        return FEW_ROWS_TILES[head_dim]
    tiles = FEW_HEADS_TILES if heads <= FEW_HEADS else SOME_HEADS_TILES if heads < SOME_HEADS else TILES
    return tiles[head_dim]


def decode_attention(
    heads_BND: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: DecodeBatch,
    rotary: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    norm_eps: float = 0.0,
    tile: Tile | None = None,
    *,
    early: bool = False,
    arrived: Tensor | None = None,
) -> Tensor:
    """[B, H, D]: attention of each row's new token to itself and all before it; zeros for rows that are not live.

    `heads_BND` is the output of the fused projection: H queries, K keys and K values of each row, before norm and rotation.
    `keys` and `values` are one layer's cache [blocks, K, block size, D], and the new token's are written there. `rotary` is cos
    and sin [2, positions, D / 2] as `rotary_table` makes them, `norms` the weights [D] of the RMS norms on query and key heads.
    With `early` its launches begin before the one in front of them has ended (`few_rows`). With `arrived`, int32 zeros for each
    row and key/value head, the program of a head that ends last merges its parts: one launch less where no prefix is shared.
    """
    (_, K, page, D), (B, N, _) = keys.shape, heads_BND.shape
    assert D in TILES, f"no kernel for heads of {D}"
    assert page & (page - 1) == 0, f"a block of {page} tokens is not a power of two"
    assert all(tensor.is_contiguous() for tensor in (heads_BND, keys, values))
    out_BHD = heads_BND.new_empty(B, N - 2 * K, D)
    if B == 0:
        return out_BHD
    rows = _row_arguments(batch, out_BHD) | {"K": K}
    cache = {"keys": keys, "values": values, "PAGE": page, "scale": D**-0.5 * math.log2(math.e)}
    cache |= {"rows": batch.rows_B, "block_table": batch.block_table_RM, "table_stride": batch.block_table_RM.stride(0)}
    queries_BHD = torch.empty_like(out_BHD) if batch.prefixes else None
    arrived = None if batch.prefixes else arrived
    q_norm, k_norm = norms or (None, None)
    _decode[(B, K, batch.num_splits)](
        heads_BND, q_norm, k_norm, norm_eps, rotary, rotary.shape[1], queries_BHD, out_BHD, arrived, **rows, **cache,
        SPLITS=batch.num_splits, BLOCK_Q=max(MIN_ROWS, triton.next_power_of_2(rows["H"] // K)), EARLY=early,
        enable_fp_fusion=False, **_compiled(tile or TILES[D]), **launched(early),
    )  # fmt: skip
    if batch.prefixes and queries_BHD is not None:
        tiles = triton.cdiv(batch.prefixes.max_size * (rows["H"] // K), SHARED_ROWS)
        groups = {"starts": batch.prefixes.starts_C, "sizes": batch.prefixes.sizes_C, "lengths": batch.prefixes.lengths_C}
        shared_prefix[(tiles, K, len(batch.prefixes.sizes_C) * batch.prefixes.num_splits)](
            queries_BHD, **groups, **rows, **cache, FIRST_PART=batch.num_splits, SPLITS=batch.prefixes.num_splits,
            BLOCK_M=triton.next_power_of_2(batch.prefixes.max_size), BLOCK_Q=SHARED_ROWS, **_compiled(SHARED_TILES[D]),
        )  # fmt: skip
    if batch.num_parts > 1 and arrived is None:
        _merge[(B, K)](out_BHD, **rows, SPLITS=batch.num_splits, PARTS=batch.num_parts, num_warps=4)
    return out_BHD


def _row_arguments(batch: DecodeBatch, out_BHD: Tensor) -> dict[str, Any]:
    """What every kernel is told about the batch, and room for the parts where there are several."""
    (B, H, D), P = out_BHD.shape, batch.num_parts
    prefixes = batch.prefixes
    several = P > 1
    return {
        "positions": batch.positions_B,
        "prefixes": prefixes and prefixes.lengths_B,
        "peaks": out_BHD.new_empty(P, B, H, dtype=torch.float32) if several else None,
        "totals": out_BHD.new_empty(P, B, H, dtype=torch.float32) if several else None,
        "sums": out_BHD.new_empty(P, B, H, D, dtype=torch.float32) if several else None,
        "B": B,
        "H": H,
        "D": D,
    }


def _compiled(tile: Tile) -> dict[str, int]:
    return {"BLOCK_N": tile.tokens, "num_warps": tile.warps, "num_stages": tile.stages}


@triton.jit(do_not_specialize=["B", "table_stride", "num_positions"])
def _decode(  # type: ignore[no-untyped-def]
    heads, q_norm, k_norm, eps, rotary, num_positions, queries, out, arrived,
    positions, prefixes, peaks, totals, sums, B,
    keys, values, scale, rows, block_table, table_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row, one key/value head, one split: the new token (in split 0) and the cached tokens that no prefix covers."""
    G: tl.constexpr = H // K
    DIRECT: tl.constexpr = (SPLITS == 1) & (prefixes is None)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_Q = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    head_Q = row * H + kv_head * G + query_Q
    at_QD = head_Q[:, None] * D + d[None, :]
    inside_Q = query_Q < G
    position = tl.load(positions + row).to(tl.int32)
    if position < 0:
        if DIRECT or arrived is not None:
            tl.store(out + at_QD, tl.zeros([BLOCK_Q, D], out.dtype.element_ty), mask=inside_Q[:, None])
        return
    prefix = 0
    if prefixes is not None:
        prefix = tl.load(prefixes + row)

    # All programs start at once and memory idles until their first tiles are asked for. So what those wait for is loaded first,
    # and the new token, which nothing waits for, is dealt with after the loop.
    table = block_table + tl.load(rows + row).to(tl.int64) * table_stride
    begin, end = split_bounds(split, prefix, position, SPLITS, BLOCK_N)
    page = pages(table, begin, end, PAGE, BLOCK_N)
    own = heads + row.to(tl.int64) * (H + 2 * K) * D
    cos_D, sin_D = angles(position, rotary, num_positions, D)
    q_QD = rotated(own, kv_head * G + query_Q, inside_Q, q_norm, eps, cos_D, sin_D, D)
    if queries is not None:
        tl.store(queries + at_QD, q_QD, mask=inside_Q[:, None])
    peak_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total_Q = tl.zeros([BLOCK_Q], tl.float32)
    sum_QD = tl.zeros([BLOCK_Q, D], tl.float32)
    peak_Q, total_Q, sum_QD = attend(
        q_QD, peak_Q, total_Q, sum_QD, page, table, begin, end, kv_head, keys, values, scale, K, D, PAGE, BLOCK_N
    )
    if split == 0:
        one = tl.arange(0, 1)
        k_1D = rotated(own, H + kv_head + one, one < 1, k_norm, eps, cos_D, sin_D, D)
        v_1D = tl.load(own + (H + K + kv_head + one)[:, None] * D + d[None, :])
        new_page = tl.load(table + position // PAGE).to(tl.int64)
        new_1D = (((new_page * K + kv_head) * PAGE + position % PAGE) * D + d)[None, :]
        tl.store(keys + new_1D, k_1D)
        tl.store(values + new_1D, v_1D)
        score_Q = tl.sum(q_QD.to(tl.float32) * k_1D.to(tl.float32), axis=1) * scale
        new_peak_Q = tl.maximum(peak_Q, score_Q)
        fade_Q, weight_Q = tl.exp2(peak_Q - new_peak_Q), tl.exp2(score_Q - new_peak_Q)
        total_Q = total_Q * fade_Q + weight_Q
        sum_QD = sum_QD * fade_Q[:, None] + weight_Q[:, None] * v_1D.to(tl.float32)
        peak_Q = new_peak_Q
    if DIRECT:
        tl.store(out + at_QD, (sum_QD / total_Q[:, None]).to(out.dtype.element_ty), mask=inside_Q[:, None])
    else:
        part = split.to(tl.int64) * B * H
        tl.store(peaks + part + head_Q, peak_Q, mask=inside_Q)
        tl.store(totals + part + head_Q, total_Q, mask=inside_Q)
        tl.store(sums + part * D + at_QD, sum_QD, mask=inside_Q[:, None])
        if arrived is not None:
            tl.debug_barrier()
            counter = arrived + row * K + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                tl.debug_barrier()
                merged_QD = _merged(peaks, totals, sums, SPLITS, B * H, head_Q, at_QD, inside_Q, BLOCK_Q, D)
                tl.store(out + at_QD, merged_QD.to(out.dtype.element_ty), mask=inside_Q[:, None])
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["B"])
def _merge(  # type: ignore[no-untyped-def]
    out, positions, prefixes, peaks, totals, sums, B,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Finish the softmax of one row and one key/value head. The first part holds the new token, so its peak is finite; a later
    one that found no tokens has a peak of -inf and adds nothing."""
    G: tl.constexpr = H // K
    BLOCK_Q: tl.constexpr = triton.next_power_of_2(G)
    row, kv_head = tl.program_id(0), tl.program_id(1)
    query_Q = tl.arange(0, BLOCK_Q)
    inside_Q = query_Q < G
    head_Q = row * H + kv_head * G + query_Q
    at_QD = head_Q[:, None] * D + tl.arange(0, D)[None, :]
    num_parts = SPLITS
    if prefixes is not None:
        num_parts = tl.where(tl.load(prefixes + row) > 0, PARTS, SPLITS)
    num_parts = tl.where(tl.load(positions + row) < 0, 0, num_parts)
    merged_QD = _merged(peaks, totals, sums, num_parts, B * H, head_Q, at_QD, inside_Q, BLOCK_Q, D)
    tl.store(out + at_QD, merged_QD.to(out.dtype.element_ty), mask=inside_Q[:, None])


@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    peaks, totals, sums, num_parts, heads_of_a_part, head_Q, at_QD, inside_Q, BLOCK_Q: tl.constexpr, D: tl.constexpr
):
    """The finished softmax of some heads, float32 [BLOCK_Q, D]. A row that is not live has no parts, and gets zeros."""
    peak_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total_Q = tl.zeros([BLOCK_Q], tl.float32)
    sum_QD = tl.zeros([BLOCK_Q, D], tl.float32)
    for part in tl.range(num_parts, loop_unroll_factor=4):  # four parts' loads in flight
        base = tl.cast(part, tl.int64) * heads_of_a_part
        # Programs of the same launch may have written them, elsewhere: the nearest cache does not know.
        part_peak_Q = tl.load(peaks + base + head_Q, mask=inside_Q, other=0.0, cache_modifier=".cg")
        part_total_Q = tl.load(totals + base + head_Q, mask=inside_Q, other=0.0, cache_modifier=".cg")
        part_sum_QD = tl.load(sums + base * D + at_QD, mask=inside_Q[:, None], other=0.0, cache_modifier=".cg")
        new_peak_Q = tl.maximum(peak_Q, part_peak_Q)
        fade_Q, weight_Q = tl.exp2(peak_Q - new_peak_Q), tl.exp2(part_peak_Q - new_peak_Q)
        total_Q = total_Q * fade_Q + part_total_Q * weight_Q
        sum_QD = sum_QD * fade_Q[:, None] + part_sum_QD * weight_Q[:, None]
        peak_Q = new_peak_Q
    return sum_QD / tl.where(total_Q > 0, total_Q, 1.0)[:, None]
