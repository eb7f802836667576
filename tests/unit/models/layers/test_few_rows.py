"""Products of few rows on a CPU: by our C, with the weight first, or as ever."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.models.layers import few_rows


@pytest.mark.parametrize("rows", [1, 9, 16, 24, 96])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_weight_first_gives_what_linear_gives(rows: int, has_bias: bool, transposed: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(320, 96), torch.randn(320) if has_bias else None
    x = torch.randn(96, rows).t() if transposed else torch.randn(rows, 96)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(few_rows.weight_first(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-4)


def test_its_result_lies_column_by_column() -> None:
    assert few_rows.weight_first(torch.randn(16, 96), torch.randn(320, 96)).stride() == (1, 16)


@pytest.mark.parametrize(("rows", "is_first"), [(8, False), (9, True), (96, True), (97, False)])
def test_it_comes_first_for_few_rows_where_weights_are_laid_out_anew(
    rows: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "products", lambda: None)
    monkeypatch.setattr(few_rows, "lays_out_weights", lambda: True)
    x, weight = torch.randn(rows, 96), torch.randn(320, 96)
    with torch.no_grad():
        assert few_rows.linear(x, weight).is_contiguous() is not is_first
        assert few_rows.linear(x.double(), weight.double()).is_contiguous()


def test_where_gradients_are_wanted_the_rows_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "lays_out_weights", lambda: True)
    assert few_rows.linear(torch.randn(16, 96), torch.randn(320, 96)).is_contiguous()


class Recorded:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def product(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        self.rows.append(len(x_TI))
        return F.linear(x_TI, weight_OI, bias_O)


def test_our_own_are_asked_for_few_rows_of_whole_weights_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    own, weight = Recorded(), torch.randn(320, 96)
    monkeypatch.setattr(few_rows, "products", lambda: own)
    monkeypatch.setattr(few_rows, "lays_out_weights", lambda: False)
    few_rows.linear(torch.randn(1, 96), weight)  # wants a gradient
    with torch.no_grad():
        for rows in (1, 128, 129):
            few_rows.linear(torch.randn(rows, 96), weight)
        few_rows.linear(torch.randn(2, 96).double(), weight.double())
        few_rows.linear(torch.randn(2, 40), torch.randn(320, 40))
        few_rows.linear(torch.randn(2, 48), weight[:, :48])
    assert own.rows == [1, 128]


def test_other_machines_go_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "products", lambda: None)
    monkeypatch.setattr(few_rows, "lays_out_weights", lambda: False)
    with torch.no_grad():
        x, weight = torch.randn(16, 96), torch.randn(320, 96)
        assert torch.equal(few_rows.linear(x, weight), F.linear(x, weight))
