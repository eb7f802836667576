"""Gate, up and silu of many rows in one launch, `gated_many.cu`: its tiles, their order, its arguments, its launch.

cuBLAS would write gate and up, and a second launch read them again. This one writes neither, and activates and writes a tile
while the next one is multiplied.

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
LEAST_ROWS = 513
"""Fewer take one tile a block (`gated`)."""
MOST_STAGES = 8
GO_BYTES = 32
"""Barriers of those that multiply."""
BAND_ROWS = 2048
"""Tiles under way at once need as many rows as weights about here."""
SHAPES = ((2, 1, (128, 120, 112, 104, 96, 80)), (3, 1, (96, 80)), (2, 2, (80,)))
"""Of tiles: warpgroups that multiply, 64 rows each so many times, and columns that they have registers for."""
MANY_ROWS, WIDEST_OF_MANY = 2049, 112
"""From so many rows on, tiles with more columns than these take 4 to 8% longer than their products and copies say."""
FLOPS_PER_S, L2_BYTES_PER_S = 790e12, 6.5e12
"""Of an H200, all multiprocessors together."""
TILE_S, LAST_S = 0.2e-6, 0.8e-6
"""What a tile takes beyond its products where others follow it, and what the last one does."""


class Tile(NamedTuple):
    """What a block computes at a time."""

    groups: int
    """Warpgroups that multiply a tile."""
    tall: int
    """How many times 64 rows each of them has."""
    columns: int
    """Of the result."""
    shared: str
    """What two blocks bring for each other: "weights", "rows" or "nothing"."""

    @property
    def lead(self) -> int:
        """Turns that a warpgroup is in front of the next one."""
        return 2 if self.groups == 2 else 1

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.tall

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return 1 if self.shared == "nothing" else 2

    @property
    def stage_bytes(self) -> int:
        return (self.rows + 2 * self.columns) * LINE_BYTES

    @property
    def asked_bytes(self) -> int:
        """Of a stage, what a block asks the L2 for."""
        rows, weights = self.rows, 2 * self.columns
        lines = {"nothing": rows + weights, "rows": rows // 2 + weights, "weights": rows + weights // 2}[self.shared]
        return lines * LINE_BYTES

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (SHARED_MEMORY - 1024 - GO_BYTES) // (self.stage_bytes + BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """The ring, which begins on a multiple of 1,024, and the barriers behind it."""
        return self.stages * (self.stage_bytes + BARRIER_BYTES) + GO_BYTES + 1024

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def below(self, rows: int) -> int:
        """Tiles of a cluster, one below the other."""
        return math.ceil(rows / (self.rows * (2 if self.shared == "weights" else 1)))

    def across(self, columns: int) -> int:
        return math.ceil(columns / (self.columns * (2 if self.shared == "rows" else 1)))

    def band(self, rows: int) -> int:
        """Tiles of a cluster, below each other, that are taken before the next column's: as many in each band."""
        below = self.below(rows)
        most = max(1, BAND_ROWS * below // max(rows, 1))
        return math.ceil(below / math.ceil(below / most))


class _Arguments(ctypes.Structure):
    """Aligned as `gated_many.cu`'s are."""

    _fields_ = [
        ("x", nvrtc.TensorMap),
        ("weight", nvrtc.TensorMap),
        ("out", c_void_p),
        *((name, c_int) for name in ("rows", "columns", "inner", "below", "across", "band")),
        ("more", c_uint64 * 4),
    ]


@cache
def tile_of(rows: int, columns: int, inner: int, multiprocessors: int) -> Tile | None:
    """The one that takes least, by what its products and its copies take; None for fewer rows, or a K of fewer turns than a
    ring has stages."""
    if rows < LEAST_ROWS:
        return None
    turns = math.ceil(inner / INNER)

    def seconds(tile: Tile) -> float:
        products = 4 * tile.rows * tile.columns * INNER * multiprocessors / FLOPS_PER_S
        copies = tile.asked_bytes * multiprocessors / L2_BYTES_PER_S
        number = math.ceil(tile.below(rows) * tile.across(columns) / (multiprocessors // tile.blocks))
        return number * (turns * max(products, copies) + TILE_S) + LAST_S

    widest = WIDEST_OF_MANY if rows >= MANY_ROWS else math.inf
    tiles = (tile for tile in _tiles() if turns >= tile.stages and tile.columns <= widest)
    return min(tiles, key=seconds, default=None)


def _tiles() -> Iterator[Tile]:
    for groups, tall, widths in SHAPES:
        for columns in widths:
            for shared in ("weights", "rows", "nothing"):
                yield Tile(groups, tall, columns, shared)


def serves(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is such a kernel for a device, a dtype, a shape and a place: the copy engine takes 16 bytes at a time."""
    if bias is not None or weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    both, inner = weight.shape
    is_placed = both % 16 == 0 and inner % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype is torch.bfloat16 and is_placed and weight.is_contiguous() and nvrtc.is_there()


def gated_product(x_BK: Tensor, weight_NK: Tensor, tile: Tile) -> Tensor:
    """silu(gate) · up of the two halves of x · weightᵀ, [B, N / 2]. It begins before the launch in front of it has ended."""
    (B, K), I, device = x_BK.shape, len(weight_NK) // 2, x_BK.device.index or 0  # noqa: E741
    assert B > 0
    out_BI = x_BK.new_empty(B, I)
    assert weight_NK.shape == (2 * I, K)
    assert I % 8 == 0
    assert K % 8 == 0
    assert all(each.dtype is torch.bfloat16 and each.is_contiguous() for each in (out_BI, x_BK, weight_NK))
    assert all(each.data_ptr() % 16 == 0 for each in (out_BI, x_BK, weight_NK))
    # With fewer turns a warpgroup could be a tile in front of another, whose barriers know only even and odd ones.
    assert math.ceil(K / INNER) >= tile.stages
    below, across = tile.below(B), tile.across(I)
    arguments = _Arguments(
        nvrtc.tensor_map(x_BK, (tile.rows // 2 if tile.shared == "rows" else tile.rows, INNER)),
        nvrtc.tensor_map(weight_NK.view(2, I, K), (1, tile.columns, INNER)),
        out_BI.data_ptr(), B, I, K, below, across, tile.band(B),
    )  # fmt: skip
    clusters = min(_multiprocessors(device) // tile.blocks, below * across)
    _kernel(tile, device).launch_grid((clusters * tile.blocks, 1), tile.threads, arguments, device, early=True)
    return out_BI


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(tile: Tile, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(tile), SOURCE.name, f"sm_{major}{minor}a", macros(tile))
        return nvrtc.Kernel(cubin, "gated_many", tile.shared_bytes)


def source(tile: Tile) -> str:
    """By gate and up at once."""
    return hopper.source(SOURCE, 2 * tile.columns)


def macros(tile: Tile) -> dict[str, int]:
    return {
        "COLUMNS": tile.columns,
        "GROUPS": tile.groups,
        "TALL": tile.tall,
        "STAGES": tile.stages,
        "SHARED": tile.blocks,
        "ROWS_SHARED": int(tile.shared == "rows"),
        "LEAD": tile.lead,
    }
