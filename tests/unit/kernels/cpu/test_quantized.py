"""Products in whole numbers, against sums in float64."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import Tensor

from redline.config.processor import multiplies_in
from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.quantized import SOURCE, WHOLE_BYTES, QuantizedProducts, quantized_products
from redline.models.sizes.flops import quantized_bytes

pytestmark = pytest.mark.usefixtures("threads")

ERROR = {"int8": 1.5e-2, "int16": 4e-4}
"""Of a product of normal numbers, in units of its size."""
TOP = {"int8": 127, "int16": 5792}
"""The largest whole number of a group."""
VECTORS = {
    "widest": (),
    "without VNNI": ("-mno-avx512vnni", "-mno-avxvnni"),
    "256 bits": ("-mno-avx512f", "-mno-avxvnni"),
}
KINDS = [("int8", "widest"), *(("int16", vectors) for vectors in VECTORS)]
SHAPES = [(1, 16), (7, 32), (16, 64), (33, 80), (100, 576), (203, 1536)]


def products_with(quantization: str, vectors: str = "widest") -> QuantizedProducts:
    if not multiplies_in(quantization):  # type: ignore[arg-type]
        pytest.skip("this CPU has no such products")
    if VECTORS[vectors] and platform.machine() != "x86_64":
        pytest.skip("one kind of instructions only")
    compiled = library(SOURCE, f"-DBITS={8 * WHOLE_BYTES[quantization]}", *VECTORS[vectors])
    if compiled is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    return QuantizedProducts(compiled)


def packed(own: QuantizedProducts, weight_OI: Tensor) -> Tensor:
    room = own.room(weight_OI)
    own.pack(weight_OI, room)
    return room


def exactly(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())


@pytest.mark.parametrize(("quantization", "vectors"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_those_of_numbers_with_less_than_their_bits(quantization: str, vectors: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    own, weight, bias = products_with(quantization, vectors), torch.randn(shape), torch.randn(shape[0])
    of_weight = packed(own, weight)
    for rows in (0, 1, 2, 5, 6, 7, 13, 64, 130):
        x = torch.randn(rows, shape[1])
        for with_bias in (None, bias):
            off = own.product(x, of_weight, shape[0], with_bias).double() - exactly(x, weight, with_bias)
            size = exactly(x.abs(), weight.abs()) / shape[1] ** 0.5  # of a sum of so many numbers without a sign in common
            assert (off.abs() <= 8 * ERROR[quantization] * size).all()
            assert off.norm() <= ERROR[quantization] * exactly(x, weight).norm() + 1e-6 or shape[0] * rows < 100


@pytest.mark.parametrize(("quantization", "vectors"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers_are_multiplied_exactly(quantization: str, vectors: str, shape: tuple[int, int]) -> None:
    """Where each group's largest is the largest there is, scales are 1; the largest of all meet each other here, too."""
    drawn, top = torch.Generator().manual_seed(0), TOP[quantization]
    own = products_with(quantization, vectors)
    weight = torch.randint(-top, top + 1, shape, generator=drawn).float()
    x = torch.randint(-top, top + 1, (13, shape[1]), generator=drawn).float()
    x[0], weight[0] = top, -top  # the largest sums
    x[:, ::16], weight[:, ::16] = top, top
    exact = exactly(x, weight)
    assert (own.product(x, packed(own, weight), shape[0]).double() - exact).abs().max() <= 2e-7 * exact.abs().max()


@pytest.mark.parametrize("quantization", WHOLE_BYTES)
def test_a_row_has_the_same_bits_in_any_company(quantization: str) -> None:
    torch.manual_seed(0)
    own, x, weight, bias = products_with(quantization), torch.randn(300, 656), torch.randn(203, 656), torch.randn(203)
    of_weight = packed(own, weight)
    together = own.product(x, of_weight, 203, bias)
    for rows in (1, 2, 5, 7, 64, 131):
        for begin in (0, 1, 50, 300 - rows):
            alone = own.product(x[begin : begin + rows], of_weight, 203, bias)
            assert torch.equal(alone, together[begin : begin + rows])


@pytest.mark.parametrize("quantization", WHOLE_BYTES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_nan_and_reaches_nobody_else(quantization: str, broken: float) -> None:
    torch.manual_seed(0)
    own, x, weight = products_with(quantization), torch.randn(9, 80), torch.randn(33, 80)
    x[4, 70] = weight[20, 3] = broken
    found = own.product(x, packed(own, weight), 33).isnan()
    assert found[4].all()
    assert found[:, 20].all()
    assert found.sum() == 33 + 9 - 1


@pytest.mark.parametrize("quantization", WHOLE_BYTES)
def test_numbers_may_be_of_any_size_and_none(quantization: str) -> None:
    torch.manual_seed(0)
    own, weight = products_with(quantization), torch.randn(33, 128)
    of_weight = packed(own, weight)
    x = torch.randn(4, 128)
    large, small = (own.product(x * factor, of_weight, 33).double() / factor for factor in (1e30, 1e-25))
    for found in (large, small):
        assert (found - exactly(x, weight)).norm() <= ERROR[quantization] * exactly(x, weight).norm()
    assert own.product(torch.zeros(4, 128), of_weight, 33).eq(0).all()
    assert own.product(torch.full((4, 128), 1e-42), of_weight, 33).eq(0).all()
    assert own.product(x, packed(own, torch.zeros(33, 128)), 33).eq(0).all()


@pytest.mark.parametrize("quantization", WHOLE_BYTES)
def test_a_weight_in_bfloat16_is_taken_as_it_is(quantization: str) -> None:
    torch.manual_seed(0)
    own, weight, x = products_with(quantization), torch.randn(33, 128).bfloat16(), torch.randn(4, 128)
    assert torch.equal(own.product(x, packed(own, weight), 33), own.product(x, packed(own, weight.float()), 33))


@pytest.mark.parametrize("quantization", WHOLE_BYTES)
def test_a_weight_takes_the_bytes_that_plans_count(quantization: str) -> None:
    own, numbers = products_with(quantization), 64 * 640
    assert own.bytes_of(64, 640) == numbers * quantized_bytes(quantization)  # type: ignore[arg-type]


def test_they_are_compiled_once() -> None:
    if quantized_products("int16") is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    assert quantized_products("int16") is quantized_products("int16")
