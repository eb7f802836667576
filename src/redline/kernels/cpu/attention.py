"""Attention over packed segments on a CPU, in float32 and bfloat16, with gradients: `attention.c`.

Segments are read where they lie, nothing is padded, and no scores are kept: the backward pass computes them again, with two
numbers of each token and head.
"""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.kernels.cpu.compiled import DTYPES, library
from redline.kernels.cpu.training import check_once
from redline.kernels.segments import NO_PARENT, Segments

SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
"""Numbers that heads are multiples of."""
ENOUGH = 4
"""Tasks of a thread, that none is long without one."""


def is_there(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there are functions for such heads. Compiles them when it is first asked."""
    return dtype in DTYPES and head_dim % LANES == 0 and _functions(dtype) is not None


def room_bytes(dtype: torch.dtype, longest_first: int, longest_next: int, head_dim: int, threads: int) -> int:
    """What a call works in, for segments up to these lengths: those that continue none, and others."""
    functions = _functions(dtype)
    return 0 if functions is None else 4 * threads * int(functions.desk_size(longest_first, longest_next, head_dim))


@cache
def _functions(dtype: torch.dtype) -> Any | None:
    compiled = library(SOURCE, f"-DBFLOAT16={DTYPES[dtype]}")
    if compiled is None:
        return None
    sizes = [*[c_long] * 8, c_int]
    compiled.desk_size.argtypes, compiled.desk_size.restype = [c_long] * 3, c_long
    compiled.attention.argtypes = [*[c_void_p] * 8, *sizes]
    compiled.attention_backward.argtypes = [*[c_void_p] * 12, *sizes]
    return compiled


class Families:
    """The segments of a packed batch, each that continues none with those that continue it."""

    def __init__(self, segments: Segments) -> None:
        lengths, is_root = segments.lengths, segments.parents == NO_PARENT
        roots = np.where(is_root, np.arange(len(lengths)), segments.parents)
        work = np.bincount(roots, lengths * (segments.parent_lengths + lengths), minlength=len(roots))
        # The families with most work first: those at the end go to whoever is free.
        order = np.lexsort((np.arange(len(roots)), ~is_root, roots, -work[roots]))
        self._segments = torch.from_numpy(np.stack([segments.offsets[:-1], lengths], axis=1)[order])
        self._families = torch.from_numpy(np.append(np.flatnonzero(is_root[order]), len(order)))
        self._longest_first, self._longest_next = (int(lengths[which].max(initial=0)) for which in (is_root, ~is_root))
        self._num_tokens = int(segments.offsets[-1])

    def serves(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> bool:
        """Whether there are functions for these. Compiles them when it is first asked."""
        is_one_kind = q_THD.dtype is k_TKD.dtype is v_TKD.dtype and k_TKD.shape == v_TKD.shape
        return q_THD.is_cpu and is_one_kind and is_there(q_THD.dtype, q_THD.shape[2])

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        given = (q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous())
        return _Attention.apply(self, *given) if torch.is_grad_enabled() else self.forward(*given)[0]

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs; and of each row of scores the largest, and what e to the scores less it sums to, [H, T, 2]."""
        T, H, _ = q_THD.shape
        out_THD, rows_HT2 = torch.empty_like(q_THD), q_THD.new_empty(H, T, 2, dtype=torch.float32)
        self._call("attention", (q_THD, k_TKD, v_TKD, out_THD), (rows_HT2,), self._parts(q_THD, k_TKD))
        return out_THD, rows_HT2

    def backward(
        self, grad_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rows_HT2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = (torch.empty_like(each) for each in (q_THD, k_TKD, v_TKD))
        parts = self._parts(q_THD, k_TKD)
        summed = rows_HT2.new_empty(0 if parts == 1 else 2 * parts * k_TKD.numel())
        given = (q_THD, k_TKD, v_TKD, grad_THD.contiguous(), grad_q, grad_k, grad_v)
        self._call("attention_backward", given, (rows_HT2, summed), parts)
        return grad_q, grad_k, grad_v

    def _parts(self, q_THD: Tensor, k_TKD: Tensor) -> int:
        """Tasks that a head of keys is shared out to in each family: its query heads, where there would be too few."""
        H, K = q_THD.shape[1], k_TKD.shape[1]
        return 1 if (len(self._families) - 1) * K >= ENOUGH * torch.get_num_threads() else H // K

    def _call(self, name: str, given: tuple[Tensor, ...], in_float32: tuple[Tensor, ...], parts: int) -> None:
        """Addresses are all that the C is given: it reads on where a tensor ends, and other types as its own."""
        q_THD, k_TKD, v_TKD = given[:3]
        (T, H, D), K, families = q_THD.shape, k_TKD.shape[1], len(self._families) - 1
        assert self._num_tokens == T
        assert k_TKD.shape == v_TKD.shape == (T, K, D)
        assert H % K == 0
        assert all(each.is_cpu and each.is_contiguous() and each.dtype is q_THD.dtype for each in given)
        functions, threads = _functions(q_THD.dtype), min(torch.get_num_threads(), max(1, families * K * parts))
        longest = (self._longest_first, self._longest_next)
        room = torch.empty(room_bytes(q_THD.dtype, *longest, D, threads), dtype=torch.uint8, device="cpu")
        pointers = [each.data_ptr() for each in (*given, *in_float32, self._segments, self._families, room)]
        getattr(functions, name)(*pointers, T, H, K, D, parts, families, *longest, threads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, families: Families, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_THD, rows_HT2 = families.forward(q_THD, k_TKD, v_TKD)
        ctx.families = families
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, rows_HT2)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> Any:
        check_once()
        return None, *ctx.families.backward(grad_THD, *ctx.saved_tensors)
