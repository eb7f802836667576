"""Products of normed rows of a decode step of many rows, `normed.cu`: their tiles, their arguments, their launch.

They take a residual stream as `residual.py` leaves it, and need no norm in front of them. Gate, up and silu are one launch.

For Hopper, in bfloat16. This module needs CUDA; only code that runs on a CUDA device may import it.

P is the number of parts of a row's squares.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels import nvrtc
from redline.kernels.decode import gated, hopper
from redline.kernels.decode.hopper import BARRIER_BYTES, INNER, LINE_BYTES, SHARED_MEMORY
from redline.kernels.decode.residual import CLOCK, L2_BYTES_PER_S, PLACED, START_S, Stream

SOURCE = Path(__file__).with_suffix(".cu")
MOST_STAGES = 8
GO_BYTES = 16
"""Barriers by which warpgroups but the first are told to begin."""
LEAD = 2
"""Turns, of high tiles of gate and up: 1.7% of a step of 512 rows by a few runs. Lower tiles are no faster by it."""
BLOCK_BYTES_PER_CLOCK = 45.0
"""Of an H200, what comes into a block."""


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
    is_gated: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.tall

    @property
    def width(self) -> int:
        """Rows of weights."""
        return self.columns * (2 if self.is_gated else 1)

    @property
    def box(self) -> int:
        """Those of them that come at once."""
        return self.columns if self.is_gated else self.columns // self.shared

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.width) * LINE_BYTES

    @property
    def lead(self) -> int:
        """Turns that a warpgroup is in front of the next one."""
        return LEAD if self.is_gated and self.groups > 1 and self.tall > 1 else 0

    @property
    def beside_bytes(self) -> int:
        """Of warpgroups' barriers, and of what rows are multiplied by."""
        return GO_BYTES + 4 * self.rows

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (SHARED_MEMORY - 1024 - self.beside_bytes) // (self.stage_bytes + BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """The ring, which begins on a multiple of 1,024, and what is beside it."""
        return self.stages * (self.stage_bytes + BARRIER_BYTES) + self.beside_bytes + 1024

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return math.ceil(columns / self.columns), math.ceil(rows / self.rows / self.shared) * self.shared

    def seconds(self, rows: int, columns: int, inner: int, multiprocessors: int) -> float:
        """What it should take: the longest of what multiplies, what comes out of the L2 cache and what comes into a block, for
        each wave of clusters."""
        across, down = self.grid(rows, columns)
        waves = math.ceil(across * down / self.shared / (int(PLACED[self.shared] * multiprocessors) // self.shared))
        turns = math.ceil(inner / INNER)
        multiplying = turns * self.rows // 64 * 4 * self.width / 2 / CLOCK
        arriving = turns * self.stage_bytes / BLOCK_BYTES_PER_CLOCK / CLOCK
        leaving = across * down / waves * turns * (self.rows + self.width / self.shared) * LINE_BYTES / L2_BYTES_PER_S
        return waves * (START_S + max(multiplying, arriving, leaving))


TILES = tuple(Tile(groups, 1, columns, shared) for groups in (1, 2) for columns in (64, 96, 128) for shared in (2, 1))
"""For products that are not gated."""


class _Arguments(ctypes.Structure):
    """Aligned as `normed.cu`'s are."""

    _fields_ = [
        ("x", nvrtc.TensorMap),
        ("weight", nvrtc.TensorMap),
        *((name, c_void_p) for name in ("bias", "squares", "out")),
        *((name, c_int) for name in ("rows", "columns", "inner", "parts")),
        ("eps", c_float),
        ("unused", c_int),
        ("more", c_uint64 * 2),
    ]


@cache
def tile_of(rows: int, columns: int, inner: int, multiprocessors: int) -> Tile:
    """The one that should take least, of a product that is not gated."""
    return min(TILES, key=lambda tile: tile.seconds(rows, columns, inner, multiprocessors))


def gated_tile_of(rows: int, columns: int, inner: int, multiprocessors: int) -> Tile | None:
    """`gated.tile_of`'s. Where it would leave a product to cuBLAS, because few rows of a tile are in use, that of the next more
    rows: cuBLAS wants a norm in front. None if there is none."""
    for as_many in range(rows, gated.MOST_ROWS + 1):
        if (tile := gated.tile_of(as_many, columns, inner, multiprocessors)) is not None:
            return Tile(*tile, is_gated=True)
    return None


def serves(weight: Tensor) -> bool:
    """Whether there is such a kernel for a device, a dtype, a shape and a place: the copy engine takes 16 bytes at a time."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    columns, inner = weight.shape
    is_placed = columns % 16 == 0 and inner % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype is torch.bfloat16 and is_placed and weight.is_contiguous() and nvrtc.is_there()


def normed_product(stream: Stream, eps: float, weight_NK: Tensor, bias_N: Tensor | None, tile: Tile | None = None) -> Tensor:
    """norm(x) · weightᵀ, [B, N]; by a gated tile silu(gate) · up of its two halves, [B, N / 2]. It begins before the launch in
    front of it has ended, and lets the one behind it begin."""
    tile = tile or tile_of(len(stream.x_BE), *weight_NK.shape, _multiprocessors(weight_NK.device))
    halves = 2 if tile.is_gated else 1
    (B, K), N, device = stream.scaled_BE.shape, len(weight_NK) // halves, weight_NK.device.index or 0
    squares_BP, out_BN = stream.squares_BP, stream.scaled_BE.new_empty(B, N)
    assert weight_NK.shape == (halves * N, K)
    assert len(squares_BP) == B
    assert squares_BP.dtype is torch.float32
    assert squares_BP.is_contiguous()
    assert bias_N is None or (bias_N.shape == (N,) and not tile.is_gated)
    for tensor in (out_BN, stream.scaled_BE, weight_NK, *(() if bias_N is None else (bias_N,))):
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
    assert N % 8 == 0
    assert K % 8 == 0
    arguments = _Arguments(
        nvrtc.tensor_map(stream.scaled_BE, (tile.rows, INNER)),
        nvrtc.tensor_map(weight_NK.view(halves, N, K), (1, tile.box, INNER)),
        None if bias_N is None else bias_N.data_ptr(),
        squares_BP.data_ptr(), out_BN.data_ptr(), B, N, K, squares_BP.shape[1], eps,
    )  # fmt: skip
    _kernel(tile, device).launch_grid(tile.grid(B, N), 128 * (tile.groups + 1), arguments, device, early=True)
    return out_BN


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(tile: Tile, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(tile), SOURCE.name, f"sm_{major}{minor}a", macros(tile))
        return nvrtc.Kernel(cubin, "normed", tile.shared_bytes)


def source(tile: Tile) -> str:
    """By all of a tile's weights at once."""
    return hopper.source(SOURCE, tile.width)


def macros(tile: Tile) -> dict[str, int]:
    return {
        "GATED": int(tile.is_gated), "GROUPS": tile.groups, "TALL": tile.tall, "COLUMNS": tile.columns, "STAGES": tile.stages,
        "SHARED": tile.shared, "LEAD": tile.lead,
    }  # fmt: skip
