"""Products of a bfloat16 weight and few rows on a CPU with matrix units (AMX), of which decode steps consist:
`matrix_products.c`.

A library lays a factor out anew at every call. Here the weight is read once, where it lies, so that nothing is to be renewed
when it changes. A row has the same bits in any company.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.products import Products

SOURCE = Path(__file__).with_suffix(".c")
LINE = 32
"""Numbers that rows are multiples of, and the fewest rows of a weight; `matrix_products.c`'s."""


@cache
def matrix_products() -> MatrixProducts | None:
    """None where the CPU has no such units, or there is nothing to compile them with. Compiles them, where it is asked for the
    first time."""
    compiled = library(SOURCE)
    return MatrixProducts(compiled) if compiled is not None and compiled.may_compute() else None


class MatrixProducts(Products):
    """Summed in float32, rounded once."""

    dtype = torch.bfloat16

    @classmethod
    def serves(cls, weight_OI: Tensor) -> bool:
        columns, size = weight_OI.shape
        return weight_OI.dtype is cls.dtype and columns >= LINE and size % LINE == 0 and weight_OI.is_contiguous()
