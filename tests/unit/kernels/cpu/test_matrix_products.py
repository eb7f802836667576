"""Products of few rows in bfloat16 by matrix units, against float64; without such units by what they do, in plain C."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F

from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.matrix_products import SOURCE, MatrixProducts, matrix_products

pytestmark = pytest.mark.usefixtures("threads")

KINDS = {"own units": None, "emulated": ("-DEMULATED=1",), "emulated, 256 bits": ("-DEMULATED=1", "-mno-avx512f")}


@pytest.fixture(params=KINDS)
def own(request: pytest.FixtureRequest) -> MatrixProducts:
    macros = KINDS[request.param]
    if macros is None:
        found = matrix_products()
        if found is None:
            pytest.skip("no matrix units here, or no compiler")
        return found
    if len(macros) > 1 and platform.machine() != "x86_64":
        pytest.skip("one kind of vectors only")
    compiled = library(SOURCE, *macros)
    if compiled is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    return MatrixProducts(compiled)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("shape", [(32, 32), (33, 64), (47, 96), (64, 32), (203, 608), (320, 576)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_they_are_float64s_rounded_once(own: MatrixProducts, shape: tuple[int, int], has_bias: bool) -> None:
    """Rows of the weight that fill registers and do not, and rows of x."""
    torch.manual_seed(0)
    weight, bias = numbers(*shape), numbers(shape[0]) if has_bias else None
    for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 127):
        x = numbers(rows, shape[1])
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        got = own.product(x, weight, bias)
        assert got.dtype is torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4)


def test_a_row_has_the_same_bits_in_any_company(own: MatrixProducts) -> None:
    torch.manual_seed(0)
    x, weight, bias = numbers(128, 608), numbers(203, 608), numbers(203)
    together = own.product(x, weight, bias)
    for rows in (1, 2, 15, 16, 17, 40, 64):
        for begin in (0, 1, 50, 128 - rows):
            assert torch.equal(own.product(x[begin : begin + rows], weight, bias), together[begin : begin + rows])


def test_an_output_has_the_same_bits_among_any_others(own: MatrixProducts) -> None:
    """As where a weight is divided among ranks; the last rows of one are taken with some that were taken before."""
    torch.manual_seed(0)
    x, weight = numbers(5, 96), numbers(128, 96)
    whole = own.product(x, weight)
    for begin, end in ((0, 33), (7, 64), (13, 48), (3, 128)):
        assert torch.equal(own.product(x, weight[begin:end]), whole[:, begin:end])


def test_rows_may_lie_apart_and_what_is_no_number_stays_in_its_row(own: MatrixProducts) -> None:
    apart, weight = numbers(96, 5).t(), numbers(40, 96)
    torch.testing.assert_close(own.product(apart, weight), F.linear(apart, weight), rtol=2**-7, atol=2e-2)
    x = numbers(5, 96)
    x[2, 7], x[3, 7] = torch.nan, torch.inf
    broken = own.product(x, weight)
    assert broken[2].isnan().all()
    assert broken[3].isinf().all()
    assert broken[[0, 1, 4]].isfinite().all()
    weight[11, 3] = torch.nan
    assert own.product(numbers(5, 96), weight).isnan().nonzero()[:, 1].unique().tolist() == [11]


def test_nothing_is_written_beside_the_result(own: MatrixProducts) -> None:
    x, weight = numbers(19, 64), numbers(45, 64)
    expected = own.product(x, weight)
    around = torch.full((21, 45), 7.0).bfloat16()
    pointers = (x.data_ptr(), weight.data_ptr(), None, around[1:].data_ptr())
    own._product(*pointers, 19, 45, 64, torch.get_num_threads())
    assert torch.equal(around[1:20], expected)
    assert (around[[0, 20]] == 7).all()


def test_what_does_not_fit_is_refused_before_it_is_read(own: MatrixProducts) -> None:
    assert own.serves(numbers(32, 64))
    for weight in (numbers(31, 64), numbers(32, 48), torch.randn(32, 64), numbers(64, 32).t()):
        assert not own.serves(weight)
        with pytest.raises(AssertionError):
            own.product(numbers(2, weight.shape[1]), weight)
    with pytest.raises(AssertionError):
        own.product(numbers(2, 32), numbers(32, 64))
    with pytest.raises(AssertionError):
        own.product(torch.randn(2, 64), numbers(32, 64))


def test_a_machine_without_matrix_units_says_so() -> None:
    if platform.machine() != "x86_64":
        compiled = library(SOURCE)
        assert compiled is None or not compiled.may_compute()
        return
    compiled = library(SOURCE, "-mno-amx-bf16")
    if compiled is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    assert not compiled.may_compute()
