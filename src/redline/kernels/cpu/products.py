"""Products of a float32 weight and few rows on a CPU, which decode steps consist of: `products.c`.

Libraries are made for many rows: they lay a factor out anew at every call, and with 4 to 32 rows neither read the weight at the
speed of memory nor multiply at that of the cores. Here the weight is read once, where it lies, so that nothing is to be renewed
when it changes. A row has the same bits in any company, which no library gives.
"""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p, cast
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import library

SOURCE = Path(__file__).with_suffix(".c")
MOST_ROWS = 128
"""With more, libraries are as fast or faster (benchmarks/LOG.md)."""
LINE = 16
"""Numbers that rows are multiples of; `products.c`'s."""


@cache
def products() -> Products | None:
    """None where there are none here. Compiles them, where it is asked for the first time."""
    compiled = library(SOURCE)
    return None if compiled is None else Products(compiled)


class Products:
    """Those of one dtype."""

    dtype = torch.float32

    def __init__(self, compiled: object) -> None:
        self._product = compiled.product  # type: ignore[attr-defined]
        self._product.argtypes = [*[c_void_p] * 4, *[c_long] * 3, c_int]
        self.address = cast(self._product, c_void_p).value
        """The address of the function, for other C."""

    @classmethod
    def serves(cls, weight_OI: Tensor) -> bool:
        """Whether it takes such a weight."""
        return weight_OI.dtype is cls.dtype and weight_OI.shape[1] % LINE == 0 and weight_OI.is_contiguous()

    def product(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear` without a gradient, all in `dtype`, of a weight that it `serves`."""
        num_rows, size = x_TI.shape
        assert self.serves(weight_OI)
        assert x_TI.dtype is self.dtype
        assert weight_OI.shape[1] == size
        assert bias_O is None or (bias_O.dtype is self.dtype and bias_O.is_contiguous())
        x_TI, out_TO = x_TI.contiguous(), x_TI.new_empty(num_rows, len(weight_OI))
        bias = None if bias_O is None else bias_O.data_ptr()
        pointers = (x_TI.data_ptr(), weight_OI.data_ptr(), bias, out_TO.data_ptr())
        self._product(*pointers, num_rows, len(weight_OI), size, torch.get_num_threads())
        return out_TO
