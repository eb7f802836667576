"""Products of a bfloat16 weight and few rows on a CPU with matrix units (AMX), of which decode steps consist:
`matrix_products.c`.

A library lays a factor out anew at every call. Here the weight is read once, where it lies, so that nothing is to be renewed
when it changes. A row has the same bits in any company.
"""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p, cast
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import library

SOURCE = Path(__file__).with_suffix(".c")
LINE = 32
"""Numbers that rows are multiples of, and the fewest rows of a weight; `matrix_products.c`'s."""


@cache
def matrix_products() -> MatrixProducts | None:
    """None where the CPU has no such units, or there is nothing to compile them with. Compiles them, where it is asked for the
    first time."""
    compiled = library(SOURCE)
    return MatrixProducts(compiled) if compiled is not None and compiled.may_compute() else None


class MatrixProducts:
    def __init__(self, compiled: object) -> None:
        self._product = compiled.product  # type: ignore[attr-defined]
        self._product.argtypes = [*[c_void_p] * 4, *[c_long] * 3, c_int]
        self.address = cast(self._product, c_void_p).value
        """The address of the function, for other C."""

    @staticmethod
    def serves(weight_OI: Tensor) -> bool:
        """Whether it takes a weight of this shape."""
        columns, size = weight_OI.shape
        return weight_OI.dtype is torch.bfloat16 and columns >= LINE and size % LINE == 0 and weight_OI.is_contiguous()

    def product(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear` without a gradient, all in bfloat16, of a weight that it `serves`: summed in float32, rounded once."""
        num_rows, size = x_TI.shape
        assert self.serves(weight_OI)
        assert x_TI.dtype is torch.bfloat16
        assert weight_OI.shape[1] == size
        assert bias_O is None or (bias_O.dtype is torch.bfloat16 and bias_O.is_contiguous())
        x_TI, out_TO = x_TI.contiguous(), x_TI.new_empty(num_rows, len(weight_OI))
        bias = None if bias_O is None else bias_O.data_ptr()
        pointers = (x_TI.data_ptr(), weight_OI.data_ptr(), bias, out_TO.data_ptr())
        self._product(*pointers, num_rows, len(weight_OI), size, torch.get_num_threads())
        return out_TO
