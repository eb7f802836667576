"""Products of few rows, against torch's in float64."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F

from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.products import SOURCE, Products, products

pytestmark = pytest.mark.usefixtures("threads")

VECTORS = {"widest": (), "256 bits": ("-mno-avx512f",), "128 bits": ("-mno-avx",)}
"""What a CPU may have; flags of the compiler that leave out the rest."""


def products_with(vectors: str) -> Products:
    if products() is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    if VECTORS[vectors] and platform.machine() != "x86_64":
        pytest.skip("one kind of vectors only")
    compiled = library(SOURCE, *VECTORS[vectors])
    assert compiled is not None
    return Products(compiled)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("shape", [(1, 16), (7, 32), (8, 640), (33, 656), (960, 576), (203, 1536)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_they_are_torchs(vectors: str, shape: tuple[int, int], has_bias: bool) -> None:
    """Rows of the weight that fill tiles and do not; long ones are taken in parts."""
    torch.manual_seed(0)
    own, weight, bias = products_with(vectors), torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    for rows in (0, 1, 2, 3, 4, 5, 24, 64, 127):
        x = torch.randn(rows, shape[1])
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(own.product(x, weight, bias).double(), exact, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("vectors", VECTORS)
def test_a_row_has_the_same_bits_in_any_company(vectors: str) -> None:
    torch.manual_seed(0)
    own, x, weight, bias = products_with(vectors), torch.randn(128, 1536), torch.randn(203, 1536), torch.randn(203)
    together = own.product(x, weight, bias)
    for rows in (1, 2, 3, 4, 7, 64):
        for begin in (0, 1, 50, 128 - rows):
            assert torch.equal(own.product(x[begin : begin + rows], weight, bias), together[begin : begin + rows])


def test_an_output_has_the_same_bits_among_any_others() -> None:
    """As where a weight is divided among ranks: the last rows of one are not in a whole tile there."""
    torch.manual_seed(0)
    own, x, weight = products_with("widest"), torch.randn(5, 96), torch.randn(64, 96)
    whole = own.product(x, weight)
    for begin, end in ((0, 7), (7, 64), (13, 14), (3, 50)):
        assert torch.equal(own.product(x, weight[begin:end]), whole[:, begin:end])


def test_rows_may_lie_apart_and_what_is_no_number_stays_in_its_row() -> None:
    own, apart = products_with("widest"), torch.randn(96, 5).t()
    weight = torch.randn(40, 96)
    torch.testing.assert_close(own.product(apart, weight), F.linear(apart, weight), rtol=1e-5, atol=1e-4)
    x = torch.randn(5, 96)
    x[2, 7], x[3, 7] = torch.nan, torch.inf
    broken = own.product(x, weight)
    assert broken[2].isnan().all()
    assert broken[3].isinf().all()
    assert broken[[0, 1, 4]].isfinite().all()
    weight[11, 3] = torch.nan
    assert own.product(torch.randn(5, 96), weight).isnan().nonzero()[:, 1].unique().tolist() == [11]


def test_what_does_not_fit_is_refused_before_it_is_read() -> None:
    own = products_with("widest")
    for x, weight in [(torch.randn(2, 32), torch.randn(4, 48)), (torch.randn(2, 40), torch.randn(4, 40))]:
        with pytest.raises(AssertionError):
            own.product(x, weight)
    with pytest.raises(AssertionError):
        own.product(torch.randn(2, 32).double(), torch.randn(4, 32).double())
