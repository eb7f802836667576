"""Products of a decode step of many rows that add the residual stream, `residual.cu`: how they are cut, their arguments, their
launch.

A norm behind such a product needs no launch of its own. The product writes what it can of it, `Stream`, and the product behind
the norm does the rest (`normed.py`).

For Hopper, in bfloat16. This module needs CUDA; only code that runs on a CUDA device may import it.

P is the number of tiles of columns.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from ctypes import c_int, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels import nvrtc
from redline.kernels.decode import hopper
from redline.kernels.decode.hopper import BARRIER_BYTES, INNER, LINE_BYTES, SHARED_MEMORY

SOURCE = Path(__file__).with_suffix(".cu")
LEAST_ROWS, MOST_ROWS = 129, 512
HEIGHTS, WIDTHS = (64, 128), (64, 96, 128, 192, 256)
"""Of tiles: rows, columns."""
PARTS, SHARED = (1, 2, 4, 8), (1, 2, 4)
"""What of two that should take the same is to be preferred stands first."""
MOST_CLUSTER = 8
"""Blocks of a cluster that any device places."""
PLACED = {1: 1.0, 2: 0.97, 4: 0.85, 8: 0.85}
"""Of multiprocessors, those that clusters of so many blocks with all the room find: they do not divide the device evenly."""
MOST_STAGES = 8
STAGES_APART = 4
"""Beside so many, sums meet in memory of their own, and nobody waits for the others before sending."""
CLOCK, L2_BYTES_PER_S, BLOCK_BYTES_PER_CLOCK, MEETING_BYTES_PER_CLOCK = 1.7e9, 6.5e12, 45.0, 25.0
START_S, MEETING_S = 1.5e-6, 0.4e-6
"""Of an H200: what copies and exchanges between blocks reach, and what a launch and an exchange take at least."""


class Cut(NamedTuple):
    """How a product is cut and compiled."""

    rows: int
    """Of a tile, 64, 128 or 256; as the next."""
    columns: int
    parts: int
    """Blocks of a cluster that share the K of a tile."""
    shared: int
    """Blocks of a cluster with the same columns and the same K, which bring weights for each other."""

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return min(2, self.rows // 64)

    @property
    def tall(self) -> int:
        """How many times 64 rows each of them has."""
        return self.rows // 64 // self.groups

    @property
    def cluster(self) -> int:
        return self.parts * self.shared

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * LINE_BYTES

    @property
    def meeting_bytes(self) -> int:
        return 4 * self.rows * self.columns if self.parts > 1 else 0

    def _stages(self, beside: int) -> int:
        return min(MOST_STAGES, (SHARED_MEMORY - 1024 - beside) // (self.stage_bytes + BARRIER_BYTES))

    @property
    def is_apart(self) -> bool:
        return self._stages(self.meeting_bytes) >= STAGES_APART

    @property
    def stages(self) -> int:
        return self._stages(self.meeting_bytes if self.is_apart else 0)

    @property
    def shared_bytes(self) -> int:
        """The ring, which begins on a multiple of 1,024, and where parts meet."""
        ring = self.stages * (self.stage_bytes + BARRIER_BYTES)
        return ring + (self.meeting_bytes if self.is_apart else 0) + 1024

    @property
    def fits(self) -> bool:
        """Whether it can be compiled: a warp's rows end in one block, results leave through the ring."""
        leaving = (0 if self.is_apart else self.meeting_bytes) + self.rows // self.parts * (2 * self.columns + 16)
        is_even = self.rows % (16 * self.parts) == 0 and self.columns % (8 * self.shared) == 0
        return is_even and self.cluster <= MOST_CLUSTER and self.stages > 1 and self.stages * self.stage_bytes >= leaving

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return math.ceil(columns / self.columns), math.ceil(rows / self.rows / self.shared) * self.cluster

    def seconds(self, rows: int, columns: int, inner: int, multiprocessors: int) -> float:
        """What it should take: the longest of what multiplies, what comes out of the L2 cache and what comes into a block, for
        each wave of clusters; and the exchange."""
        across, down = self.grid(rows, columns)
        waves = math.ceil(across * down / self.cluster / (int(PLACED[self.cluster] * multiprocessors) // self.cluster))
        turns = math.ceil(math.ceil(inner / INNER) / self.parts)
        multiplying = turns * self.rows // 64 * 4 * self.columns / 2 / CLOCK
        arriving = turns * self.stage_bytes / BLOCK_BYTES_PER_CLOCK / CLOCK
        leaving = across * down / waves * turns * (self.rows + self.columns / self.shared) * LINE_BYTES / L2_BYTES_PER_S
        sent = self.meeting_bytes * (self.parts - 1) / self.parts / MEETING_BYTES_PER_CLOCK / CLOCK
        meeting = MEETING_S + sent if self.parts > 1 else 0.0
        return waves * (START_S + max(multiplying, arriving, leaving) + meeting)


class Stream(NamedTuple):
    """A residual stream, and what a product behind its next norm takes."""

    x_BE: Tensor
    scaled_BE: Tensor
    """x · the norm's gain."""
    squares_BP: Tensor
    """float32; what is left to be added up over P."""


class _Arguments(ctypes.Structure):
    """Aligned as `residual.cu`'s are."""

    _fields_ = [
        ("y", nvrtc.TensorMap),
        ("weight", nvrtc.TensorMap),
        *((name, c_void_p) for name in ("bias", "x", "gain", "sum", "scaled", "squares")),
        *((name, c_int) for name in ("rows", "columns", "inner", "unused")),
    ]


@cache
def cut_of(rows: int, columns: int, inner: int, multiprocessors: int) -> Cut:
    """The one that should take least."""
    return min(_cuts(), key=lambda cut: cut.seconds(rows, columns, inner, multiprocessors))


def _cuts() -> Iterator[Cut]:
    for height in HEIGHTS:
        for width in WIDTHS:
            for parts in PARTS:
                for shared in SHARED:
                    if (cut := Cut(height, width, parts, shared)).fits:
                        yield cut


def serves(weight: Tensor) -> bool:
    """Whether there is such a kernel for a device, a dtype, a shape and a place: the copy engine takes 16 bytes at a time."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    columns, inner = weight.shape
    is_placed = columns % 16 == 0 and inner % 8 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype is torch.bfloat16 and is_placed and weight.is_contiguous() and nvrtc.is_there()


def begun(x_BE: Tensor, gain_E: Tensor) -> Stream:
    """What the first product of a network takes, of a stream that no product has written."""
    B, E = x_BE.shape
    stream = Stream(x_BE, torch.empty_like(x_BE), x_BE.new_empty(B, 1, dtype=torch.float32))
    assert x_BE.is_contiguous()
    if B:
        _scale[(B,)](x_BE, gain_E, stream.scaled_BE, stream.squares_BP, E=E, BLOCK=triton.next_power_of_2(E), num_warps=4)
    return stream


def add_product(
    x_BE: Tensor, y_BK: Tensor, weight_EK: Tensor, bias_E: Tensor | None, gain_E: Tensor, cut: Cut | None = None
) -> Stream:
    """The stream x + y · weightᵀ. It begins before the launch in front of it has ended, and lets the one behind it begin."""
    (B, E), K, device = x_BE.shape, y_BK.shape[1], x_BE.device.index or 0
    cut = cut or cut_of(B, E, K, _multiprocessors(x_BE.device))
    squares_BP = x_BE.new_empty(B, math.ceil(E / cut.columns), dtype=torch.float32)
    out = Stream(torch.empty_like(x_BE), torch.empty_like(x_BE), squares_BP)
    assert len(y_BK) == B
    assert weight_EK.shape == (E, K)
    assert cut.fits
    vectors = [gain_E] if bias_E is None else [bias_E, gain_E]
    assert all(vector_E.shape == (E,) for vector_E in vectors)
    for tensor in (x_BE, y_BK, weight_EK, *vectors):
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
    assert E % 8 == 0
    assert K % 8 == 0
    arguments = _Arguments(
        nvrtc.tensor_map(y_BK, (cut.rows, INNER)),
        nvrtc.tensor_map(weight_EK, (cut.columns // cut.shared, INNER)),
        None if bias_E is None else bias_E.data_ptr(),
        *(tensor.data_ptr() for tensor in (x_BE, gain_E, *out)),
        B, E, K,
    )  # fmt: skip
    _kernel(cut, device).launch_grid(cut.grid(B, E), 128 * cut.groups + 32, arguments, device, early=True)
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(cut: Cut, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(cut), SOURCE.name, f"sm_{major}{minor}a", macros(cut))
        return nvrtc.Kernel(cubin, "residual", cut.shared_bytes)


def source(cut: Cut) -> str:
    """By the columns of a tile at once."""
    return hopper.source(SOURCE, cut.columns)


def macros(cut: Cut) -> dict[str, int]:
    return {
        "COLUMNS": cut.columns, "GROUPS": cut.groups, "TALL": cut.tall, "STAGES": cut.stages, "SHARED": cut.shared,
        "PARTS": cut.parts, "APART": int(cut.is_apart),
    }  # fmt: skip


@triton.jit
def _scale(x, gain, scaled, squares, E: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < E
    value = tl.load(x + row * E + column, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * E + column, (value * by).to(scaled.dtype.element_ty), mask=inside)
    tl.store(squares + row, tl.sum(value * value, axis=0))
