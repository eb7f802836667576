"""Products of few rows, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels.decode import few_rows
from redline.kernels.decode.few_rows import (
    GATED_ROWS,
    MOST_ROWS,
    Cut,
    Room,
    can_overlap,
    cut_of,
    make_room,
    most_stages,
    product,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EARLY = can_overlap(torch.device(DEVICE))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def gated(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    gate, up = F.linear(x_BK, weight_NK, bias_N).chunk(2, dim=1)
    return F.silu(gate) * up


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS])
def test_the_product_is_torchs_whatever_it_is_cut_into(rows: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(rows)
    monkeypatch.setattr(few_rows, "cut_of", lambda columns, inner, tile=16, is_gated=False: Cut(16, 1, parts))
    x, weight, bias = random(rows, 328), random(72, 328), random(72)  # neither is a multiple of a tile
    room = make_room([(72, 328)], x.device)
    for _ in range(2):  # the second finds the counters as it needs them
        torch.testing.assert_close(product(x, weight, bias, room, early=EARLY), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert not room.arrived.any()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [3, 24, MOST_ROWS + 1, GATED_ROWS])
def test_gate_and_up_are_one_launch(with_bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = random(rows, 160), random(2 * 56, 160), random(2 * 56) if with_bias else None
    out = product(x, weight, bias, make_room([(112, 160)], x.device), is_gated=True, early=EARLY)
    torch.testing.assert_close(out, gated(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_half_precision_is_rounded_where_torch_rounds_it() -> None:
    torch.manual_seed(1)
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    x, weight = random(4, 256, dtype=half), random(2 * 64, 256, dtype=half) / 16
    out = product(x, weight, None, make_room([(128, 256)], x.device), is_gated=True, early=EARLY)
    torch.testing.assert_close(out, gated(x, weight, None), rtol=2e-2, atol=2e-3)


def test_shapes_of_real_models_are_cut_as_they_were_measured() -> None:
    small = {"qkv": (1152, 896), "o": (896, 896), "down": (896, 4864), "head": (151936, 896)}
    assert {name: cut_of(*shape) for name, shape in small.items()} == {
        "qkv": Cut(16, 2, 2),
        "o": Cut(16, 2, 4),
        "down": Cut(32, 2, 8),
        "head": Cut(64, 4, 1),
    }
    assert cut_of(4864, 896, is_gated=True) == Cut(16, 1, 1)
    assert cut_of(18944, 3584, is_gated=True) == Cut(32, 2, 1)
    for inner, stages in ((4864, 5), (8960, 4), (18944, 3)):
        assert cut_of(inner, 896, GATED_ROWS, is_gated=True) == Cut(64, 4, 1, 64, stages)
    assert cut_of(3584, 18944) == Cut(32, 2, 8)
    assert cut_of(4864, 896, 32, is_gated=True) == Cut(32, 2, 1)


@pytest.mark.parametrize(("rows", "is_gated"), [(MOST_ROWS, False), (MOST_ROWS, True), (32, True), (GATED_ROWS, True)])
def test_a_row_is_the_same_however_many_are_beside_it(rows: int, is_gated: bool) -> None:
    torch.manual_seed(rows)
    x, weight = random(rows, 328), random(72, 328)
    room = make_room([(72, 328)], x.device)
    whole = product(x, weight, None, room, is_gated=is_gated, early=EARLY)
    least = rows // 2 + 1  # the fewest that take this tile
    assert torch.equal(product(x[:least].contiguous(), weight, None, room, is_gated=is_gated, early=EARLY), whole[:least])


def test_more_rows_than_a_tile_are_left_to_cublas() -> None:
    with pytest.raises(AssertionError, match="cuBLAS"):
        product(random(MOST_ROWS + 1, 96), random(72, 96), None, make_room([(72, 96)], torch.device(DEVICE)))


def test_parts_that_have_no_room_are_refused() -> None:
    room = Room(torch.empty(1, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE))
    with pytest.raises(AssertionError):
        product(random(1, 896), random(896, 896), None, room)


@pytest.mark.parametrize(("name", "memory", "stages"), [("H200", 233_472, 5), ("A100", 167_936, 5), ("L40S", 102_400, 3)])
def test_a_smaller_device_has_room_for_fewer_stages(
    name: str, memory: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(shared_memory_per_multiprocessor=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    assert most_stages.__wrapped__(torch.device("cuda")) == stages, name
