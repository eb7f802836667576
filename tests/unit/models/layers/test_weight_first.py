"""Products with the weight first: the numbers of `F.linear`, in a transposed view."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from redline.models.layers import weight_first


@pytest.mark.parametrize("rows", [1, 9, 16, 24, 96])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_weight_first_gives_what_linear_gives(rows: int, has_bias: bool, transposed: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(320, 96), torch.randn(320) if has_bias else None
    x = torch.randn(96, rows).t() if transposed else torch.randn(rows, 96)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(weight_first.product(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-4)


def test_its_result_lies_column_by_column() -> None:
    assert weight_first.product(torch.randn(16, 96), torch.randn(320, 96)).stride() == (1, 16)


@pytest.mark.parametrize(("rows", "is_first"), [(8, False), (9, True), (96, True), (97, False)])
def test_it_comes_first_for_few_rows_where_weights_are_laid_out_anew(
    rows: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_first, "lays_out_weights", lambda: True)
    x, weight = torch.randn(rows, 96), torch.randn(320, 96)
    with torch.no_grad():
        assert weight_first.linear(x, weight).is_contiguous() is not is_first
        assert weight_first.linear(x.double(), weight.double()).is_contiguous()


def test_where_gradients_are_wanted_the_rows_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_first, "lays_out_weights", lambda: True)
    assert weight_first.linear(torch.randn(16, 96), torch.randn(320, 96)).is_contiguous()


def test_other_machines_go_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_first, "lays_out_weights", lambda: False)
    with torch.no_grad():
        assert weight_first.linear(torch.randn(16, 96), torch.randn(320, 96)).is_contiguous()
