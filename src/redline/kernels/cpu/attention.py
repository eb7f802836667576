"""Attention over packed segments on a CPU, in float32 and bfloat16, with gradients: `attention.c`.

Segments are read where they lie, nothing is padded, and no scores are kept: for the backward pass there are the outputs and a
number for each token and head.
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


@cache
def _functions(dtype: torch.dtype) -> Any | None:
    compiled = library(SOURCE, f"-DBFLOAT16={DTYPES[dtype]}")
    if compiled is None:
        return None
    sizes = [*[c_long] * 8, c_int]
    compiled.desk_size.argtypes, compiled.desk_size.restype = [c_long] * 3, c_long
    compiled.attention.argtypes = [*[c_void_p] * 8, *sizes]
    compiled.attention_backward.argtypes = [*[c_void_p] * 13, *sizes]
    return compiled


class Families:
    """The segments of a packed batch, each that continues none with those that continue it; and room to work in."""

    def __init__(self, segments: Segments) -> None:
        lengths, roots = (
            segments.lengths,
            np.where(segments.parents == NO_PARENT, np.arange(len(segments.parents)), segments.parents),
        )
        work = np.bincount(roots, lengths * (segments.parent_lengths + lengths), minlength=len(roots))
        is_root = segments.parents == NO_PARENT
        # The families with most work first: those at the end go to whoever is free.
        order = np.lexsort((np.arange(len(roots)), ~is_root, roots, -work[roots]))
        self._segments = torch.from_numpy(np.stack([segments.offsets[:-1], lengths], axis=1)[order])
        self._families = torch.from_numpy(np.append(np.flatnonzero(is_root[order]), len(order)))
        self._longest = tuple(int(lengths[which].max(initial=0)) for which in (is_root, ~is_root))
        self._room: Tensor | None = None

    def serves(self, q_THD: Tensor, k_TKD: Tensor) -> bool:
        return q_THD.is_cpu and q_THD.dtype is k_TKD.dtype and is_there(q_THD.dtype, q_THD.shape[2])

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        given = (q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous())
        return _Attention.apply(self, *given) if torch.is_grad_enabled() else self.forward(*given)[0]

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the logarithms of sums, [H, T]."""
        T, H, _ = q_THD.shape
        out_THD, log_sums_HT = torch.empty_like(q_THD), q_THD.new_empty(H, T, dtype=torch.float32)
        self._call("attention", (q_THD, k_TKD, v_TKD, out_THD), log_sums_HT)
        return out_THD, log_sums_HT

    def backward(
        self, grad_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, log_sums_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = (torch.empty_like(each) for each in (q_THD, k_TKD, v_TKD))
        parts = self._parts(q_THD.shape[1], k_TKD.shape[1])
        summed = log_sums_HT.new_empty(0 if parts == 1 else 2 * parts * k_TKD.numel())
        given = (q_THD, k_TKD, v_TKD, out_THD, grad_THD.contiguous(), grad_q, grad_k, grad_v)
        self._call("attention_backward", given, log_sums_HT, summed)
        return grad_q, grad_k, grad_v

    def _parts(self, H: int, K: int) -> int:
        """Tasks that a head of keys is shared out to in each family: its query heads, where there would be too few."""
        return 1 if (len(self._families) - 1) * K >= ENOUGH * torch.get_num_threads() else H // K

    def _call(self, name: str, given: tuple[Tensor, ...], *in_float32: Tensor) -> None:
        """Addresses are all that the C is given: it reads on where a tensor ends, and other types as its own."""
        q_THD, k_TKD, v_TKD = given[:3]
        (T, H, D), K = q_THD.shape, k_TKD.shape[1]
        assert k_TKD.shape == v_TKD.shape == (T, K, D)
        assert H % K == 0
        assert all(each.is_contiguous() and each.dtype is q_THD.dtype for each in given)
        functions, threads = _functions(q_THD.dtype), torch.get_num_threads()
        assert functions is not None
        numbers = threads * functions.desk_size(*self._longest, D)
        if self._room is None or self._room.numel() < numbers:
            self._room = torch.empty(numbers, dtype=torch.float32)
        tensors = (*given, *in_float32, self._segments, self._families, self._room)
        sizes = (T, H, K, D, self._parts(H, K), len(self._families) - 1, *self._longest)
        getattr(functions, name)(*(each.data_ptr() for each in tensors), *sizes, threads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, families: Families, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_THD, log_sums_HT = families.forward(q_THD, k_TKD, v_TKD)
        ctx.families = families
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, log_sums_HT)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> Any:
        check_once()
        return None, *ctx.families.backward(grad_THD, *ctx.saved_tensors)
