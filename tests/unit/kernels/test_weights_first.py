"""Products of some rows whose weights are asked for before their rows are there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels.decode.hopper import SHARED_MEMORY
from redline.kernels.decode.weights_first import (
    HALF_ROOM,
    MOST_ROWS,
    ROOM,
    Cut,
    cut_of,
    macros,
    product,
    product_as,
    serves,
    source,
)
from redline.kernels.decoder_steps import add_rms_norm

MODELS = {
    "135m": (576, 1536, 960, 576),
    "0.5b": (896, 4864, 1152, 896),
    "0.6b": (1024, 3072, 4096, 2048),
    "1.5b": (1536, 8960, 2048, 1536),
    "7b": (3584, 18944, 4608, 3584),
    "14b": (5120, 13824, 7168, 5120),
}
"""Hidden units, inner ones, columns of qkv, and what attention gives to o."""


def products(hidden: int, inner: int, heads: int, attended: int) -> list[tuple[int, int, bool]]:
    """Columns, K, and whether it is gated: qkv, o, gate and up, down."""
    return [(heads, hidden, False), (hidden, attended, False), (inner, hidden, True), (hidden, inner, False)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("multiprocessors", [78, 114, 132])
def test_cuts_find_room_and_leave_no_part_without_work(model: tuple[int, int, int, int], multiprocessors: int) -> None:
    for rows in range(1, MOST_ROWS + 1):
        for columns, inner, is_gated in products(*model):
            cut = cut_of(rows, columns, inner, multiprocessors, is_gated=is_gated)
            assert cut.rows % 8 == 0
            assert rows <= cut.rows < rows + 8
            assert cut.stages >= 2
            assert cut.shared_bytes <= (SHARED_MEMORY if cut.room == ROOM else SHARED_MEMORY // 2 - 1024)
            assert 1 <= cut.parts <= 8, "no cluster is larger everywhere"
            assert cut.parts <= -(-inner // 64), "a part without K"
            whole = cut.whole(columns, multiprocessors)
            assert whole % cut.parts == 0
            assert 0 <= whole <= cut.tiles(columns)


def test_tiles_that_are_left_over_are_cut() -> None:
    cut = cut_of(16, 4864, 896, 132, is_gated=True)
    assert cut == Cut(16, 1, 4, True, HALF_ROOM)
    assert (cut.tiles(4864), cut.whole(4864, 132)) == (152, 132)
    assert cut_of(16, 18944, 3584, 132, is_gated=True).whole(18944, 132) == 264
    assert cut_of(40, 896, 4864, 132) == Cut(40, 1, 8, False, ROOM)
    assert cut_of(40, 3584, 18944, 132).tall == 2


def test_the_instruction_is_as_wide_as_the_rows() -> None:
    text = source(Cut(40, 1, 1, False, ROOM))
    assert "m64n40k16" in text
    assert "%19}, %20, %21, 1, 1, 1, 0, 0;" in text
    assert macros(Cut(40, 1, 4, True, ROOM)) == {"ROWS": 40, "TALL": 1, "STAGES": 14, "PARTS": 4, "GATED": 1}


def test_other_devices_are_not_served() -> None:
    assert not serves(torch.zeros(32, 8, dtype=torch.bfloat16))


# ── on a device ───────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def expected(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_gated: bool) -> Tensor:
    """In float32, rounded where the kernel rounds."""
    both = F.linear(x_BK.float(), weight_NK.float(), None if bias_N is None else bias_N.float())
    if not is_gated:
        return both
    gate, up = both.bfloat16().float().chunk(2, dim=-1)
    return F.silu(gate).bfloat16().float() * up


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [1, 7, 16, 24, 33, 64, 100, 128])
def test_it_is_the_product(model: tuple[int, int, int, int], rows: int) -> None:
    torch.manual_seed(rows)
    for columns, inner, is_gated in products(*model):
        x_BK, weight_NK = numbers(rows, inner), numbers(columns * (2 if is_gated else 1), inner, scale=inner**-0.5)
        bias_N = None if is_gated else numbers(columns)
        assert serves(weight_NK)
        wanted = expected(x_BK, weight_NK, bias_N, is_gated)
        for _ in range(3):
            found = product(x_BK, weight_NK, bias_N, is_gated=is_gated)
            torch.testing.assert_close(found.float(), wanted, atol=0.03, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("tall", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("room", [HALF_ROOM, ROOM])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "is_gated"),
    [(1, 512, 16, False), (13, 520, 4400, False), (40, 4864, 200, False), (9, 1000, 40, True), (64, 896, 4864, True)],
)
def test_edges_of_tiles_and_parts_lie_anywhere(
    tall: int, parts: int, room: int, rows: int, inner: int, columns: int, is_gated: bool
) -> None:
    torch.manual_seed(rows)
    x_BK, weight_NK = numbers(rows, inner), numbers(columns * (2 if is_gated else 1), inner, scale=inner**-0.5)
    cut = Cut(-(-rows // 8) * 8, tall, parts, is_gated, room)
    found = product_as(x_BK, weight_NK, None, cut).float()
    torch.testing.assert_close(found, expected(x_BK, weight_NK, None, is_gated), atol=0.03, rtol=0.01)
    assert torch.equal(found, product_as(x_BK, weight_NK, None, cut).float()), "parts are added up in their order"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 16, 64])
def test_a_chain_of_launches_that_begin_early_waits_where_it_has_to(rows: int) -> None:
    """Layers as the engine has them, into memory that is used again and again: nothing but launches that let the next begin,
    some far longer than those behind them. Beside them the same with a launch of torch's between, which waits for all in
    front of it."""
    torch.manual_seed(0)
    wide, narrow = numbers(2 * 18944, 896, scale=896**-0.5), numbers(896, 18944, scale=18944**-0.5)
    square, gain = numbers(896, 896, scale=896**-0.5), torch.ones(896, device="cuda", dtype=torch.bfloat16)
    marker = torch.zeros(1, device="cuda")

    def chain(x_BE: Tensor, apart: bool) -> Tensor:
        def done(result: Tensor) -> Tensor:
            if apart:
                marker.add_(1)
            return result

        delta: Tensor | None = None
        for _ in range(6):
            x_BE, normed = add_rms_norm(x_BE, delta, gain, 1e-6, early=not apart)
            attended = done(product(done(product(done(normed), square)), square))
            x_BE, normed = add_rms_norm(x_BE, attended, gain, 1e-6, early=not apart)
            delta = done(product(done(product(done(normed), wide, is_gated=True)), narrow))
        return add_rms_norm(x_BE, delta, gain, 1e-6, early=not apart)[1]

    with torch.inference_mode():
        starts = [numbers(rows, 896) for _ in range(5)]
        wanted = [chain(start, apart=True).clone() for start in starts]
        x_BE, graph = starts[0].clone(), torch.cuda.CUDAGraph()
        chain(x_BE, apart=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = chain(x_BE, apart=False)
        for _ in range(50):
            for start, end in zip(starts, wanted, strict=True):
                x_BE.copy_(start)
                graph.replay()
                assert torch.equal(found, end)
