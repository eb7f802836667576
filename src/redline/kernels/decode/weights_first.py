"""Products of a decode step of some rows, `weights_first.cu`: how they are cut, their arguments, their launch.

Each is one launch that asks for its weights while those in front of it still run: what lies between two products of so few rows
hardly reads, and leaves the bandwidth to them. Norms between them are part of them, as in `residual.py` and `normed.py`, whose
stream they read and write. For Hopper, in bfloat16, or from factors in 8 bits to bfloat16. This module needs CUDA; only code
that runs on a CUDA device may import it.
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
from redline.kernels.decode import hopper
from redline.kernels.decode.hopper import BARRIER_BYTES, LINE_BYTES
from redline.kernels.decode.residual import Stream

SOURCE = Path(__file__).with_suffix(".cu")
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
"""Of both factors."""
MOST_ROWS, WIDE_ROWS, GATED_ROWS = 128, 64, 64
"""Beyond these others are as fast (`parts`, `gated`): all products; those of a wide network; gate and up of a narrow one."""
WIDE = 1025
"""Hidden units."""
HALF_ROOM, ROOM = 100 * 1024, 200 * 1024
"""Shared memory for a block: where two fit, one may be the next launch's."""
PLACED = 0.85
"""Of multiprocessors, those that clusters of blocks with all the room find: they do not divide the device evenly."""
FEW_ROWS = 16
"""So few take little of a stage, and half of the room holds weights enough."""
TALL_ROWS = 32
"""More of them than this are brought to two warpgroups at once, where products have many tiles."""
MANY_TILES = 1.5
"""High tiles of gate and up, for each multiprocessor, from which they are the better ones."""
TURNS = 3
"""Of 128 bytes of K, at least, in a part."""
SHORT_TURNS = 8
"""Lines of K that gate and up are not cut along, in 8 bits."""


class Cut(NamedTuple):
    """How a product is cut and compiled."""

    rows: int
    """Of x, rounded up to 8."""
    tall: int
    """How many times 64 rows of weights a block has."""
    parts: int
    """Blocks of a cluster, which share the K of a tile that is cut."""
    is_gated: bool
    room: int
    number_bytes: int = 2
    """Of x and of the weights: 2 in bfloat16, 1 in e4m3."""
    norm: str = "none"
    """What it does of the norms around it: "before", "behind" or "none"."""

    @property
    def inner(self) -> int:
        """Of K, in a stage."""
        return LINE_BYTES // self.number_bytes

    @property
    def columns(self) -> int:
        """Of the result, in a block."""
        return 64 * self.tall // (2 if self.is_gated else 1)

    @property
    def stage_bytes(self) -> int:
        return (64 * self.tall + self.rows) * LINE_BYTES

    @property
    def meeting_bytes(self) -> int:
        return math.ceil(self.rows / 8 / self.parts) * self.parts * self.tall * 128 * 16 if self.parts > 1 else 0

    @property
    def beside_bytes(self) -> int:
        """Squares of each warp's columns, or what each row is multiplied by."""
        return {"none": 0, "before": 1, "behind": 4 * self.tall}[self.norm] * self.rows * 4

    @property
    def stages(self) -> int:
        return (self.room - 1024 - self.meeting_bytes - self.beside_bytes) // (self.stage_bytes + BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        """The ring, which begins on a multiple of 1,024, where parts meet, and what norms take."""
        return self.stages * (self.stage_bytes + BARRIER_BYTES) + self.meeting_bytes + self.beside_bytes + 1024

    @property
    def threads(self) -> int:
        """Those that multiply, the warp that brings, and two that look at a norm's squares."""
        return 128 * self.tall + (96 if self.norm == "before" else 32)

    def tiles(self, columns: int) -> int:
        return math.ceil(columns / self.columns)

    def whole(self, columns: int, multiprocessors: int) -> int:
        """Tiles that are not cut: as many for every multiprocessor."""
        tiles = self.tiles(columns)
        return tiles if self.parts == 1 else tiles // multiprocessors * multiprocessors // self.parts * self.parts


class _Arguments(ctypes.Structure):
    """Aligned as `weights_first.cu`'s are."""

    _fields_ = [
        ("x", nvrtc.TensorMap),
        ("weight", nvrtc.TensorMap),
        ("bias", c_void_p),
        ("out", c_void_p),
        *((name, c_void_p) for name in ("x_scale", "weight_scale", "stream", "gain", "scaled", "squares")),
        *((name, c_int) for name in ("rows", "columns", "inner", "whole", "tiles")),
        ("eps", c_float),
        ("more", c_uint64 * 5),
    ]


@cache
def cut_of(
    rows: int,
    columns: int,
    inner: int,
    multiprocessors: int,
    *,
    is_gated: bool = False,
    number_bytes: int = 2,
    norm: str = "none",
) -> Cut:
    """As measured on an H200 for models with 0.5 to 14 billion parameters in bfloat16, and 0.5 and 7 in 8 bits: low tiles, two
    on a multiprocessor, unless few high ones or few with much room do as well."""
    turns = math.ceil(inner * number_bytes / LINE_BYTES)
    low = math.ceil(columns / (32 if is_gated else 64))
    high, alone = math.ceil(low / 2), int(PLACED * multiprocessors)
    parts = _parts(low, 2 * multiprocessors, multiprocessors, turns)

    def cut(tall: int, parts: int, room: int) -> Cut:
        return Cut(math.ceil(rows / 8) * 8, tall, parts, is_gated, room, number_bytes, norm)

    if is_gated and number_bytes == 1 and turns <= SHORT_TURNS:
        return cut(1, 1, HALF_ROOM)
    if is_gated and high >= MANY_TILES * multiprocessors:
        return cut(2, min(3, _parts(high, alone, multiprocessors, turns)), ROOM)
    if is_gated or rows <= FEW_ROWS:
        return cut(1, parts, HALF_ROOM)
    if low * min(parts, 3) <= alone:
        return cut(1, min(parts, alone // low), ROOM)
    if rows > TALL_ROWS or number_bytes == 1:
        return cut(2, _parts(high, alone, multiprocessors, turns), ROOM)
    return cut(1, parts, HALF_ROOM)


def _parts(tiles: int, places: int, multiprocessors: int, turns: int) -> int:
    """Of tiles fewer than multiprocessors, as many as have a place at once; of more, as many as end those left over soonest."""
    most = min(8 if 8 * tiles <= multiprocessors else 4, max(1, turns // TURNS))
    if tiles < multiprocessors:
        return max(1, min(most, places // tiles))
    left = tiles % multiprocessors
    return min(range(1, most + 1), key=lambda parts: (math.ceil(left * parts / multiprocessors) / parts, parts))


def serves(weight: Tensor) -> bool:
    """Whether there is such a kernel for a device, a dtype, a shape and a place: the copy engine takes 16 bytes at a time."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    columns, inner = weight.shape
    is_placed = columns % 16 == 0 and inner * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    return weight.dtype in DTYPES and is_placed and weight.is_contiguous() and nvrtc.is_there()


def product(
    x_BK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    is_gated: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x · weightᵀ, [B, N]; gated, silu(gate) · up of its two halves, [B, N / 2], without a bias. From factors in 8 bits it is
    in bfloat16, and takes what each of the two is to be multiplied by, float32. It begins before the launch in front of it has
    ended, and lets the one behind it begin."""
    (B, K), N = x_BK.shape, len(weight_NK) // (2 if is_gated else 1)
    multiprocessors = _multiprocessors(x_BK.device)
    cut = cut_of(B, N, K, multiprocessors, is_gated=is_gated, number_bytes=x_BK.element_size())
    return product_as(x_BK, weight_NK, bias_N, cut, scales)


def product_as(
    x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, cut: Cut, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The same, cut like this."""
    assert (scales is None) == (cut.number_bytes == 2)
    assert all(scale.dtype is torch.float32 and scale.numel() == 1 for scale in scales or ())
    out_BN = _room(x_BK, weight_NK, cut)
    _launch(cut, x_BK, weight_NK, bias_N, out_BN, scales=scales or (None, None))
    return out_BN


def normed_product(
    stream: Stream,
    eps: float,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    is_gated: bool = False,
    cut: Cut | None = None,
) -> Tensor:
    """norm(x) · weightᵀ, [B, N]; gated, silu(gate) · up of its two halves, [B, N / 2]. It begins, and lets the next begin, as
    `product` does."""
    (B, K), N = stream.scaled_BE.shape, len(weight_NK) // (2 if is_gated else 1)
    cut = cut or cut_of(B, N, K, _multiprocessors(weight_NK.device), is_gated=is_gated, norm="before")
    squares_BP = stream.squares_BP
    assert cut.norm == "before"
    assert len(squares_BP) == B
    assert squares_BP.dtype is torch.float32
    assert squares_BP.is_contiguous()
    out_BN = _room(stream.scaled_BE, weight_NK, cut)
    _launch(cut, stream.scaled_BE, weight_NK, bias_N, out_BN, squares=squares_BP, eps=eps)
    return out_BN


def add_product(
    x_BE: Tensor, y_BK: Tensor, weight_EK: Tensor, bias_E: Tensor | None, gain_E: Tensor, cut: Cut | None = None
) -> Stream:
    """The stream x + y · weightᵀ, of which `gain_E` is the next norm's. It begins, and lets the next begin, as `product`
    does."""
    B, E = x_BE.shape
    cut = cut or cut_of(B, E, y_BK.shape[1], _multiprocessors(x_BE.device), norm="behind")
    out = Stream(
        _room(y_BK, weight_EK, cut), torch.empty_like(x_BE), x_BE.new_empty(B, math.ceil(E / cut.columns), dtype=torch.float32)
    )
    assert cut.norm == "behind"
    assert len(y_BK) == B
    assert E % 16 == 0
    assert all(tensor.data_ptr() % 4 == 0 for tensor in (x_BE, gain_E))
    assert x_BE.is_contiguous()
    assert x_BE.dtype is gain_E.dtype is torch.bfloat16
    assert gain_E.shape == (E,)
    assert gain_E.is_contiguous()
    assert len(weight_EK) == E
    sum_BE, scaled_BE, squares_BP = out
    _launch(cut, y_BK, weight_EK, bias_E, sum_BE, stream=x_BE, gain=gain_E, scaled=scaled_BE, squares=squares_BP)
    return out


def _room(x_BK: Tensor, weight_NK: Tensor, cut: Cut) -> Tensor:
    """[B, columns of the result]."""
    return x_BK.new_empty(len(x_BK), len(weight_NK) // (2 if cut.is_gated else 1), dtype=torch.bfloat16)


def _launch(
    cut: Cut,
    x_BK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_BN: Tensor,
    *,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    stream: Tensor | None = None,
    gain: Tensor | None = None,
    scaled: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    (B, K), N, device = x_BK.shape, out_BN.shape[1], x_BK.device.index or 0
    assert x_BK.is_contiguous()
    assert x_BK.dtype is weight_NK.dtype
    assert x_BK.dtype in DTYPES
    assert x_BK.element_size() == cut.number_bytes
    assert 0 < B <= cut.rows
    assert weight_NK.shape[1] == K
    if bias_N is not None:
        assert not cut.is_gated
        assert bias_N.dtype is torch.bfloat16
        assert bias_N.shape == (N,)
        assert bias_N.is_contiguous()
    whole = cut.whole(N, _multiprocessors(x_BK.device))
    given = (bias_N, out_BN, *scales, stream, gain, scaled, squares)
    arguments = _Arguments(
        nvrtc.tensor_map(x_BK, (cut.rows, cut.inner)),
        _weight_map(weight_NK, cut),
        *(None if tensor is None else tensor.data_ptr() for tensor in given),
        B, N, K, whole, 0 if squares is None else squares.shape[1], eps,
    )  # fmt: skip
    grid = (cut.tiles(N) - whole + whole // cut.parts, cut.parts)
    _kernel(cut, device).launch_grid(grid, cut.threads, arguments, device, early=True)


def _weight_map(weight_NK: Tensor, cut: Cut) -> ctypes.Array[c_uint64]:
    """Of gate and up eight rows in turn, so that both numbers of a column end in one thread: the map's second stride is its
    longest."""
    if not cut.is_gated:
        return nvrtc.tensor_map(weight_NK, (64 * cut.tall, cut.inner))
    N, K = weight_NK.shape
    return nvrtc.tensor_map(weight_NK.view(2, N // 16, 8, K).transpose(0, 1), (4 * cut.tall, 2, 8, cut.inner))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(cut: Cut, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(cut), SOURCE.name, f"sm_{major}{minor}a", macros(cut))
        return nvrtc.Kernel(cubin, "product", cut.shared_bytes)


def source(cut: Cut) -> str:
    """By all rows of x at once."""
    return hopper.source(SOURCE, cut.rows, cut.number_bytes)


def macros(cut: Cut) -> dict[str, int]:
    return {
        "ROWS": cut.rows, "TALL": cut.tall, "STAGES": cut.stages, "PARTS": cut.parts, "GATED": int(cut.is_gated),
        "ADDED": int(cut.norm == "behind"), "NORMED": int(cut.norm == "before"),
    }  # fmt: skip
