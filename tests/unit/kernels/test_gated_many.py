"""Gate, up and silu of many rows, tile after tile."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from redline.kernels.decode.gated_many import LEAST_ROWS, Tile, gated_product, macros, serves, source, tile_of
from redline.kernels.decode.hopper import INNER, SHARED_MEMORY

MODELS = {"135m": (576, 1536), "0.5b": (896, 4864), "1.5b": (1536, 8960), "7b": (3584, 18944)}


@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
def test_tiles_cover_every_row_and_column(hidden: int, inner: int) -> None:
    for rows in (513, 700, 1000, 1024, 2048, 3000, 4096, 8192, 32768):
        tile = tile_of(rows, inner, hidden, 132)
        assert tile is not None
        below, across, band = tile.below(rows), tile.across(inner), tile.band(rows)
        assert below * tile.rows * (2 if tile.shared == "weights" else 1) >= rows
        assert across * tile.columns * (2 if tile.shared == "rows" else 1) >= inner
        assert 1 <= band <= below
        assert 2 * tile.columns <= 256, "no instruction is wider"
        assert tile.stages > tile.lead
        assert math.ceil(hidden / INNER) >= tile.stages
        assert tile.shared_bytes <= SHARED_MEMORY


def test_few_rows_and_few_turns_are_left_to_others() -> None:
    assert tile_of(LEAST_ROWS - 1, 4864, 896, 132) is None
    assert tile_of(1024, 4864, 64, 132) is None


def test_the_instruction_is_as_wide_as_gate_and_up() -> None:
    tile = Tile(2, 1, 104, "weights")
    assert "m64n208k16" in source(tile)
    assert macros(tile)["COLUMNS"] == 104


def test_other_devices_are_not_served() -> None:
    assert not serves(torch.zeros(32, 8, dtype=torch.bfloat16), None)


# ── on a device ───────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_is_product(rows: int, hidden: int, inner: int, tile: Tile) -> None:
    torch.manual_seed(rows)
    x_BK = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight_NK = torch.randn(2 * inner, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    gate_BI, up_BI = F.linear(x_BK.float(), weight_NK.float()).chunk(2, 1)
    expected = F.silu(gate_BI) * up_BI
    first = gated_product(x_BK, weight_NK, tile)
    assert float((first.float() - expected).norm() / expected.norm()) < 0.012
    assert float((first.float() - expected).abs().max()) < 0.05 * float(expected.abs().max())
    for _ in range(3):
        assert torch.equal(gated_product(x_BK, weight_NK, tile), first)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rows", [513, 768, 1000, 2048, 4096])
def test_it_is_the_product_and_its_activation(hidden: int, inner: int, rows: int) -> None:
    tile = tile_of(rows, inner, hidden, 132)
    assert tile is not None
    assert_is_product(rows, hidden, inner, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", ["weights", "rows", "nothing"])
@pytest.mark.parametrize(("groups", "columns"), [(2, 128), (2, 104), (3, 80), (3, 96)])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 520, 8), (200, 1000, 264), (1500, 896, 1000)])
def test_edges_of_tiles_lie_anywhere(shared: str, groups: int, columns: int, rows: int, hidden: int, inner: int) -> None:
    assert_is_product(rows, hidden, inner, Tile(groups, 1, columns, shared))
