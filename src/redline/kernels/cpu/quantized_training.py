"""The products of a training step in whole numbers on a CPU, in float32 without and within: `quantized_training.c`.

    forward      x_TI @ weight_OIᵀ      summed along I
    backward     grad_TO @ weight_OI    along O
    gradient     grad_TOᵀ @ x_TI        along T

Factors become whole numbers anew for every product, along what is summed, so nothing of a weight outlives the product: there is
nothing that could be older than the weight. That takes 10 MB, and a fifth to two fifths of the time.
"""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.quantized import WHOLE_BYTES

SOURCE = Path(__file__).with_suffix(".c")


@cache
def training_products(quantization: str) -> TrainingProducts | None:
    """The products of `int8` or `int16`; None where they cannot be compiled. Compiles them when they are first asked for."""
    compiled = library(SOURCE, f"-DBITS={8 * WHOLE_BYTES[quantization]}")
    return None if compiled is None else TrainingProducts(compiled)


class TrainingProducts:
    """A row has the same bits in any company, and what is not finite comes out as NaN, in its row or column."""

    def __init__(self, compiled: Any) -> None:
        self._multiply = compiled.multiply
        self._multiply.argtypes, self._multiply.restype = [*[c_void_p] * 4, *[c_long] * 3, *[c_int] * 4], None

    def forward(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        (T, I), O = x_TI.shape, len(weight_OI)  # noqa: E741
        return self._product((x_TI, False), (weight_OI, False), (T, O, I), None, bias_O)

    def backward(self, grad_TO: Tensor, weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
        (T, O), I = grad_TO.shape, weight_OI.shape[1]  # noqa: E741
        return self._product((grad_TO, False), (weight_OI, True), (T, I, O), out)

    def gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        (T, O), I = grad_TO.shape, x_TI.shape[1]  # noqa: E741
        return self._product((grad_TO, True), (x_TI, True), (O, I, T))

    def _product(
        self,
        left: tuple[Tensor, bool],
        right: tuple[Tensor, bool],
        sizes: tuple[int, int, int],
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Factors come with whether their columns are what the result has rows, or columns, of. Sizes are the rows of the
        result, its columns, and how many numbers are summed."""
        rows, columns, inner = sizes
        first, second = left[0].contiguous(), right[0].contiguous()
        assert first.numel() == rows * inner
        assert second.numel() == columns * inner
        out = first.new_empty(rows, columns) if out is None else out
        assert out.shape == (rows, columns)
        assert out.is_contiguous()
        tensors = (first, second, None if bias is None else bias.contiguous(), out)
        if inner == 0:
            return out.zero_()
        assert all(each is None or (each.dtype is torch.float32 and each.is_cpu) for each in tensors)
        pointers = (None if each is None else each.data_ptr() for each in tensors)
        self._multiply(*pointers, *sizes, left[1], right[1], False, torch.get_num_threads())
        return out
