"""Products in 8-bit floating point and what writes their factors, against torch. Triton's interpreter does not round to 8 bits
as a GPU does, so where there is none they stay in float32: all is held to torch there but the rounding."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from redline.kernels import fp8  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [HALF] if DEVICE == "cuda" else [torch.float32, HALF]
EPS = 1e-6
ROUNDED, SMALLEST = (1.05 / 16, 1.05 / 2**10) if DEVICE == "cuda" else (2e-3, 1e-3)
"""What a number may be off by: of itself, and of its scale. A last bit in bfloat16 comes on top, and is all that there is in
float32."""


@pytest.fixture(autouse=True)
def without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8, "DTYPE", torch.float32)


def check_rounded(found_TI: Tensor, scale_T: Tensor, expected_TI: Tensor) -> None:
    found_TI, scale_T = found_TI.float() * scale_T[:, None], scale_T[:, None]
    assert ((found_TI - expected_TI).abs() <= expected_TI.abs() * ROUNDED + scale_T * SMALLEST).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 200, 18944, 40000])
def test_rows_fill_the_range_of_8_bits(dtype: torch.dtype, width: int) -> None:
    sizes_T = torch.tensor([1e-3, 1.0, 30.0, 0.0, 1e-2], device=DEVICE)
    x_TI = (torch.randn(5, width, device=DEVICE) * sizes_T[:, None]).to(dtype)
    found, scale_T = fp8.rows(x_TI)
    check_rounded(found, scale_T, x_TI.float())
    largest_T = found.float().abs().amax(dim=1)
    torch.testing.assert_close(largest_T[[0, 1, 2, 4]], torch.full((4,), fp8.TOP, device=DEVICE), rtol=1e-6, atol=0)
    assert largest_T[3] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 4864, 33000])
def test_silu_and_product_are_rounded_as_rows_are(dtype: torch.dtype, width: int) -> None:
    both_TI = torch.randn(3, 2 * width, device=DEVICE).to(dtype)
    found, scale_T = fp8.silu_mul(both_TI)
    gate_TI, up_TI = both_TI.float().chunk(2, dim=1)
    check_rounded(found, scale_T, F.silu(gate_TI).to(dtype).float() * up_TI)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [True, False])
def test_norm_adds_the_delta_with_the_scale_of_its_row(dtype: torch.dtype, scaled: bool) -> None:
    x_TE, delta_TE = (torch.randn(7, 192, device=DEVICE).to(dtype) for _ in range(2))
    gain_E, scale = torch.rand(192, device=DEVICE).to(dtype) * 3, torch.empty((), device=DEVICE)
    scale_T = torch.rand(7, device=DEVICE) * 4 if scaled else None
    fp8.write_norm_scale(gain_E, scale)
    sum_TE, found_TE = fp8.add_rms_norm(x_TE, delta_TE, scale_T, gain_E, EPS, scale)
    delta_TE = delta_TE if scale_T is None else (delta_TE.float() * scale_T[:, None]).to(dtype)
    torch.testing.assert_close(sum_TE, x_TE + delta_TE, rtol=2e-3 if dtype is not torch.bfloat16 else 1.6e-2, atol=1e-6)
    check_rounded(found_TE, scale.expand(7), F.rms_norm(sum_TE.float(), (192,), gain_E.float(), EPS))


def test_norm_without_a_delta_returns_the_stream_as_it_came() -> None:
    x_TE, scale = torch.randn(3, 64, device=DEVICE, dtype=HALF), torch.ones((), device=DEVICE)
    assert fp8.add_rms_norm(x_TE, None, None, torch.ones(64, device=DEVICE, dtype=HALF), EPS, scale)[0] is x_TE


def test_no_row_after_a_norm_is_too_large() -> None:
    x_TE, scale = torch.zeros(1, 256, device=DEVICE, dtype=HALF), torch.empty((), device=DEVICE)
    x_TE[0, 3] = 1000.0  # all that there is, where the gain is largest
    gain_E = torch.ones(256, device=DEVICE, dtype=HALF)
    gain_E[3] = 8.0
    fp8.write_norm_scale(gain_E, scale)
    _, found_TE = fp8.add_rms_norm(x_TE, None, None, gain_E, EPS, scale)
    assert found_TE[0, 3].float() * scale == pytest.approx(16 * 8, rel=0.04)


def test_weight_fills_the_range_of_8_bits() -> None:
    weight_OI, scale = (torch.randn(96, 640, device=DEVICE) * 0.02).to(HALF), torch.empty((), device=DEVICE)
    packed_OI = torch.empty_like(weight_OI, dtype=fp8.DTYPE)
    fp8.write_weight(weight_OI, packed_OI, scale)
    check_rounded(packed_OI, scale.expand(96), weight_OI.float())
    assert packed_OI.float().abs().max() == pytest.approx(fp8.TOP, rel=1e-6)


def test_product_is_that_of_the_numbers_in_8_bits_and_of_both_scales() -> None:
    x_TI, weight_OI = (torch.randn(rows, 640, device=DEVICE).to(torch.float8_e4m3fn) for rows in (9, 96))
    x_scale, weight_scale = (torch.tensor(value, device=DEVICE) for value in (0.25, 0.03))
    bias_O = torch.randn(96, device=DEVICE, dtype=torch.bfloat16)
    found_TO = fp8.product(x_TI, x_scale, weight_OI, weight_scale, bias_O, torch.bfloat16)
    exact_TO = (x_TI.double() * 0.25) @ (weight_OI.double() * 0.03).T + bias_O.double()
    assert (found_TO - exact_TO).norm() / exact_TO.norm() < 5e-3


@pytest.mark.gpu
def test_product_of_rows_is_off_by_what_three_bits_of_mantissa_are() -> None:
    x_TI, weight_OI = torch.randn(9, 640, device=DEVICE).to(HALF), (torch.randn(96, 640, device=DEVICE) * 0.02).to(HALF)
    packed_OI, scale = torch.empty_like(weight_OI, dtype=fp8.DTYPE), torch.empty((), device=DEVICE)
    fp8.write_weight(weight_OI, packed_OI, scale)
    rows_TI, scale_T = fp8.rows(x_TI)
    found_TO = fp8.product(rows_TI, torch.ones((), device=DEVICE), packed_OI, scale, None, HALF).float() * scale_T[:, None]
    expected_TO = x_TI.double() @ weight_OI.double().T
    assert 1e-2 < (found_TO - expected_TO).norm() / expected_TO.norm() < 0.05


def test_weight_of_zeros_stays_one() -> None:
    weight_OI, scale = torch.zeros(32, 64, device=DEVICE, dtype=HALF), torch.empty((), device=DEVICE)
    packed_OI = torch.ones(32, 64, device=DEVICE).to(fp8.DTYPE)
    fp8.write_weight(weight_OI, packed_OI, scale)
    assert (packed_OI.float() == 0).all()
    assert scale.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [17_000, 39_000])
def test_row_that_is_not_finite_is_nan_and_no_other_is(bad: float, place: int) -> None:
    x_TI = torch.randn(3, 40_000, device=DEVICE, dtype=HALF)
    x_TI[1, place] = bad
    weight_OI, scale, one = (
        torch.randn(32, 40_000, device=DEVICE, dtype=HALF),
        torch.empty((), device=DEVICE),
        torch.ones((), device=DEVICE),
    )
    packed_OI = torch.empty_like(weight_OI, dtype=fp8.DTYPE)
    fp8.write_weight(weight_OI, packed_OI, scale)
    rows_TI, scale_T = fp8.rows(x_TI)
    found_TO = fp8.product(rows_TI, one, packed_OI, scale, None, HALF) * scale_T[:, None]
    assert found_TO[1].isnan().all()
    assert found_TO[[0, 2]].isfinite().all()
