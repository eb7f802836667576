"""Products that end in the residual stream, and products of normed rows behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels.decode import normed, residual
from redline.kernels.decode.hopper import SHARED_MEMORY
from redline.kernels.decode.residual import Cut, Stream, add_product, begun, cut_of

EPS = 1e-6
MODELS = {"135m": (576, 1536), "0.5b": (896, 4864), "0.6b": (1024, 3072), "1.5b": (1536, 8960)}
"""Hidden and inner units."""


@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
def test_cuts_and_tiles_cover_all_rows_and_columns_with_what_a_block_has(hidden: int, inner: int) -> None:
    for rows in range(residual.LEAST_ROWS, residual.MOST_ROWS + 1):
        for K in (hidden, inner):
            cut = cut_of(rows, hidden, K, 132)
            across, down = cut.grid(rows, hidden)
            assert cut.fits
            assert cut.shared_bytes <= SHARED_MEMORY
            assert across * cut.columns >= hidden
            assert down // cut.parts * cut.rows >= rows
            assert down % cut.cluster == 0
        for tile in (normed.tile_of(rows, hidden + 256, hidden, 132), normed.gated_tile_of(rows, inner, hidden, 132)):
            assert tile is not None
            across, down = tile.grid(rows, inner if tile.is_gated else hidden + 256)
            assert tile.stages > max(1, tile.lead * (tile.groups - 1)), (
                "the last group would wait for stages that the first one has"
            )
            assert tile.shared_bytes <= SHARED_MEMORY
            assert across * tile.columns >= (inner if tile.is_gated else hidden + 256)
            assert down * tile.rows >= rows
            assert down % tile.shared == 0


def test_what_no_thread_has_registers_for_is_left_to_others() -> None:
    assert normed.gated_tile_of(512, 18944, 3584, 132) is not None
    assert normed.gated_tile_of(512, 29568, 8192, 132) is None
    assert normed.gated_tile_of(513, 4864, 896, 132) is None


def test_other_devices_and_dtypes_are_not_served() -> None:
    assert not normed.serves(torch.zeros(32, 8, dtype=torch.bfloat16))


# ── on a device ───────────────────────────────────────────────────────────────────────────────────────────────────────


def drawn(*shape: int, by: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * by


def assert_near(ours: Tensor, expected: Tensor, by: float) -> None:
    """In proportion to the whole: a few numbers of bfloat16 are off by more."""
    assert bool(ours.isfinite().all())
    assert float((ours.float() - expected).norm() / expected.norm()) < by


def assert_each_near(ours: Tensor, expected: Tensor, by: float) -> None:
    """Every row in proportion to itself."""
    assert bool(ours.isfinite().all())
    assert float(((ours.float() - expected).norm(dim=1) / expected.norm(dim=1)).max()) < by


def assert_is_stream(stream: Stream, sum_BE: Tensor, gain_E: Tensor) -> None:
    assert_near(stream.x_BE, sum_BE, 4e-3)
    assert_near(stream.scaled_BE, sum_BE * gain_E.float(), 6e-3)
    assert_near(stream.squares_BP.sum(1), sum_BE.square().sum(1), 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [129, 184, 333, 512])
def test_a_stream_is_the_sum_its_gain_and_its_squares(hidden: int, inner: int, rows: int) -> None:
    torch.manual_seed(rows)
    for K in (hidden, inner):
        x_BE, y_BK, weight_EK, gain_E = drawn(rows, hidden), drawn(rows, K), drawn(hidden, K, by=K**-0.5), drawn(hidden)
        bias_E = drawn(hidden) if rows % 2 else None
        expected = x_BE.float() + F.linear(y_BK.float(), weight_EK.float(), None if bias_E is None else bias_E.float())
        first = add_product(x_BE, y_BK, weight_EK, bias_E, gain_E)
        assert_is_stream(first, expected, gain_E)
        for _ in range(2):
            again = add_product(x_BE, y_BK, weight_EK, bias_E, gain_E)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), (
                "parts are added in their order"
            )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cut", [Cut(64, 64, 1, 1), Cut(64, 128, 2, 4), Cut(128, 96, 2, 1), Cut(128, 128, 4, 2), Cut(64, 256, 4, 1)]
)
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 8, 64), (65, 72, 40), (200, 1000, 8), (600, 264, 1000)])
def test_edges_of_cuts_lie_anywhere(cut: Cut, rows: int, hidden: int, inner: int) -> None:
    torch.manual_seed(rows)
    x_BE, y_BK, weight_EK, gain_E = drawn(rows, hidden), drawn(rows, inner), drawn(hidden, inner, by=inner**-0.5), drawn(hidden)
    expected = x_BE.float() + F.linear(y_BK.float(), weight_EK.float())
    assert_is_stream(add_product(x_BE, y_BK, weight_EK, None, gain_E, cut), expected, gain_E)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [129, 184, 333, 512])
def test_products_are_those_of_the_normed_rows(hidden: int, inner: int, rows: int) -> None:
    """Rows and parts of them differ in size: with another's scale, or without a part of its squares, a row is wrong."""
    torch.manual_seed(rows)
    sizes_B1 = 2.0 ** (torch.arange(rows, device="cuda") % 5)[:, None]
    sizes_E = 2.0 ** (torch.arange(hidden, device="cuda") // 16 % 3)
    x_BE, gain_E = drawn(rows, hidden) * (sizes_B1 * sizes_E / 4).bfloat16(), drawn(hidden)
    normed_BE = F.rms_norm(x_BE.float(), (hidden,), gain_E.float(), EPS)
    weight_NK, bias_N = drawn(hidden + 256, hidden, by=hidden**-0.5), drawn(hidden + 256)
    both_NK, tile = drawn(2 * inner, hidden, by=hidden**-0.5), normed.gated_tile_of(rows, inner, hidden, 132)
    product_BN = F.linear(normed_BE, weight_NK.float(), bias_N.float())
    gate_BI, up_BI = F.linear(normed_BE, both_NK.float()).chunk(2, 1)
    gated_BI = F.silu(gate_BI) * up_BI
    for parts in (1, 7, 9, 20):
        squares_BP = torch.stack([part.float().square().sum(1) for part in x_BE.tensor_split(parts, 1)], 1).contiguous()
        stream = Stream(x_BE, begun(x_BE, gain_E).scaled_BE, squares_BP)
        assert_each_near(normed.normed_product(stream, EPS, weight_NK, bias_N), product_BN, 0.012)
        assert_each_near(normed.normed_product(stream, EPS, both_NK, None, tile), gated_BI, 0.024)


@pytest.mark.gpu
def test_layers_one_behind_the_other_wait_for_each_other() -> None:
    """As a graph, where every launch begins before the one in front of it has ended."""
    x_BE, gain_E = drawn(512, 896), drawn(896)
    weights = [(drawn(4864 * 2, 896, by=0.03), drawn(896, 4864, by=0.014)) for _ in range(6)]
    tile = normed.gated_tile_of(512, 4864, 896, 132)

    def run() -> Tensor:
        stream = begun(x_BE, gain_E)
        for up, down in weights:
            stream = add_product(stream.x_BE, normed.normed_product(stream, EPS, up, None, tile), down, None, gain_E)
        return stream.x_BE

    expected = run()
    torch.cuda.synchronize()
    slow_BE, reference = x_BE.float(), []
    for up, down in weights:
        gate_BI, up_BI = F.linear(F.rms_norm(slow_BE, (896,), gain_E.float(), EPS), up.float()).chunk(2, 1)
        slow_BE = slow_BE + F.linear(F.silu(gate_BI) * up_BI, down.float())
        reference.append(slow_BE)
    assert_near(expected, reference[-1], 0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        graph.replay()
        assert torch.equal(found, expected)
