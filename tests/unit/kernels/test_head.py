"""The language-model head of many rows, and what it says of its logits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from redline.kernels.decode import head
from redline.kernels.decode.hopper import SHARED_MEMORY
from redline.kernels.decode.sampling import sample_plain


def test_tiles_are_those_of_fewer_turns() -> None:
    assert head.SHARED_BYTES <= SHARED_MEMORY
    assert head.tile_of(128, 151_936, 896, 132) is None
    assert head.tile_of(4097, 151_936, 896, 132) is None
    for rows in (129, 256, 512, 1024, 4096):
        tile = head.tile_of(rows, 151_936, 896, 132)
        assert tile is not None
        assert tile.is_late
    same = head.tile_of(129 + 256, 151_936, 896, 132)  # four tiles of 128 rows, whoever shares them
    assert same is not None
    narrow = head.tile_of(512, 1000, 64, 132)
    assert narrow is not None
    assert not narrow.is_late, "of one turn nothing can be done with late"


def test_other_devices_are_not_served() -> None:
    assert not head.serves(torch.zeros(32, 8, dtype=torch.bfloat16))


# ── on a device ───────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = [(576, 49152), (896, 151_936), (64, 520), (200, 1000), (1536, 128_256)]
"""Hidden units and vocabulary."""


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "vocabulary"), SHAPES)
@pytest.mark.parametrize("rows", [129, 200, 512, 700, 1024])
@pytest.mark.parametrize("has_same_rows", [None, False, True])
def test_logits_and_summaries_are_those_of_the_product(
    hidden: int, vocabulary: int, rows: int, has_same_rows: bool | None
) -> None:
    torch.manual_seed(rows)
    x_BE = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight_VE = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) * 2 * hidden**-0.5
    temperature_B = torch.rand(rows, device="cuda") + 0.5
    temperature_B[::7] = 0
    tile = None if has_same_rows is None else head.Tile(has_same_rows, is_late=hidden > 192)
    logits_BV, summaries = head.logits_and_summaries(x_BE, weight_VE, temperature_B, tile)
    torch.testing.assert_close(logits_BV.float(), F.linear(x_BE, weight_VE).float(), rtol=0.01, atol=0.04)
    assert torch.equal(head.logits(x_BE, weight_VE, tile), logits_BV)

    C = -(-vocabulary // head.CHUNK)
    chunks = F.pad(logits_BV.float(), (0, C * head.CHUNK - vocabulary), value=-math.inf).view(rows, C, head.CHUNK)
    assert torch.equal(summaries.peaks_BC, chunks.amax(2))
    divisor_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    weights = torch.exp((chunks - summaries.peaks_BC[..., None]) / divisor_B[:, None, None])
    torch.testing.assert_close(summaries.sums_BC, weights.sum(2), rtol=1e-4, atol=0)

    streams_B, counters_B = torch.randint(-(2**63), 2**63 - 1, (2, rows), device="cuda")
    rest = (temperature_B, streams_B, counters_B.abs())
    found, expected = (
        (torch.empty(rows, dtype=torch.int64, device="cuda"), torch.empty(rows, device="cuda")) for _ in range(2)
    )
    sample_plain(logits_BV, *rest, *found, summaries)
    sample_plain(logits_BV, *rest, *expected)
    same_B = found[0] == expected[0]  # sums of other chunks are rounded otherwise, and a number may lie between two tokens
    assert float(same_B.float().mean()) > 0.99
    assert bool(same_B[::7].all()), "the likeliest token is a comparison"
    torch.testing.assert_close(found[1][same_B], expected[1][same_B], rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_rows_of_nan_say_so_and_leave_others_alone() -> None:
    x_BE = torch.randn(300, 896, device="cuda", dtype=torch.bfloat16)
    weight_VE = torch.randn(5000, 896, device="cuda", dtype=torch.bfloat16) * 0.03
    rest = (torch.ones(300, device="cuda"), *torch.arange(600, device="cuda").view(2, 300))
    found = []
    for broken in (False, True):
        if broken:
            x_BE[7] = math.nan
        logits_BV, summaries = head.logits_and_summaries(x_BE, weight_VE, rest[0])
        tokens_B, logprobs_B = torch.empty(300, dtype=torch.int64, device="cuda"), torch.empty(300, device="cuda")
        sample_plain(logits_BV, *rest, tokens_B, logprobs_B, summaries)
        found.append((tokens_B, logprobs_B))
    (tokens_B, logprobs_B), (others_B, other_logprobs_B) = found
    rest_B = torch.arange(300, device="cuda") != 7
    assert torch.equal(tokens_B[rest_B], others_B[rest_B])
    assert torch.equal(logprobs_B[rest_B], other_logprobs_B[rest_B])
    assert math.isnan(float(other_logprobs_B[7]))
    assert 0 <= int(others_B[7]) < 5000
