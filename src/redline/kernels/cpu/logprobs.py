"""The passes over a chunk of logits on a CPU, in C: `logprobs.c`. What `trainer/loss/logprobs.py` does in torch, which takes a
dozen passes and two float32 copies."""

from __future__ import annotations

from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import DTYPES, library

SOURCE = Path(__file__).with_suffix(".c")


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these functions take such logits. Compiles them when it is first asked."""
    return device.type == "cpu" and dtype in DTYPES and _functions(dtype) is not None


def summarise(logits_MV: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, entropy, and the log of the normalizer: float32[M] each."""
    logprobs_M, entropies_M, normalizers_M = torch.empty((3, len(logits_MV)), dtype=torch.float32)
    _call("summarise", logits_MV, targets_M, (logprobs_M, entropies_M, normalizers_M), temperature)
    return logprobs_M, entropies_M, normalizers_M


def to_gradient_(
    logits_MV: Tensor,
    targets_M: Tensor,
    summary: tuple[Tensor, Tensor, Tensor],
    grad_logprobs_M: Tensor,
    grad_entropies_M: Tensor | None,
    temperature: float,
) -> None:
    """Overwrite logits by the gradient that reaches them; `summary` is that of `summarise`."""
    _call("to_gradient", logits_MV, targets_M, (*summary, grad_logprobs_M, grad_entropies_M), temperature)


@cache
def _functions(dtype: torch.dtype) -> Any | None:
    compiled = library(SOURCE, f"-DBFLOAT16={DTYPES[dtype]}")
    if compiled is None:
        return None
    compiled.summarise.argtypes = [*[c_void_p] * 5, *[c_long] * 2, c_float, c_int]
    compiled.to_gradient.argtypes = [*[c_void_p] * 7, *[c_long] * 2, c_float, c_int]
    compiled.summarise.restype = compiled.to_gradient.restype = None
    return compiled


def _call(name: str, logits_MV: Tensor, targets_M: Tensor, numbers: tuple[Tensor | None, ...], temperature: float) -> None:
    """Addresses are all that the C is given."""
    M, V = logits_MV.shape
    assert targets_M.dtype is torch.int64
    assert targets_M.shape == (M,)
    assert not M or 0 <= int(targets_M.min()) <= int(targets_M.max()) < V, "the C writes where a target says"
    for each in numbers:
        assert each is None or (each.dtype is torch.float32 and each.shape == (M,))
    given = (logits_MV, targets_M, *numbers)
    assert all(each is None or each.is_contiguous() for each in given)
    pointers = [None if each is None else each.data_ptr() for each in given]
    getattr(_functions(logits_MV.dtype), name)(*pointers, M, V, temperature, torch.get_num_threads())
