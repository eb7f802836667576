"""Products of a weight in whole numbers and any number of rows on a CPU: `quantized.c`.

A CPU with VNNI, or ARM's dot products, multiplies numbers of 8 bits four times as fast as float32, and reads a quarter of the
bytes; x86 those of 16 bits twice as fast, and half of the bytes. Each group of 64 numbers of a row has a scale of its own. With
16 bits a product is off by 2e-4 of its size, less than one of TF32; with 8 bits by 8e-3, more than one of bfloat16.
"""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p, cast
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import library

SOURCE = Path(__file__).with_suffix(".c")
WHOLE_BYTES = {"int8": 1, "int16": 2}
"""Of a number, by the name of the type."""
GROUP = 64
"""Numbers with a scale in common; `quantized.c`'s."""
LINE = 16
"""Numbers that rows are multiples of."""
ALIGNED = 64


@cache
def quantized_products(quantization: str) -> QuantizedProducts | None:
    """The products of `int8` or `int16`; None where they cannot be compiled. Compiles them when they are first asked for."""
    compiled = library(SOURCE, f"-DBITS={8 * WHOLE_BYTES[quantization]}")
    return None if compiled is None else QuantizedProducts(compiled)


class QuantizedProducts:
    def __init__(self, compiled: object) -> None:
        self._pack, self._product, self._bytes = compiled.pack, compiled.product, compiled.packed_bytes  # type: ignore[attr-defined]
        self._bytes.argtypes, self._bytes.restype = [c_long, c_long], c_long
        self._pack.argtypes = [c_void_p, c_void_p, c_long, c_long, c_int]
        self._product.argtypes = [*[c_void_p] * 4, *[c_long] * 3, c_int]
        self.address = cast(self._product, c_void_p).value
        """The address of the function, for other C."""

    def bytes_of(self, num_rows: int, size: int) -> int:
        """What a weight [num_rows, size] takes."""
        return int(self._bytes(num_rows, size))

    def room(self, weight_OI: Tensor) -> Tensor:
        """Memory for a weight, still to be packed."""
        needed = self.bytes_of(*weight_OI.shape)
        whole = torch.empty(needed + ALIGNED, dtype=torch.uint8)
        begin = -whole.data_ptr() % ALIGNED
        return whole[begin : begin + needed]

    def pack(self, weight_OI: Tensor, packed: Tensor) -> None:
        """Write a weight, float32 or bfloat16, in whole numbers."""
        num_rows, size = weight_OI.shape
        assert size % LINE == 0
        assert packed.numel() == self.bytes_of(num_rows, size)
        weight_OI = weight_OI.detach().to(torch.float32).contiguous()
        self._pack(weight_OI.data_ptr(), packed.data_ptr(), num_rows, size, torch.get_num_threads())

    def product(self, x_TI: Tensor, packed: Tensor, num_rows: int, bias_O: Tensor | None = None) -> Tensor:
        """`F.linear` in float32 with a weight [num_rows, I] that was packed, without a gradient. A row has the same bits in
        any company."""
        num_tokens, size = x_TI.shape
        assert x_TI.dtype is torch.float32
        assert packed.numel() == self.bytes_of(num_rows, size)
        x_TI, out_TO = x_TI.contiguous(), x_TI.new_empty(num_tokens, num_rows)
        bias = None if bias_O is None else bias_O.data_ptr()
        pointers = (x_TI.data_ptr(), packed.data_ptr(), bias, out_TO.data_ptr())
        self._product(*pointers, num_tokens, num_rows, size, torch.get_num_threads())
        return out_TO
