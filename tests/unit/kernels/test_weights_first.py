"""Products of some rows whose weights are asked for before their rows are there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels import fp8
from redline.kernels.decode import normed
from redline.kernels.decode.hopper import SHARED_MEMORY
from redline.kernels.decode.residual import Stream
from redline.kernels.decode.weights_first import (
    HALF_ROOM,
    MOST_ROWS,
    ROOM,
    Cut,
    add_product,
    cut_of,
    macros,
    normed_product,
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
@pytest.mark.parametrize(("number_bytes", "norm"), [(2, "none"), (2, "before"), (2, "behind"), (1, "none")])
def test_cuts_find_room_and_leave_no_part_without_work(
    model: tuple[int, int, int, int], multiprocessors: int, number_bytes: int, norm: str
) -> None:
    for rows in range(1, MOST_ROWS + 1):
        for columns, inner, is_gated in products(*model):
            kind = {"is_gated": is_gated, "number_bytes": number_bytes, "norm": norm}
            cut = cut_of(rows, columns, inner, multiprocessors, **kind)
            assert cut.number_bytes == number_bytes
            assert cut.rows % 8 == 0
            assert rows <= cut.rows < rows + 8
            assert cut.stages >= 2
            assert cut.shared_bytes <= (SHARED_MEMORY if cut.room == ROOM else SHARED_MEMORY // 2 - 1024)
            assert 1 <= cut.parts <= 8, "no cluster is larger everywhere"
            assert cut.parts <= -(-inner // cut.inner), "a part without K"
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
    text = source(Cut(40, 1, 1, False, ROOM, 1))
    assert "m64n40k32.f32.e4m3.e4m3" in text
    assert "%19}, %20, %21, 1, 1, 1;" in text
    assert macros(Cut(40, 1, 4, True, ROOM)) == {
        "ROWS": 40, "TALL": 1, "STAGES": 14, "PARTS": 4, "GATED": 1, "ADDED": 0, "NORMED": 0,
    }  # fmt: skip


def test_room_for_norms_is_taken_from_the_ring() -> None:
    plain, behind = Cut(128, 2, 4, False, HALF_ROOM), Cut(128, 2, 4, False, HALF_ROOM, norm="behind")
    assert behind.beside_bytes == 8 * 128 * 4, "squares of eight warps"
    assert Cut(128, 2, 4, False, HALF_ROOM, norm="before").beside_bytes == 128 * 4
    assert behind.stages <= plain.stages
    assert behind.shared_bytes <= HALF_ROOM
    assert (macros(behind)["ADDED"], macros(behind)["NORMED"]) == (1, 0)
    assert (behind.threads, Cut(128, 2, 4, False, HALF_ROOM, norm="before").threads) == (288, 352)


def test_other_devices_are_not_served() -> None:
    assert not serves(torch.zeros(32, 8, dtype=torch.bfloat16))
    assert not serves(torch.zeros(32, 16).to(torch.float8_e4m3fn))


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
    if cut.stages < 2:
        pytest.skip("no room for two stages")
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
            x_BE, normed_BE = add_rms_norm(x_BE, delta, gain, 1e-6, early=not apart)
            attended = done(product(done(product(done(normed_BE), square)), square))
            x_BE, normed_BE = add_rms_norm(x_BE, attended, gain, 1e-6, early=not apart)
            delta = done(product(done(product(done(normed_BE), wide, is_gated=True)), narrow))
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


# ── in 8 bits ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def eights(*shape: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Numbers in 8 bits, and a scale for all of them."""
    (factor,) = fp8.make_scales(1, device=torch.device("cuda"))
    return (torch.randn(*shape, device="cuda") * 30).to(torch.float8_e4m3fn), factor.fill_(scale / 30)


def exact(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], bias_N: Tensor | None, is_gated: bool) -> Tensor:
    """In float64."""
    both = (x[0].double() * x[1]) @ (weight[0].double() * weight[1]).T
    both = both if bias_N is None else both + bias_N.double()
    if not is_gated:
        return both
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


ODD = ((1936, 528, 4400, 272), (48, 1040, 80, 144), (16, 16, 16, 16))
"""Columns and K that are multiples of 16, and of nothing more."""


@pytest.mark.gpu
@pytest.mark.parametrize("model", [*MODELS.values(), *ODD], ids=[*MODELS, "odd", "narrow", "least"])
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 64, 65, 128])
def test_it_is_the_product_of_numbers_in_8_bits(model: tuple[int, int, int, int], rows: int) -> None:
    torch.manual_seed(rows)
    for columns, inner, is_gated in products(*model):
        x, weight = eights(rows, inner), eights(columns * (2 if is_gated else 1), inner, scale=inner**-0.5)
        bias_N = None if is_gated else numbers(columns)
        assert serves(weight[0])
        wanted = exact(x, weight, bias_N, is_gated)
        found = product(x[0], weight[0], bias_N, is_gated=is_gated, scales=(x[1], weight[1]))
        assert found.dtype is torch.bfloat16
        assert error(found, wanted) < 5e-3
        if rows > 1:
            assert max(error(one, other) for one, other in zip(found, wanted, strict=True)) < 2e-2
        for _ in range(3):
            again = product(x[0], weight[0], bias_N, is_gated=is_gated, scales=(x[1], weight[1]))
            assert torch.equal(found, again)


@pytest.mark.gpu
@pytest.mark.parametrize("tall", [1, 2])
@pytest.mark.parametrize("parts", [1, 3, 7, 8])
@pytest.mark.parametrize("room", [HALF_ROOM, ROOM])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "is_gated"),
    [
        (1, 1024, 16, False),
        (13, 1040, 4400, False),
        (40, 4864, 208, False),
        (128, 2064, 208, False),
        (9, 1008, 40, True),
        (64, 1152, 4864, True),
    ],
)
def test_edges_of_tiles_and_parts_lie_anywhere_in_8_bits(
    tall: int, parts: int, room: int, rows: int, inner: int, columns: int, is_gated: bool
) -> None:
    torch.manual_seed(rows)
    x, weight = eights(rows, inner), eights(columns * (2 if is_gated else 1), inner, scale=inner**-0.5)
    cut = Cut(-(-rows // 8) * 8, tall, parts, is_gated, room, 1)
    if cut.stages < 2:
        pytest.skip("no room for two stages")
    found = product_as(x[0], weight[0], None, cut, (x[1], weight[1]))
    assert error(found, exact(x, weight, None, is_gated)) < 5e-3
    assert torch.equal(found, product_as(x[0], weight[0], None, cut, (x[1], weight[1]))), "parts are added up in their order"


@pytest.mark.gpu
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(5, 896, 896), (16, 3584, 18944), (64, 4864, 896), (128, 896, 4864)])
def test_a_row_in_8_bits_has_its_bits_in_any_company(is_gated: bool, rows: int, columns: int, inner: int) -> None:
    """Wherever it stands among so many; beside others; and beside what is not finite, which stays where it is."""
    torch.manual_seed(rows)
    x, weight = eights(rows, inner), eights(columns * (2 if is_gated else 1), inner, scale=inner**-0.5)

    def by_weight(x_BK: Tensor) -> Tensor:
        return product(x_BK, weight[0], is_gated=is_gated, scales=(x[1], weight[1]))

    found, order = by_weight(x[0]), torch.randperm(rows, device="cuda")
    bits = x[0].view(torch.uint8)
    assert torch.equal(by_weight(bits[order].view(x[0].dtype)), found[order])
    others = eights(rows, inner)[0].view(torch.uint8)
    others[rows // 2] = bits[rows // 2]
    assert torch.equal(by_weight(others.view(x[0].dtype))[rows // 2], found[rows // 2])
    spoilt = bits.clone()
    spoilt[1, inner // 3] = 0x7F  # NaN
    spoilt = by_weight(spoilt.view(x[0].dtype))
    assert spoilt[1].isnan().all()
    keep = torch.arange(rows, device="cuda") != 1
    assert torch.equal(spoilt[keep], found[keep])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 16, 64, 128])
def test_a_chain_of_launches_in_8_bits_waits_where_it_has_to(rows: int) -> None:
    """As the chain in bfloat16, with what writes factors in 8 bits between the products."""
    torch.manual_seed(0)
    wide, narrow = eights(2 * 18944, 896, scale=896**-0.5), eights(896, 18944, scale=18944**-0.5)
    square, gain = eights(896, 896, scale=896**-0.5), torch.ones(896, device="cuda", dtype=torch.bfloat16)
    norm_scale, one = fp8.make_scales(2, device=torch.device("cuda"))
    fp8.write_norm_scale(gain, norm_scale)
    marker = torch.zeros(1, device="cuda")

    def chain(x_BE: Tensor, apart: bool) -> Tensor:
        early = not apart

        def by(x_BK: Tensor, scale: Tensor, weight: tuple[Tensor, Tensor], *, is_gated: bool = False) -> Tensor:
            result = product(x_BK, weight[0], is_gated=is_gated, scales=(scale, weight[1]))
            if apart:
                marker.add_(1)
            return result

        delta: Tensor | None = None
        scale_B: Tensor | None = None
        for _ in range(6):
            x_BE, normed = fp8.add_rms_norm(x_BE, delta, scale_B, gain, 1e-6, norm_scale, early=early)
            rows_BE, scale_B = fp8.rows(by(normed, norm_scale, square), early=early)
            attended = by(rows_BE, one, square)
            x_BE, normed = fp8.add_rms_norm(x_BE, attended, scale_B, gain, 1e-6, norm_scale, early=early)
            rows_BE, scale_B = fp8.rows(by(normed, norm_scale, wide, is_gated=True), early=early)
            delta = by(rows_BE, one, narrow)
        return fp8.add_rms_norm(x_BE, delta, scale_B, gain, 1e-6, norm_scale, early=early)[0]

    with torch.inference_mode():
        starts = [numbers(rows, 896) for _ in range(5)]
        wanted = [chain(start, apart=True).clone() for start in starts]
        assert all(end.isfinite().all() for end in wanted)
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


EPS = 1e-6


def begun(x_BE: Tensor, gain_E: Tensor, parts: int) -> Stream:
    """As a product would leave it, with squares of so many parts of the columns."""
    squares = torch.stack([part.float().square().sum(-1) for part in x_BE.tensor_split(parts, dim=1)], dim=1)
    return Stream(x_BE, x_BE * gain_E, squares.contiguous())


def uneven(rows: int, columns: int) -> Tensor:
    """Rows, and parts of rows, of different sizes: with another's scale, or without a part of its squares, a row is wrong."""
    by_row = 2.0 ** (torch.arange(rows, device="cuda") % 5)
    by_column = 2.0 ** (torch.arange(columns, device="cuda") // 16 % 3)
    return numbers(rows, columns) * (by_row[:, None] * by_column / 4).bfloat16()


def assert_normed(rows: int, hidden: int, columns: int, parts: int, is_gated: bool, cut: Cut | None = None) -> None:
    weight_NK = numbers(columns * (2 if is_gated else 1), hidden, scale=hidden**-0.5)
    bias_N, gain_E = None if is_gated else numbers(columns), 1 + 0.1 * numbers(hidden)
    stream = begun(uneven(rows, hidden), gain_E, parts)
    rstd = torch.rsqrt(stream.x_BE.float().square().mean(-1, keepdim=True) + EPS)
    wanted = expected(stream.scaled_BE.float() * rstd, weight_NK, bias_N, is_gated)
    torch.cuda.synchronize()  # gains are weights: older than the launch in front
    found = normed_product(stream, EPS, weight_NK, bias_N, is_gated=is_gated, cut=cut)
    torch.testing.assert_close(found.float(), wanted, atol=0.03, rtol=0.01)
    assert torch.equal(found, normed_product(stream, EPS, weight_NK, bias_N, is_gated=is_gated, cut=cut))


def assert_added(rows: int, hidden: int, inner: int, has_bias: bool, cut: Cut | None = None) -> None:
    x_BE, y_BK, weight_EK = uneven(rows, hidden), numbers(rows, inner), numbers(hidden, inner, scale=inner**-0.5)
    bias_E, gain_E = numbers(hidden) if has_bias else None, 1 + 0.1 * numbers(hidden)
    torch.cuda.synchronize()
    found = add_product(x_BE, y_BK, weight_EK, bias_E, gain_E, cut)
    product_BE = F.linear(y_BK.float(), weight_EK.float(), None if bias_E is None else bias_E.float()).bfloat16()
    torch.testing.assert_close(found.x_BE.float(), x_BE.float() + product_BE.float(), atol=0.04, rtol=0.01)
    torch.testing.assert_close(found.scaled_BE, found.x_BE * gain_E, atol=0.0, rtol=0.0)
    torch.testing.assert_close(found.squares_BP.sum(-1), found.x_BE.float().square().sum(-1), atol=0.0, rtol=1e-5)
    again = add_product(x_BE, y_BK, weight_EK, bias_E, gain_E, cut)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [1, 8, 17, 40, 64, 65, 100, 128])
def test_norms_are_part_of_the_products_around_them(model: tuple[int, int, int, int], rows: int) -> None:
    torch.manual_seed(rows)
    hidden, inner, heads, attended = model
    assert_normed(rows, hidden, heads, -(-hidden // 64), is_gated=False)
    assert_normed(rows, hidden, inner, -(-hidden // 128), is_gated=True)
    assert_added(rows, hidden, attended, has_bias=True)
    assert_added(rows, hidden, inner, has_bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tall", "parts", "room"), [(1, 1, HALF_ROOM), (1, 3, HALF_ROOM), (1, 8, ROOM), (2, 1, ROOM), (2, 4, ROOM)]
)
@pytest.mark.parametrize(
    ("rows", "hidden", "inner"), [(1, 16, 640), (9, 48, 1024), (23, 272, 656), (64, 4400, 640), (128, 208, 912)]
)
def test_edges_of_products_with_norms_lie_anywhere(
    tall: int, parts: int, room: int, rows: int, hidden: int, inner: int
) -> None:
    torch.manual_seed(rows)
    kind = (-(-rows // 8) * 8, tall, parts)
    assert_added(rows, hidden, inner, has_bias=rows % 2 == 1, cut=Cut(*kind, False, room, norm="behind"))
    for is_gated in (False, True):
        assert_normed(rows, inner, hidden, 1 + rows % 10, is_gated, Cut(*kind, is_gated, room, norm="before"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 48, 128])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_a_chain_of_them_in_a_graph_is_the_chain(rows: int, is_tiled: bool) -> None:
    """Launches begin before those in front of them have ended: what they read must be there all the same, and not what an
    earlier replay has left. Tiled: gate and up are those of many rows, as the engine has them of some."""
    torch.manual_seed(rows)
    hidden, inner = 896, 4864
    tile = normed.gated_tile_of(rows, inner, hidden, 132) if is_tiled else None
    layers = [
        (numbers(2 * inner, hidden, scale=hidden**-0.5), numbers(hidden, inner, scale=inner**-0.5), 1 + 0.1 * numbers(hidden))
        for _ in range(8)
    ]
    starts = [begun(numbers(rows, hidden), layers[-1][2], 14) for _ in range(4)]
    stream = Stream(*(each.clone() for each in starts[0]))

    def chain() -> Stream:
        now = stream
        for gate_up, down, gain in layers:
            inner_BI = (
                normed_product(now, EPS, gate_up, is_gated=True)
                if tile is None
                else normed.normed_product(now, EPS, gate_up, None, tile)
            )
            now = add_product(now.x_BE, inner_BI, down, None, gain)
        return now

    def expected_of(start: Stream) -> Tensor:
        x, gain = start.x_BE.float(), layers[-1][2]
        for gate_up, down, next_gain in layers:
            gate, up = F.linear(F.rms_norm(x, (hidden,), gain.float(), EPS), gate_up.float()).chunk(2, dim=-1)
            x, gain = x + F.linear(F.silu(gate) * up, down.float()), next_gain
        return x

    torch.cuda.synchronize()
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    bits: list[list[Tensor]] = []
    for turn in range(12):
        start = starts[turn % 4]
        for room, filled in zip(stream, start, strict=True):
            room.copy_(filled)
        graph.replay()
        wanted = expected_of(start)
        assert float((out.x_BE.float() - wanted).norm() / wanted.norm()) < 0.02
        bits.append([each.clone() for each in out])
        assert all(torch.equal(one, other) for one, other in zip(bits[turn], bits[turn % 4], strict=True))
