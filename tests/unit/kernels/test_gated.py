"""Gate, up and silu of many rows in one launch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from redline.kernels.decode.gated import MOST_ROWS, Tile, gated_product, macros, serves, source, tile_of
from redline.kernels.decode.hopper import SHARED_MEMORY
from redline.kernels.decoder_steps import silu_mul

MODELS = {"135m": (576, 1536), "0.5b": (896, 4864), "0.6b": (1024, 3072), "1.5b": (1536, 8960)}


@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
def test_tiles_cover_every_row_and_column_in_the_fewest_turns(hidden: int, inner: int) -> None:
    for rows in range(65, MOST_ROWS + 1):
        tile = tile_of(rows, inner, hidden, 132)
        if tile is None:
            continue
        below, across = -(-rows // tile.rows), -(-inner // tile.columns)
        assert rows >= 0.7 * below * tile.rows
        assert below % tile.shared == 0
        assert tile.columns % 8 == 0
        assert 2 * tile.columns <= 256, "no instruction is wider"
        assert tile.tall * tile.columns <= 192, "no thread has so many registers"
        assert tile.stages >= 3
        assert tile.shared_bytes <= SHARED_MEMORY
        turns = -(-below * across // 132)
        narrower = -(-below * -(-inner // (tile.columns - 8)) // 132) if tile.columns > 8 else turns + 1
        assert narrower > turns, "a narrower tile would take no more turns"


def test_rows_that_fill_no_tile_are_left_to_cublas() -> None:
    assert tile_of(64, 4864, 896, 132) is None
    assert tile_of(72, 4864, 896, 132) is None
    assert tile_of(513, 4864, 896, 132) is None
    assert tile_of(128, 4864, 896, 132) == Tile(2, 1, 40, 1)
    assert tile_of(512, 4864, 896, 132) == Tile(2, 2, 80, 2)


def test_the_instruction_is_as_wide_as_gate_and_up() -> None:
    text = source(Tile(2, 1, 40, 1))
    assert "m64n80k16" in text
    assert "%39}, %40, %41, 1, 1, 1, 0, 0;" in text
    assert macros(Tile(2, 1, 40, 1))["COLUMNS"] == 40


def test_other_devices_and_dtypes_are_not_served() -> None:
    assert not serves(torch.zeros(32, 8, dtype=torch.bfloat16), None)


# ── on a device ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [96, 128, 150, 184, 256, 300, 384, 500, 512])
def test_it_is_the_product_and_its_activation(hidden: int, inner: int, rows: int) -> None:
    torch.manual_seed(rows)
    x_BK = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight_NK = torch.randn(2 * inner, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    tile = tile_of(rows, inner, hidden, 132)
    assert tile is not None
    assert serves(weight_NK, None)
    expected = silu_mul(F.linear(x_BK, weight_NK)).float()
    for _ in range(3):
        torch.testing.assert_close(gated_product(x_BK, weight_NK, tile).float(), expected, atol=0.03, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [Tile(2, 1, 40, 1), Tile(2, 1, 40, 2), Tile(3, 1, 96, 1), Tile(2, 2, 96, 2), Tile(2, 1, 128, 2)]
)
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 64, 8), (65, 72, 40), (200, 8, 1000), (600, 1000, 264)])
def test_edges_of_tiles_lie_anywhere(tile: Tile, rows: int, hidden: int, inner: int) -> None:
    torch.manual_seed(rows)
    x_BK = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight_NK = torch.randn(2 * inner, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    expected = silu_mul(F.linear(x_BK, weight_NK)).float()
    torch.testing.assert_close(gated_product(x_BK, weight_NK, tile).float(), expected, atol=0.03, rtol=0.01)


@pytest.mark.gpu
def test_it_waits_for_the_launch_in_front_of_it() -> None:
    x_BK = torch.zeros(512, 896, device="cuda", dtype=torch.bfloat16)
    weight_NK = torch.randn(2 * 4864, 896, device="cuda", dtype=torch.bfloat16) * 896**-0.5
    values = torch.randn(20, 512, 896, device="cuda", dtype=torch.bfloat16)
    tile = tile_of(512, 4864, 896, 132)
    assert tile is not None
    expected = [silu_mul(F.linear(value, weight_NK)).float() for value in values]
    found = []
    graph = torch.cuda.CUDAGraph()
    gated_product(x_BK, weight_NK, tile)
    with torch.cuda.graph(graph):
        for value in values:
            torch.add(value, 0, out=x_BK)
            found.append(gated_product(x_BK, weight_NK, tile))
    for _ in range(5):
        graph.replay()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, atol=0.03, rtol=0.01)
