"""Products of some rows in parts, by torch on whatever device there is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from redline.kernels.decode.parts import MOST_ROWS, parts_of, product_in_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_parts_of_a_product_add_up_to_it(parts: int) -> None:
    torch.manual_seed(parts)
    x, weight = torch.randn(40, 96, device=DEVICE), torch.randn(24, 96, device=DEVICE)
    out = product_in_parts(x, weight, parts)
    assert out.shape == (parts, 40, 24)
    torch.testing.assert_close(out.sum(dim=0), F.linear(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_the_parts_are_not_rounded_to_half_precision() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 4864, device="cuda").bfloat16() for rows in (64, 896))
    out = product_in_parts(x, weight, 4)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.sum(dim=0), F.linear(x.float(), weight.float()), rtol=1e-5, atol=1e-2)


def test_shapes_of_real_models_are_cut_as_they_were_measured() -> None:
    """o and down of Qwen2.5-0.5B, Llama-3.2-1B, Qwen2.5-7B."""
    shapes = ((896, 896), (896, 4864), (2048, 2048), (2048, 8192), (3584, 3584), (3584, 18944))
    assert [parts_of(16, *shape) for shape in shapes] == [2, 4, 2, 4, 2, 2]
    assert [parts_of(MOST_ROWS, *shape) for shape in shapes] == [2, 4, 2, 4, 1, 2]
    assert [parts_of(MOST_ROWS + 1, *shape) for shape in shapes] == [1] * 6


def test_a_part_is_never_short_nor_out_of_line() -> None:
    assert parts_of(64, 576, 576) == 1
    assert parts_of(64, 896, 900) == 1
    assert parts_of(64, 896, 1000) == 1
    assert parts_of(64, 896, 1600) == 4
