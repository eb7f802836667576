"""Gate, up and silu of a decode step of many rows in one launch, `gated.cu`: its tiles, its arguments, its launch.

cuBLAS would write gate and up, and a second launch read them again. This one writes neither, and asks for its weights before
the launch in front of it has ended.

For Hopper, in bfloat16. This module needs CUDA; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from ctypes import c_int, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels import nvrtc
from redline.kernels.decode import hopper
from redline.kernels.decode.hopper import BARRIER_BYTES, INNER, LINE_BYTES, SHARED_MEMORY

SOURCE = Path(__file__).with_suffix(".cu")
LEAST_ROWS, MOST_ROWS = 65, 512
"""Fewer are read by narrow programs (`few_rows`); more take several tiles to a block, which cuBLAS overlaps."""
WIDE = 2048
"""Hidden units from which cuBLAS is as fast: where products take long, less is won around them."""
FULL = 0.7
"""Of a tile's rows: where fewer are in use, cuBLAS has a lower tile."""
SHAPES = ((2, 1, 128), (3, 1, 96), (2, 2, 96))
"""Of tiles: warpgroups that multiply, 64 rows each so many times, and the most columns that they have registers for."""
MOST_STAGES = 8
START_S, FLOPS_PER_S = 6.5e-6, 6.2e12
"""What a tile takes at least, and what a multiprocessor multiplies beyond that, as measured on an H200."""


class Tile(NamedTuple):
    """What one block computes."""

    groups: int
    """Warpgroups that multiply."""
    tall: int
    """How many times 64 rows each of them has."""
    columns: int
    """Of the result."""
    shared: int
    """Blocks with the same columns that bring weights for each other."""

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.tall

    @property
    def stage_bytes(self) -> int:
        return (self.rows + 2 * self.columns) * LINE_BYTES

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (SHARED_MEMORY - 1024) // (self.stage_bytes + BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """The ring, which begins on a multiple of 1,024."""
        return self.stages * (self.stage_bytes + BARRIER_BYTES) + 1024


class _Arguments(ctypes.Structure):
    """Aligned as `gated.cu`'s are."""

    _fields_ = [
        ("x", nvrtc.TensorMap),
        ("weight", nvrtc.TensorMap),
        ("out", c_void_p),
        *((name, c_int) for name in ("rows", "columns", "inner", "unused")),
        ("more", c_uint64 * 5),
    ]


@cache
def tile_of(rows: int, columns: int, inner: int, multiprocessors: int) -> Tile | None:
    """The one that takes least, by what a tile and its products take; None where cuBLAS is left the product."""
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return None
    tiles = list(_tiles(rows, columns, multiprocessors))

    def seconds(each: tuple[int, Tile]) -> float:
        turns, tile = each
        return turns * (START_S + 4 * tile.rows * tile.columns * inner / FLOPS_PER_S)

    return min(tiles, key=seconds)[1] if tiles else None


def _tiles(rows: int, columns: int, multiprocessors: int) -> Iterator[tuple[int, Tile]]:
    """Of each shape the narrowest that needs no more turns, with their number."""
    for groups, tall, most_columns in SHAPES:
        below = math.ceil(rows / (64 * groups * tall))
        if rows < FULL * below * 64 * groups * tall:
            continue
        for turns in range(1, 5):
            width = math.ceil(columns / (turns * multiprocessors // below) / 8) * 8
            if width <= most_columns:
                yield turns, Tile(groups, tall, width, 2 if below % 2 == 0 else 1)
                break


def serves(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is such a kernel for a device, a dtype, a shape and a place: the copy engine takes 16 bytes at a time."""
    if bias is not None or weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    both, inner = weight.shape
    is_placed = both % 16 == 0 and inner % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype is torch.bfloat16 and is_placed and inner < WIDE and nvrtc.is_there()


def gated_product(x_BK: Tensor, weight_NK: Tensor, tile: Tile) -> Tensor:
    """silu(gate) · up of the two halves of x · weightᵀ, [B, N / 2]."""
    (B, K), I, device = x_BK.shape, len(weight_NK) // 2, x_BK.device.index or 0  # noqa: E741
    out_BI = x_BK.new_empty(B, I)
    arguments = _Arguments(
        nvrtc.tensor_map(x_BK, (tile.rows, INNER)),
        nvrtc.tensor_map(weight_NK.view(2, I, K), (1, tile.columns, INNER)),
        out_BI.data_ptr(), B, I, K,
    )  # fmt: skip
    below = math.ceil(B / tile.rows / tile.shared) * tile.shared
    grid = (math.ceil(I / tile.columns), below)
    _kernel(tile, device).launch_grid(grid, 128 * (tile.groups + 1), arguments, device, early=True)
    return out_BI


@cache
def _kernel(tile: Tile, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(tile), SOURCE.name, f"sm_{major}{minor}a", macros(tile))
        return nvrtc.Kernel(cubin, "gated", tile.shared_bytes)


def source(tile: Tile) -> str:
    """By gate and up at once."""
    return hopper.source(SOURCE, 2 * tile.columns)


def macros(tile: Tile) -> dict[str, int]:
    return {"GROUPS": tile.groups, "TALL": tile.tall, "COLUMNS": tile.columns, "STAGES": tile.stages, "SHARED": tile.shared}
