"""Attention of a decode step whose keys and values stream through shared memory, `streamed.cu`: how the rows' contexts are
shared out, the kernel's arguments, its launch.

    positions ─► plan_step, once a step ─► items ─► streamed_attention, in every layer

An item is a share of a row's context, for all of its key/value heads. Shares are about as long as one another, so that rows of
any lengths keep all workers busy, and a row that is no longer than a share is not cut.

For Hopper, in bfloat16. This module needs CUDA; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels import nvrtc
from redline.kernels.decode import hopper

SOURCE = Path(__file__).with_suffix(".cu")
HEAD_SIZES = (64, 128)
MOST_GROUP = 8
"""Query heads of a key/value head: the columns of a product that has eight."""
TOKENS = 32
"""Of a stage; `streamed.cu`'s, as is what follows."""
COPIED = 16
"""Tokens that are copied at once."""
MOST_PARTS = 16
"""Of a row's context: one warp adds them up."""
LEAST_STAGES = 4
"""Of a share: a shorter one takes longer to begin and to end than to read."""
FEWEST_SHARES = 512
"""That the rows of a step must allow for to be worth it: about half as many as a Hopper has workers."""
MOST_ROWS = 4096
WARPS = 8
"""Of a block."""
STAGES = {64: 2, 128: 1}
"""Of each warp's ring, by head size."""


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    head_dim: int
    group: int
    """Query heads of a key/value head."""
    page: int
    head_norms: bool

    @property
    def stages(self) -> int:
        """Of each warp's ring."""
        return STAGES[self.head_dim]

    @property
    def shared_bytes(self) -> int:
        """The rings, which begin on a multiple of 1,024."""
        return WARPS * self.stages * 2 * TOKENS * self.head_dim * 2 + 1024


@dataclass(slots=True, frozen=True)
class Plan:
    """Who attends to what in a step; the same for all layers."""

    items_I4: Tensor
    """int32: entry of the batch, line of the block table, position of the new token (-1: a row that is not live), and part +
    parts · 65,536. Where no item is, the entry is -1."""
    table_RM: Tensor
    """int32: the block table."""
    parts: Tensor
    """float32: where the parts of a row meet; room for the items of all rows that are cut."""
    arrived: Tensor
    """int32, zeros between two launches."""


class _Arguments(ctypes.Structure):
    """Aligned as `streamed.cu`'s are."""

    _fields_ = [
        ("keys", nvrtc.TensorMap),
        ("values", nvrtc.TensorMap),
        *((name, c_void_p) for name in ("heads", "q_norm", "k_norm", "rotary", "out", "new_keys", "new_values")),
        *((name, c_void_p) for name in ("table", "items", "parts", "arrived")),
        ("scale", c_float),
        ("eps", c_float),
        *((name, c_int) for name in ("kv_heads", "most_items", "table_stride", "num_positions", "is_stored", "unused")),
        ("more", c_uint64 * 1),
    ]


def serves(head_dim: int, heads: int, kv_heads: int, page: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is such a kernel for a network, a cache and a device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    fits = head_dim in HEAD_SIZES and heads // kv_heads <= MOST_GROUP and page % COPIED == 0
    return fits and dtype is torch.bfloat16 and nvrtc.is_there()


def plan_step(positions_B: Tensor, lines_B: Tensor, table_RM: Tensor, arrived: Tensor, kv_heads: int, head_dim: int) -> Plan:
    """Share the contexts of a batch out among all workers of the device. `arrived` is int32 zeros, one for each row and
    key/value head.

    Shares are as long as all stages divided by the workers that each key/value head has, so there are at most as many items as
    these and the rows, and at most twice as many of rows that are cut as of workers.

    A launch that waits for this one must stand between it and the first that begins early, such as that of the embeddings."""
    (B,) = positions_B.shape
    shares = max(1, WARPS * _multiprocessors(positions_B.device) // kv_heads)
    assert B <= MOST_ROWS
    assert len(arrived) >= B * kv_heads
    items_I4 = lines_B.new_empty(B + shares, 4, dtype=torch.int32)
    _plan[(1,)](
        positions_B, lines_B, items_I4, B, shares, len(items_I4), TOKENS=TOKENS, LEAST=LEAST_STAGES, PARTS=MOST_PARTS,
        BLOCK=triton.next_power_of_2(B), ITEMS=triton.next_power_of_2(len(items_I4)), num_warps=8,
    )  # fmt: skip
    most_cut = min(len(items_I4), 2 * shares)
    parts = torch.empty(most_cut * kv_heads * (head_dim // 16 + 1) * 128, dtype=torch.float32, device=lines_B.device)
    return Plan(items_I4, table_RM, parts, arrived)


def streamed_attention(
    heads_BND: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    rotary: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    norm_eps: float = 0.0,
    *,
    is_stored: bool = False,
) -> Tensor:
    """`attention.decode_attention` of a planned step, without prefixes: [B, H, D]. It begins before the launch in front of it
    has ended, and asks for cached tokens at once, which that launch must not write. With `is_stored` it waits: that launch
    writes the new tokens' keys and values to their pages, so several rows may be tokens of one line."""
    (blocks, K, page, D), (B, N, _) = keys.shape, heads_BND.shape
    assert all(tensor.is_contiguous() for tensor in (heads_BND, keys, values))
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (heads_BND, keys, values))
    assert plan.table_RM.stride(1) == 1
    shape = Shape(D, N // K - 2, page, norms is not None)
    out_BHD = heads_BND.new_empty(B, N - 2 * K, D)
    q_norm, k_norm = (None, None) if norms is None else (norm.data_ptr() for norm in norms)
    device = heads_BND.device.index or 0
    box = (COPIED, 64)
    arguments = _Arguments(
        nvrtc.tensor_map(keys.view(blocks * K * page, D), box), nvrtc.tensor_map(values.view(blocks * K * page, D), box),
        heads_BND.data_ptr(), q_norm, k_norm, rotary.data_ptr(), out_BHD.data_ptr(), keys.data_ptr(), values.data_ptr(),
        plan.table_RM.data_ptr(), plan.items_I4.data_ptr(), plan.parts.data_ptr(), plan.arrived.data_ptr(),
        D**-0.5 * math.log2(math.e), norm_eps, K, len(plan.items_I4), plan.table_RM.stride(0), rotary.shape[1], int(is_stored),
    )  # fmt: skip
    _kernel(shape, device).launch_grid((_multiprocessors(heads_BND.device), 1), 32 * WARPS, arguments, device, early=True)
    return out_BHD


@triton.jit(do_not_specialize=["B", "shares", "most_items"])
def _plan(  # type: ignore[no-untyped-def]
    positions, lines, items, B, shares, most_items,
    TOKENS: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """One program: the items of all rows, first those that are cut."""
    row_B = tl.arange(0, BLOCK)
    inside_B = row_B < B
    position_B = tl.load(positions + row_B, mask=inside_B, other=-1).to(tl.int32)
    line_B = tl.load(lines + row_B, mask=inside_B, other=0)
    stages_B = (position_B + TOKENS) // TOKENS
    longest = tl.max(stages_B, axis=0)
    share = tl.maximum(tl.maximum(tl.cdiv(tl.sum(stages_B, axis=0), shares), LEAST), tl.cdiv(longest, PARTS))
    # Rows that occupy a quarter of the workers keep memory busy; where they are about equally long, cutting them gains nothing.
    alive = tl.sum((stages_B > 0).to(tl.int32), axis=0)
    share = tl.where((4 * alive >= shares) & (alive * longest * 2 <= 3 * tl.sum(stages_B, axis=0)), longest, share)
    share = tl.maximum(share, 1)
    parts_B = tl.where(inside_B, tl.maximum(tl.cdiv(stages_B, share), 1), 0)
    is_cut_B = parts_B > 1
    cut_B = tl.where(is_cut_B, parts_B, 0)
    whole_B = parts_B - cut_B
    first_B = tl.where(is_cut_B, tl.cumsum(cut_B, axis=0) - cut_B, tl.sum(cut_B, axis=0) + tl.cumsum(whole_B, axis=0) - whole_B)
    for part in range(tl.max(parts_B, axis=0)):
        has_B = part < parts_B
        at_B = (first_B + part) * 4
        tl.store(items + at_B, row_B, mask=has_B)
        tl.store(items + at_B + 1, line_B, mask=has_B)
        tl.store(items + at_B + 2, position_B, mask=has_B)
        tl.store(items + at_B + 3, part + parts_B * 65536, mask=has_B)
    item_I = tl.arange(0, ITEMS)
    tl.store(items + item_I * 4, -1, mask=(item_I >= tl.sum(parts_B, axis=0)) & (item_I < most_items))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(shape: Shape, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cubin = nvrtc.compiled(source(), SOURCE.name, f"sm_{major}{minor}a", macros(shape))
        return nvrtc.Kernel(cubin, "attend", shape.shared_bytes)


def source() -> str:
    return f"constexpr int BYTES = 2;\n{hopper.COMMON.read_text()}\n{SOURCE.read_text()}"


def macros(shape: Shape) -> dict[str, int]:
    return {
        "D": shape.head_dim, "G": shape.group, "PAGE": shape.page, "WARPS": WARPS, "STAGES": shape.stages,
        "HEAD_NORMS": int(shape.head_norms),
    }  # fmt: skip
