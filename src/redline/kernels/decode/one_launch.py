"""A decode step of few rows through the whole network in one launch, `one_launch.cu`: its sizes, its arguments, its launch.

With few rows a step takes as long as the weights take to come from memory, and, launch by launch, twice as long again for what
lies between the launches. Here blocks stay, and ask for the weights of what comes next while they wait for each other.

For Hopper, in bfloat16. This module needs CUDA; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels import nvrtc

MOST_ROWS = 32
"""Of activations that a thread has registers for."""
HALVES = (1, 2, 4)
"""What a kernel is compiled for, in halves of a tile of the tensor cores: 8, 16 or 32 rows."""
MOST_GROUPED = 8
"""Query heads of a key/value head: half a tile."""
MOST_PARTS = 16
"""Into which a row's context is cut."""
WARPS = 7
"""That work; one more asks for weights. These are `one_launch.cu`'s, and so is what follows."""
CHUNK = 32 * 28
"""Columns of a weight that go into a stage."""
STAGE_BYTES = 8 * (2 * CHUNK + 64)
MOST_TILES = 10
TILE_TOKENS = {64: 32, 128: 16}
"""Cached tokens of a tile, by head size."""
COPIED = 16
"""Of them at once, where a page does not have whole tiles."""
MOST_STAGES = 14
SETS = 4
COPIES = 2
SMALL = 1024
"""Hidden units of a model that spends most of a step between launches."""
IN_FLIGHT = 4
"""Stages asked for at once: more keep memory busier, and what blocks wait for stands in the same queues."""
PACE, PACED_BLOCKS = 1250, 132
"""Cycles from a stage of a whole chunk to the next, of such a model, and of how many blocks: those of an H200 ask for 3 of the
4.4 TB/s that its memory has. Fewer ask oftener."""
MOST_MEETING = 8
"""Blocks whose sums one adds up."""
SHARED_MEMORY = 227 * 1024 - 1024
ABSENT = -1
"""What a word says that nobody has written yet: one that no number is rounded to."""
SOURCE = Path(__file__).with_suffix(".cu")


@dataclass(slots=True, frozen=True)
class Shape:
    """Of a network, and of its cache."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    layers: int
    page: int
    head_norms: bool

    @property
    def grouped(self) -> int:
        return self.heads // self.kv_heads


class LayerTensors(NamedTuple):
    """In the order of `one_launch.cu`'s `Layer`."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    keys: Tensor
    values: Tensor


class _Arguments(ctypes.Structure):
    """Aligned as `one_launch.cu`'s are."""

    _fields_ = [
        ("cache", nvrtc.TensorMap),
        *((name, c_void_p) for name in ("cached", "layers", "embed", "norm", "head", "rotary", "tokens", "positions", "ahead")),
        *((name, c_void_p) for name in ("lines", "table", "sets", "logits", "parts", "partial")),
        *((name, c_int) for name in ("rows", "table_stride", "num_positions", "most_parts")),
        *((name, c_float) for name in ("eps", "scale")),
        ("unused", c_uint64 * 6),
    ]


def most_rows(shape: Shape) -> int:
    """Up to which it is the faster way, as measured on an H200 (`benchmarks/kernels/step_ways.py`): with few, more of a step
    lies between launches; with many, every block reads all their activations again and again. Beyond are those that ask for
    their weights first (`weights_first`)."""
    if shape.hidden < 2048:
        return 16 if shape.hidden <= SMALL and shape.head_dim == 64 else 8
    return 1 if shape.hidden > 2048 else 0


def serves(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is such a kernel. It wants a share in qkv, gate and up for every block: by these a block knows what others
    are through with."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return (
        dtype is torch.bfloat16
        and shape.head_dim in (64, 128)
        and shape.page % 16 == 0
        and shape.grouped <= MOST_GROUPED
        and all(size % 32 == 0 for size in (shape.hidden, shape.inner, shape.heads * shape.head_dim))
        and shape.vocab % 8 == 0
        and shape.layers >= SETS
        and min(heads, shape.inner) >= 8 * blocks
        and nvrtc.is_there()
    )


class OneLaunch:
    """The kernel for one network, and the memory between its phases. One step at a time."""

    def __init__(
        self,
        shape: Shape,
        layers: list[LayerTensors],
        cache: Tensor,
        embed: Tensor,
        norm: Tensor,
        head: Tensor,
        rotary: Tensor,
        eps: float,
    ) -> None:
        """The keys and values of all layers are parts of `cache`, which is contiguous. `rotary` is cos and sin
        [2, positions, D / 2]. All tensors stay where they are as long as this lives."""
        device = embed.device
        self._shape, self._device = shape, device
        self.most_rows = most_rows(shape)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._kept = (layers, embed, norm, head, rotary)
        pointers = [[address(tensor) for tensor in layer] for layer in layers]
        self._layers = torch.tensor(pointers, dtype=torch.int64).to(device)
        tile, rows_XD = TILE_TOKENS[shape.head_dim], cache.view(-1, shape.head_dim)
        assert len(rows_XD) < 2**31
        begin, end = cache.data_ptr(), cache.data_ptr() + cache.nbytes
        assert all(begin <= part.data_ptr() < end for layer in layers for part in (layer.keys, layer.values))
        self._map = nvrtc.tensor_map(rows_XD, (tile if shape.page % tile == 0 else COPIED, 64))
        self._cached = cache
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        width = heads + shape.heads * shape.head_dim + shape.inner + 2 * shape.hidden
        self._sets = torch.full((COPIES * (SETS + 2) * MOST_ROWS * width // 2,), ABSENT, dtype=torch.int32, device=device)
        pairs = 2 * MOST_ROWS * shape.kv_heads * MOST_PARTS * shape.grouped * shape.head_dim // 2
        self._parts = torch.full((4 * pairs,), ABSENT, dtype=torch.int32, device=device)
        partial = 2 * MOST_ROWS * 8 * math.ceil(shape.hidden / 8) * down_parts(shape, self._blocks)
        self._partial = torch.full((partial,), ABSENT, dtype=torch.int32, device=device)
        self._logits = torch.empty(MOST_ROWS, shape.vocab, dtype=embed.dtype, device=device)
        self._eps = eps

    def logits(
        self, tokens_B: Tensor, positions_B: Tensor, lines_B: Tensor, table_RM: Tensor, ahead_B: Tensor | None = None
    ) -> Tensor:
        """[B, V] of at most `MOST_ROWS` rows, until the next step. The tokens' keys and values are written to the cache. Beyond
        `most_rows` there are faster ways.

        `positions_B` is int64, -1 for a row that is not live; `lines_B` int32, each row's line of the block table. Several rows
        may be tokens of one line that follow on each other; `ahead_B`, int64, then says how many of them are in front."""
        B = len(tokens_B)
        assert B <= MOST_ROWS
        shape = self._shape
        _, embed, norm, head, rotary = self._kept
        halves = halves_of(B)
        kernel = _kernel(shape, halves, self._blocks, self._device.index or 0, ahead_B is not None)
        inputs = (self._cached, self._layers, embed, norm, head, rotary, tokens_B, positions_B, ahead_B, lines_B, table_RM)
        parts = max(1, min(MOST_PARTS, self._blocks // (B * shape.kv_heads)))
        kernel.launch(
            self._blocks,
            32 * (WARPS + 1),
            _Arguments(
                self._map,
                *(address(tensor) for tensor in (*inputs, self._sets, self._logits, self._parts, self._partial)),
                B, table_RM.stride(0), rotary.shape[1], parts, self._eps, shape.head_dim**-0.5 * math.log2(math.e),
            ),
            self._device.index or 0,
        )  # fmt: skip
        return self._logits[:B]


def halves_of(rows: int) -> int:
    return next(halves for halves in HALVES if 8 * halves >= rows)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def _kernel(shape: Shape, halves: int, blocks: int, device: int, has_ahead: bool) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    sizes = macros(shape, halves, blocks, has_ahead)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(SOURCE.read_text(), SOURCE.name, f"sm_{major}{minor}a", sizes)
        return nvrtc.Kernel(cubin, "decode_step", shared_bytes(shape, halves, sizes["STAGES"], has_ahead))


def macros(shape: Shape, halves: int, blocks: int, has_ahead: bool = False) -> dict[str, int]:
    """What the source is compiled with: as many stages as shared memory has room for."""
    stages = next(n for n in range(MOST_STAGES, 0, -1) if shared_bytes(shape, halves, n, has_ahead) <= SHARED_MEMORY)
    names = {"hidden": "E", "heads": "H", "kv_heads": "KV", "head_dim": "D", "vocab": "VOCAB"}
    sizes = {names.get(name, name.upper()): int(size) for name, size in asdict(shape).items()}
    pace = PACE * blocks // PACED_BLOCKS if shape.hidden <= SMALL else 0
    sizes |= {"IN_FLIGHT": IN_FLIGHT, "PACE": pace, "DOWN_PARTS": down_parts(shape, blocks)}
    sizes |= {"HALVES": halves, "STAGES": stages, "BLOCKS": blocks, "AHEAD": int(has_ahead)}
    return sizes | {"ARGUMENTS": ctypes.sizeof(_Arguments)}


def down_parts(shape: Shape, blocks: int) -> int:
    """Into how many parts the K of the product down is cut: as many as share its chunks evenly and let their sums meet once."""
    chunks, units = math.ceil(shape.inner / CHUNK), math.ceil(shape.hidden / 8)

    def meets_once(parts: int) -> bool:
        return chunks % parts == 0 and math.ceil(units / (blocks // parts)) <= MOST_TILES

    return max((parts for parts in range(2, min(MOST_MEETING, blocks) + 1) if meets_once(parts)), default=1)


def shared_bytes(shape: Shape, halves: int, stages: int, has_ahead: bool = False) -> int:
    """The ring, what the blocks' threads share, and the warps' sums."""
    pointers = shape.layers * len(LayerTensors._fields) + MOST_ROWS
    angles, unit = (8 * halves if has_ahead else 1) * 2 * shape.head_dim, 9 * 4
    small = stages * 16 + pointers * 8 + WARPS * (8 * halves + 16) * 4 + angles + unit
    sums = WARPS * max(MOST_TILES * 8 * halves * 8, shape.grouped * shape.head_dim) * 4
    return stages * STAGE_BYTES + -(-(small + 16) // 128) * 128 + sums
