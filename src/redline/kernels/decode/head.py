"""The language-model head of a decode step of many rows, `head.cu`.

    x [B, E] ──► x · weightᵀ ──► logits [B, V], peaks and sums of their chunks [B, C] ──► `sampling`

The product keeps of each chunk of logits what `sampling` would read them all again for, while it still has them: the largest,
and the sum of the weights relative to it. The chunks are small ones, as wide as a tile: a row has some hundred of them.

For Hopper, in bfloat16. This module needs CUDA; only code that runs on a CUDA device may import it.

Further letters: C chunks of a row's logits.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from redline.kernels import nvrtc
from redline.kernels.decode import hopper
from redline.kernels.decode.hopper import BARRIER_BYTES, INNER, LINE_BYTES, SHARED_MEMORY
from redline.kernels.decode.sampling import Summaries

SOURCE = Path(__file__).with_suffix(".cu")
CHUNK = 256
"""Vocabulary entries that are summed up together: the columns of a tile, the most that tensor cores multiply at once."""
ROWS = 128
"""Of a tile: `head.cu`'s, as is what follows."""
THREADS = 384
BOX = (16, 64)
"""Rows and columns of logits that leave together."""
LEAVING_BYTES = 8 * 2 * 2048
"""Through which they leave: two boxes of each warp that multiplies."""
STAGE_BYTES = (ROWS + CHUNK) * LINE_BYTES
STAGES = (SHARED_MEMORY - 1024 - LEAVING_BYTES) // (STAGE_BYTES + BARRIER_BYTES)
SHARED_BYTES = STAGES * (STAGE_BYTES + BARRIER_BYTES) + LEAVING_BYTES + 1024
"""The ring, which begins on a multiple of 1,024, and the room of what leaves."""
LATE_TURNS = 4
"""Of 64 of K, at least, in which a tile can be done with late."""
LEAST_ROWS, MOST_ROWS = 129, 4096
LAG = 2
"""Turns of 64 of K by which the second warpgroup begins its tiles behind the first: about as many as the ring lets it."""
SAME_ROWS_COST = 1.05
"""Of a tile whose cluster has the same rows: it brings a quarter more for as many products."""


class Tile(NamedTuple):
    """What the two blocks of a cluster compute at a time: each 128 rows by 256 columns."""

    has_same_rows: bool
    """And bring halves of x for each other; otherwise they have the same columns, and halves of the weights."""

    is_late: bool = False
    """And do most of what is left of it while they multiply the next."""

    @property
    def own(self) -> tuple[int, int]:
        """Rows and columns that a block brings."""
        return (ROWS // 2, CHUNK) if self.has_same_rows else (ROWS, CHUNK // 2)

    def pairs(self, rows: int, columns: int) -> int:
        """What clusters have to compute."""
        high, wide = (ROWS, 2 * CHUNK) if self.has_same_rows else (2 * ROWS, CHUNK)
        return math.ceil(rows / high) * math.ceil(columns / wide)


TILES = (Tile(has_same_rows=False), Tile(has_same_rows=True))


class _Arguments(ctypes.Structure):
    """Aligned as `head.cu`'s are."""

    _fields_ = [
        ("x", nvrtc.TensorMap),
        ("weight", nvrtc.TensorMap),
        ("logits", nvrtc.TensorMap),
        *((name, c_void_p) for name in ("temperature", "peaks", "sums")),
        *((name, c_int) for name in ("rows", "columns", "inner", "chunks")),
        ("more", c_uint64 * 3),
    ]


@cache
def tile_of(rows: int, columns: int, inner: int, multiprocessors: int) -> Tile | None:
    """The one of fewer turns; None where others are to multiply."""
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        return None

    def cost(tile: Tile) -> float:
        turns = math.ceil(tile.pairs(rows, columns) / (multiprocessors // 2))
        return turns * (SAME_ROWS_COST if tile.has_same_rows else 1.0)

    return min(TILES, key=cost)._replace(is_late=inner > (LATE_TURNS - 1) * INNER)


def serves(weight: Tensor) -> bool:
    """Whether there is such a kernel for a device, a dtype, a shape and a place: the copy engine takes 16 bytes at a time."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    is_placed = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype is torch.bfloat16 and is_placed and weight.is_contiguous() and nvrtc.is_there()


def logits_and_summaries(
    x_BE: Tensor, weight_VE: Tensor, temperature_B: Tensor, tile: Tile | None = None
) -> tuple[Tensor, Summaries]:
    """x · weightᵀ, [B, V], and what `sample_plain` would read it for. It begins before the launch in front of it has ended."""
    B, V = len(x_BE), len(weight_VE)
    assert temperature_B.dtype is torch.float32
    assert temperature_B.shape == (B,)
    assert temperature_B.is_contiguous()
    peaks_BC, sums_BC = torch.empty((2, B, triton.cdiv(V, CHUNK)), dtype=torch.float32, device=x_BE.device)
    summed = (temperature_B, peaks_BC, sums_BC)
    return _launch(x_BE, weight_VE, summed, tile or _tile(x_BE, weight_VE)), Summaries(peaks_BC, sums_BC, CHUNK)


def logits(x_BE: Tensor, weight_VE: Tensor, tile: Tile | None = None) -> Tensor:
    """x · weightᵀ alone."""
    return _launch(x_BE, weight_VE, None, tile or _tile(x_BE, weight_VE))


def _tile(x_BE: Tensor, weight_VE: Tensor) -> Tile:
    tile = tile_of(len(x_BE), *weight_VE.shape, _multiprocessors(x_BE.device))
    assert tile is not None, f"from {LEAST_ROWS} to {MOST_ROWS} rows"
    return tile


def _launch(x_BE: Tensor, weight_VE: Tensor, summed: tuple[Tensor, Tensor, Tensor] | None, tile: Tile) -> Tensor:
    """[B, V]. `summed` is the temperatures, and where the peaks and the sums go."""
    (B, E), V, device = x_BE.shape, len(weight_VE), x_BE.device.index or 0
    logits_BV = x_BE.new_empty(B, V)
    assert B > 0
    assert V % 8 == 0
    assert weight_VE.shape == (V, E)
    assert not tile.is_late or E > (LATE_TURNS - 1) * INNER
    for each in (x_BE, weight_VE):
        assert each.dtype is torch.bfloat16
        assert each.is_contiguous()
        assert each.data_ptr() % 16 == 0
    own_rows, own_columns = tile.own
    arguments = _Arguments(
        nvrtc.tensor_map(x_BE, (own_rows, INNER)),
        nvrtc.tensor_map(weight_VE, (own_columns, INNER)),
        nvrtc.tensor_map(logits_BV, BOX),
        *((None, None, None) if summed is None else (each.data_ptr() for each in summed)),
        B, V, E, triton.cdiv(V, CHUNK),
    )  # fmt: skip
    clusters = min(tile.pairs(B, V), _multiprocessors(x_BE.device) // 2)
    _kernel(tile, summed is not None, device).launch_grid((2 * clusters, 1), THREADS, arguments, device, early=True)
    return logits_BV


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(tile: Tile, sums: bool, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(), SOURCE.name, f"sm_{major}{minor}a", macros(tile, sums=sums))
        return nvrtc.Kernel(cubin, "head", SHARED_BYTES)


def source() -> str:
    return hopper.source(SOURCE, CHUNK)


def macros(tile: Tile, *, sums: bool) -> dict[str, int]:
    of_tile = {"SAME_ROWS": int(tile.has_same_rows), "LATE": int(tile.is_late)}
    return {"COLUMNS": CHUNK, "STAGES": STAGES, "LAG": LAG, "SUMS": int(sums)} | of_tile
