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


def weighted_sums(words_N: Tensor) -> Tensor:
    """Return Σ word_i · (2 i + 1) modulo 2⁶⁴ over each block of words, where i counts from the first word of all:
    int64[blocks], on the device."""
    assert words_N.dtype == torch.int64
    assert words_N.is_contiguous()
    count = words_N.numel()
    programs = triton.cdiv(count, PROGRAM)
    partial_P = torch.empty(programs, dtype=torch.int64, device=words_N.device)
    _weighted_sum[(programs,)](words_N, partial_P, count, N=TURN, T=TURNS, num_warps=8)
    return partial_P


@triton.jit
def _weighted_sum(words, partial, count, N: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([N], dtype=tl.int64)
    for turn in range(T):
        index = (program * T + turn) * N + tl.arange(0, N).to(tl.int64)
        word = tl.load(words + index, mask=index < count, other=0)
        sums += word * (2 * index + 1)
    tl.store(partial + program, tl.sum(sums, axis=0))
