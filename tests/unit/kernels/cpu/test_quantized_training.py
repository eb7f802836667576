"""Products of a training step in whole numbers, against sums in float64."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from redline.config.processor import multiplies_in
from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.quantized import WHOLE_BYTES
from redline.kernels.cpu.quantized_training import SOURCE, TrainingProducts

ERROR = {"int8": 1.5e-2, "int16": 4e-4}
"""Of a product of normal numbers, in units of its size."""
VECTORS = {"widest": (), "256 bits": ("-mno-avx512f", "-mno-avxvnni")}
KINDS = [("int8", "widest"), ("int16", "widest"), ("int16", "256 bits")]
SHAPES = [(1, 1, 1), (7, 33, 17), (100, 65, 130), (48, 203, 2100), (2100, 40, 64), (64, 576, 160)]
"""Tokens, rows of the weight, and their numbers."""


def products_with(quantization: str, vectors: str = "widest") -> TrainingProducts:
    if not multiplies_in(quantization):  # type: ignore[arg-type]
        pytest.skip("this CPU has no such products")
    if VECTORS[vectors] and platform.machine() != "x86_64":
        pytest.skip("one kind of instructions only")
    compiled = library(SOURCE, f"-DBITS={8 * WHOLE_BYTES[quantization]}", *VECTORS[vectors])
    if compiled is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    return TrainingProducts(compiled)


def factors(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, and the gradient of what the product is."""
    T, O, I = shape  # noqa: E741
    torch.manual_seed(0)
    return torch.randn(T, I), torch.randn(O, I), torch.randn(O), torch.randn(T, O)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("quantization", "vectors"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_those_of_numbers_with_less_than_their_bits(
    quantization: str, vectors: str, shape: tuple[int, int, int]
) -> None:
    own, (x, weight, bias, grad) = products_with(quantization, vectors), factors(shape)
    pairs = {
        "forward": (own.forward(x, weight), x.double() @ weight.double().T),
        "with bias": (own.forward(x, weight, bias), x.double() @ weight.double().T + bias),
        "backward": (own.backward(grad, weight), grad.double() @ weight.double()),
        "gradient": (own.gradient(grad, x), grad.double().T @ x.double()),
    }
    for name, (found, exact) in pairs.items():
        assert (found - exact).norm() <= ERROR[quantization] * exact.norm() + 1e-6, name


def test_a_row_has_the_same_bits_in_any_company() -> None:
    own, (x, weight, _, grad) = products_with("int16"), factors((2300, 70, 2300))
    forward, backward = own.forward(x, weight), own.backward(grad, weight)
    for begin, end in ((0, 1), (5, 12), (2000, 2300)):
        assert torch.equal(own.forward(x[begin:end], weight), forward[begin:end])
        assert torch.equal(own.backward(grad[begin:end], weight), backward[begin:end])


@pytest.mark.parametrize("quantization", WHOLE_BYTES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_nan_and_reaches_nobody_else(quantization: str, broken: float) -> None:
    own, (x, weight, _, grad) = products_with(quantization), factors((9, 33, 80))
    x[4, 70] = weight[20, 3] = grad[5, 7] = broken
    forward, backward, gradient = own.forward(x, weight), own.backward(grad, weight), own.gradient(grad, x)
    for found, row, column in ((forward, 4, 20), (backward, 5, 3), (gradient, 7, 70)):
        assert found[row].isnan().all()
        assert found[:, column].isnan().all()
        assert found.isnan().sum() == sum(found.shape) - 1


def test_factors_may_be_views_and_results_are_written_where_they_are_wanted() -> None:
    own, (x, weight, _, grad) = products_with("int16"), factors((40, 48, 64))
    assert torch.equal(own.forward(x.T.contiguous().T, weight), own.forward(x, weight))
    assert torch.equal(own.gradient(grad[:, ::2], x), own.gradient(grad[:, ::2].contiguous(), x))
    room = torch.empty(80, 64)
    own.backward(grad, weight, out=room[:40])
    assert torch.equal(room[:40], own.backward(grad, weight))


def test_no_tokens_have_no_gradient() -> None:
    own = products_with("int16")
    assert own.forward(torch.empty(0, 32), torch.randn(16, 32)).shape == (0, 16)
    assert own.gradient(torch.empty(0, 16), torch.empty(0, 32)).eq(0).all()


def test_zeros_and_numbers_of_any_size_are_right() -> None:
    own, (x, weight, _, _) = products_with("int16"), factors((10, 33, 128))
    for factor in (1e30, 1e-25):
        exact = x.double() @ weight.double().T
        assert (own.forward(x * factor, weight).double() / factor - exact).norm() <= ERROR["int16"] * exact.norm()
    assert own.forward(torch.zeros(10, 128), weight).eq(0).all()
    assert own.forward(x, torch.full((33, 128), 1e-42)).eq(0).all()
