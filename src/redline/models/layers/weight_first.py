"""Products of a weight and few rows on an ARM CPU, without a copy of the weight.

torch hands float32 products there to oneDNN, and oneDNN to Arm's library, which wants its second factor in blocks: for `x @ Wᵀ`
the weight is laid out anew at every call. That takes half as long as the product itself where there are few rows, as in decode
steps. As `W @ xᵀ` the weight comes first and is read where it lies, and the rows are what is laid out.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST, MOST = 9, 96
"""Rows for which this pays (benchmarks/LOG.md). Below, torch goes past oneDNN by itself; above, laying out the weight takes a
twentieth of the time."""


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, with the weight first where that is faster. The result may be a transposed view then."""
    if FEWEST <= len(x_TI) <= MOST and not torch.is_grad_enabled() and _is_laid_out_anew(weight_OI):
        return product(x_TI, weight_OI, bias_O)
    return F.linear(x_TI, weight_OI, bias_O)


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` as the transposed view [T, O] of `W @ xᵀ`: its columns lie together, not its rows."""
    if bias_O is None:
        return torch.mm(weight_OI, x_TI.t()).t()
    return torch.addmm(bias_O[:, None], weight_OI, x_TI.t()).t()


def _is_laid_out_anew(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_cpu and lays_out_weights()


@cache
def lays_out_weights() -> bool:
    """Whether float32 products of this machine's CPU lay their second factor out anew at every call."""
    return platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()
