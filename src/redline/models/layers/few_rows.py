"""Products of a weight and few rows on a CPU, as in decode steps: by C of our own where it can be compiled, else by torch.

That C is for float32, and for bfloat16 on CPUs with matrix units.

torch hands float32 products on an ARM CPU to oneDNN, and oneDNN to Arm's library, which wants its second factor in blocks: for
`x @ Wᵀ` the weight is laid out anew at every call. That takes half as long as the product itself where there are few rows. As
`W @ xᵀ` the weight comes first and is read where it lies, and the rows are what is laid out.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cpu.matrix_products import MatrixProducts, matrix_products
from redline.kernels.cpu.products import MOST_ROWS, Products, products

FEWEST, MOST = 9, 96
"""Rows for which the weight comes first (benchmarks/LOG.md). Below, torch goes past oneDNN by itself; above, laying out the
weight takes a twentieth of the time."""


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, by what is fastest. The result may be a transposed view."""
    if not weight_OI.is_cpu or torch.is_grad_enabled():
        return F.linear(x_TI, weight_OI, bias_O)
    own = products_of(weight_OI) if len(x_TI) <= MOST_ROWS else None
    if own is not None:
        return own.product(x_TI, weight_OI, bias_O)
    if weight_OI.dtype is torch.float32 and FEWEST <= len(x_TI) <= MOST and lays_out_weights():
        return weight_first(x_TI, weight_OI, bias_O)
    return F.linear(x_TI, weight_OI, bias_O)


def products_of(weight_OI: Tensor) -> Products | None:
    """What of our own multiplies few rows by a weight on this CPU; None where torch does."""
    if Products.serves(weight_OI):
        return products()
    return matrix_products() if MatrixProducts.serves(weight_OI) else None


def weight_first(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` as the transposed view [T, O] of `W @ xᵀ`: its columns lie together, not its rows."""
    if bias_O is None:
        return torch.mm(weight_OI, x_TI.t()).t()
    return torch.addmm(bias_O[:, None], weight_OI, x_TI.t()).t()


@cache
def lays_out_weights() -> bool:
    """Whether float32 products of this machine's CPU lay their second factor out anew at every call."""
    return platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()
