"""The products of a decode step of few rows.

With so few rows a product takes as long as its weights take to come from memory, and a step of many small products takes longer
by what lies between them. So each launch begins while the one before it still runs, and waits for its input where it needs it
(a programmatic dependent launch); gate, up and their activation are one launch; and a product with too few columns to occupy
the device is cut along K, too. The program that ends last adds the parts up, in their order: the result does not depend on
which program that is.

They round where eager torch rounds. This module needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILES = (16, 32, 64)
"""Rows that a program computes with; a batch takes the next of them."""
MOST_ROWS, GATED_ROWS = TILES[0], TILES[-1]
"""Beyond these, the products of cuBLAS are as fast: all others; gate and up with their activation."""
INNER = 128
"""Of K, per turn of the loop, where the tile is not the largest."""
ENOUGH_PROGRAMS = 256
"""Fewer leave part of the device idle."""
LONG = 3 * 2048
"""A K that is cut even where columns are many: a program of one warp would take too long for it."""
MULTIPROCESSORS = 132
DEEPEST = 5
STAGE_ROOM = 28 * 1024
"""Bytes that a stage of the largest takes, and a part of what else a program needs."""


class Cut(NamedTuple):
    """How a product is cut and compiled."""

    columns: int
    """Of the result, in a program."""
    warps: int
    parts: int
    """Of K, one in each program."""
    inner: int = INNER
    """Of K, per turn of the loop."""
    stages: int = 4


class Room(NamedTuple):
    """Where the parts of products meet. Launches that follow each other may share one."""

    parts: Tensor
    """float32, enough for parts · B · N."""
    arrived: Tensor
    """int32, zeros between two launches: how many parts of each program's columns are there."""


def make_room(shapes: list[tuple[int, int]], device: torch.device) -> Room:
    """Room for products by weights [N, K] of these shapes."""
    cuts = [(N, cut) for N, K in shapes if (cut := cut_of(N, K)).parts > 1]
    parts = max((MOST_ROWS * cut.parts * N for N, cut in cuts), default=0)
    programs = max((triton.cdiv(N, cut.columns) for N, cut in cuts), default=0)
    return Room(torch.empty(parts, dtype=torch.float32, device=device), torch.zeros(programs, dtype=torch.int32, device=device))


def tile_of(rows: int) -> int:
    return next(tile for tile in TILES if tile >= rows)


def cut_of(columns: int, inner: int, tile: int = MOST_ROWS, *, is_gated: bool = False) -> Cut:
    """As measured on an H200 for the shapes of models with 0.5 and 7 billion parameters: narrow programs, as many as fill the
    device, and no more parts than that takes, unless K is long. More rows are read anew by every program: the programs are
    wider, and fewer."""
    assert is_gated or tile == MOST_ROWS, "so many rows are left to cuBLAS"
    if tile == MOST_ROWS:
        return _narrow(columns, inner, is_gated)
    if tile < GATED_ROWS:
        return Cut(32, 2, 1)
    return Cut(64, 4, 1, 64, _deepest(triton.cdiv(columns, 64)))


def _deepest(programs: int) -> int:
    """Stages that leave room for all programs at once."""
    return {1: DEEPEST, 2: 4}.get(triton.cdiv(programs, MULTIPROCESSORS), 3)


def _narrow(columns: int, inner: int, is_gated: bool) -> Cut:
    if columns >= 2**15:
        return Cut(64, 4, 1)
    narrow = triton.cdiv(columns, 16)
    if is_gated or (narrow >= ENOUGH_PROGRAMS and inner < LONG):
        return Cut(16, 1, 1) if narrow <= 2 * ENOUGH_PROGRAMS else Cut(32, 2, 1)
    width = 32 if inner >= 4 * columns else 16
    wanted = max(ENOUGH_PROGRAMS // triton.cdiv(columns, width), inner // 2048, 1)
    return Cut(width, 2, min(8, 1 << (wanted.bit_length() - 1)))


def product(
    x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, room: Room | None, *, is_gated: bool = False, early: bool = False
) -> Tensor:
    """x · weightᵀ, [B, N]; gated, silu(gate) · up of its two halves, [B, N / 2], which wants no room. With `early` the launch
    begins before the one in front of it has ended."""
    (B, K), (both, _) = x_BK.shape, weight_NK.shape
    N = both // 2 if is_gated else both
    tile = tile_of(B)
    cut = cut_of(N, K, tile, is_gated=is_gated)
    programs = triton.cdiv(N, cut.columns)
    assert x_BK.is_contiguous()
    assert weight_NK.is_contiguous()
    if cut.parts > 1:
        assert room is not None
        assert cut.parts * B * N <= len(room.parts)
        assert programs <= len(room.arrived)
    out_BN = x_BK.new_empty(B, N)
    _product[(programs, cut.parts)](
        x_BK, weight_NK, bias_N, out_BN, *(room or (None, None)), B, N,
        K=K, PARTS=cut.parts, TURNS=triton.cdiv(triton.cdiv(K, cut.inner), cut.parts), GATED=is_gated, EARLY=early,
        BLOCK_B=tile, BLOCK_N=cut.columns, BLOCK_K=cut.inner, num_warps=cut.warps,
        num_stages=min(cut.stages, most_stages(x_BK.device)), **launched(early),
    )  # fmt: skip
    return out_BN


@cache
def most_stages(device: torch.device) -> int:
    """For which a multiprocessor has shared memory: three on smaller devices than this was measured on."""
    if device.type != "cuda":
        return DEEPEST
    return min(DEEPEST, torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // STAGE_ROOM)


def can_overlap(device: torch.device) -> bool:
    """Whether a launch on this device may begin before the one in front of it has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launched(early: bool) -> dict[str, bool]:
    """Triton's options for a launch that begins before the one in front of it has ended; its kernel waits for that one."""
    return {"launch_pdl": True} if early else {}


@triton.jit(do_not_specialize=["B"])
def _product(  # type: ignore[no-untyped-def]
    x, weight, bias, out, parts, arrived, B, N,
    K: tl.constexpr, PARTS: tl.constexpr, TURNS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program, part = tl.program_id(0), tl.program_id(1)
    n, b, k = program * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
    begin = part * TURNS * BLOCK_K
    end = tl.minimum(begin + TURNS * BLOCK_K, K)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    sum_NB = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    up_NB = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    at_NK = n.to(tl.int64)[:, None] * K + k[None, :]
    at_BK = b[:, None] * K + k[None, :]
    for start in range(begin, end, BLOCK_K):
        inside_K = start + k < end
        inside_NK = (n < N)[:, None] & inside_K[None, :]
        w_NK = tl.load(weight + start + at_NK, mask=inside_NK, other=0.0)
        x_BK = tl.load(x + start + at_BK, mask=(b < B)[:, None] & inside_K[None, :], other=0.0)
        sum_NB = tl.dot(w_NK, tl.trans(x_BK), sum_NB, input_precision="ieee")
        if GATED:
            up_NK = tl.load(weight + N * K + start + at_NK, mask=inside_NK, other=0.0)
            up_NB = tl.dot(up_NK, tl.trans(x_BK), up_NB, input_precision="ieee")
    at_NB = b[None, :] * N + n[:, None]
    inside_NB = (n < N)[:, None] & (b < B)[None, :]
    is_last = True
    if PARTS > 1:
        tl.static_assert(not GATED)
        tl.store(parts + part * B * N + at_NB, sum_NB, mask=inside_NB)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + program, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        if PARTS > 1:
            tl.debug_barrier()
            sum_NB = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
            for other in tl.static_range(PARTS):
                sum_NB += tl.load(parts + other * B * N + at_NB, mask=inside_NB, other=0.0, cache_modifier=".cg")
            tl.store(arrived + program, 0)
        if bias is not None:
            sum_NB += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_NB += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate_NB = sum_NB.to(out.dtype.element_ty).to(tl.float32)
            active_NB = (gate_NB / (1.0 + tl.exp(-gate_NB))).to(out.dtype.element_ty).to(tl.float32)
            sum_NB = active_NB * up_NB.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + at_NB, sum_NB.to(out.dtype.element_ty), mask=inside_NB)
