"""The checksum of a run of 64-bit words in one pass, as a Triton kernel. `weight_sync/verify.py` defines it, and does the same
in torch. This module needs triton; only code that runs on a CUDA device may import it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TURN = 2048
"""Words of one turn: 16 KiB."""
TURNS = 16
"""Turns of one program, so that a bucket of 512 MiB has 2048 sums."""
PROGRAM = TURN * TURNS
"""Words of one program: a block of `weight_sync/verify.py`."""
STRIDE = tl.constexpr(0x9E3779B97F4A7C15)
TURN_STRIDE = tl.constexpr(TURN * 0x9E3779B97F4A7C15 % 2**64)
FACTOR = tl.constexpr(0xD6E8FEB86659FD93)


def mixed_sums(words_N: Tensor) -> Tensor:
    """Return Σ mix(word_i + (i + 1) · STRIDE) modulo 2⁶⁴ over each block of words, where i counts from the first word of all:
    int64[blocks], on the device."""
    assert words_N.dtype == torch.int64
    assert words_N.is_contiguous()
    count = words_N.numel()
    programs = triton.cdiv(count, PROGRAM)
    partial_P = torch.empty(programs, dtype=torch.int64, device=words_N.device)
    _mixed_sum[(programs,)](words_N, partial_P, count, N=TURN, T=TURNS, num_warps=8)
    return partial_P


@triton.jit
def _mixed_sum(words, partial, count, N: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * (T * N)
    lanes = tl.arange(0, N).to(tl.int64)
    place = (first + lanes + 1).to(tl.uint64) * STRIDE  # products are dear: later turns add to it
    sums = tl.zeros([N], dtype=tl.uint64)
    for turn in range(T):
        index = first + turn * N + lanes
        word = tl.load(words + index, mask=index < count, other=0)
        x = word.to(tl.uint64, bitcast=True) + place
        x = (x ^ (x >> 32)) * FACTOR
        x = (x ^ (x >> 32)) * FACTOR
        x = x ^ (x >> 32)
        sums += tl.where(index < count, x, 0)
        place += TURN_STRIDE
    tl.store(partial + tl.program_id(0), tl.sum(sums, axis=0).to(tl.int64, bitcast=True))
