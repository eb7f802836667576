"""Attention that streams through shared memory. Without a CUDA device its plan alone runs, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from redline.kernels.decode import streamed  # noqa: E402
from redline.kernels.decode.attention import DecodeBatch, choose_tile, decode_attention  # noqa: E402
from redline.kernels.decode.rotate_and_store import rotate_and_store  # noqa: E402
from redline.kernels.decode.streamed import LEAST_STAGES, MOST_PARTS, TOKENS, plan_step, streamed_attention  # noqa: E402

DEVICE = "cuda" if ON_CUDA else "cpu"
EPS = 1e-6


def planned(positions: list[int], monkeypatch: pytest.MonkeyPatch, multiprocessors: int = 132, kv_heads: int = 2) -> Tensor:
    """The items: entry, line, position, part, parts."""
    monkeypatch.setattr(streamed, "_multiprocessors", lambda device: multiprocessors)
    B, arrived = len(positions), torch.zeros(len(positions) * kv_heads, dtype=torch.int32, device=DEVICE)
    lines_B = torch.arange(B, dtype=torch.int32, device=DEVICE) + 5
    table_RM = torch.zeros(B + 5, 1, dtype=torch.int32, device=DEVICE)
    plan = plan_step(torch.tensor(positions, device=DEVICE), lines_B, table_RM, arrived, kv_heads, 64)
    entry_I, line_I, position_I, part_I = plan.items_I4[plan.items_I4[:, 0] >= 0].cpu().unbind(1)
    return torch.stack((entry_I, line_I, position_I, part_I % 65536, part_I // 65536), 1)


@pytest.mark.parametrize(
    "positions",
    [[0], [-1], [5000], [100] * 40, [3000, 10, -1, 0, 700], [4000, *[20] * 30], list(range(0, 3000, 37)), [24_000] * 4],
)
@pytest.mark.parametrize("multiprocessors", [4, 132])
def test_shares_cover_every_context_once(positions: list[int], multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    items = planned(positions, monkeypatch, multiprocessors)
    seen: dict[int, list[int]] = {}
    for entry, line, position, part, parts in items.tolist():
        assert line == entry + 5
        assert position == positions[entry]
        assert 0 <= part < parts <= MOST_PARTS
        stages = (position + TOKENS) // TOKENS
        begin, end = stages * part // parts, stages * (part + 1) // parts
        assert parts == 1 or end - begin >= min(LEAST_STAGES, stages) // 2
        seen.setdefault(entry, []).extend(range(begin, end))
    assert seen == {entry: list(range((position + TOKENS) // TOKENS)) for entry, position in enumerate(positions)}


@pytest.mark.parametrize("longest", [60, 900, 5000, 100_000])
def test_rows_that_are_cut_come_first_and_their_parts_have_room(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.randint(0, longest, (700,), generator=torch.Generator().manual_seed(longest)) ** 3 // longest**2
    for multiprocessors in (4, 132):
        *_, part_I, parts_I = planned(lengths.tolist(), monkeypatch, multiprocessors).unbind(1)
        cut = int((parts_I > 1).sum())
        assert bool((parts_I[:cut] > 1).all())
        assert cut <= 2 * (streamed.WARPS * multiprocessors // 2)
        assert part_I[:cut].tolist() == [part for parts in parts_I[:cut][part_I[:cut] == 0].tolist() for part in range(parts)]


def test_one_long_row_is_cut_and_rows_alike_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(planned([5000], monkeypatch)) == MOST_PARTS
    assert len(planned([300] * 512, monkeypatch)) == 512
    assert len(planned([2000, *[30] * 15], monkeypatch)) > 16 + 8


def test_other_devices_are_not_served() -> None:
    assert not streamed.serves(64, 14, 2, 64, torch.bfloat16, torch.device("cpu"))


# ── on a device ───────────────────────────────────────────────────────────────────────────────────────────────────────

HEADS = [(14, 2, 64, False), (9, 3, 64, False), (32, 8, 64, False), (28, 4, 128, False), (16, 8, 128, True), (8, 8, 64, True)]
"""Query heads, key/value heads, their size, whether they are normed."""


class Case:
    """A cache of random tokens, and what is beyond them NaN."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, has_norms: bool, page: int, positions_B: Tensor) -> None:
        torch.manual_seed(len(positions_B))
        B, longest = len(positions_B), int(positions_B.max()) + 1
        pages = -(-longest // page)
        number = B * pages + 1
        self.positions_B, self.kv_heads, self.head_dim = positions_B.cuda(), kv_heads, head_dim
        self.lines_B = torch.arange(B, dtype=torch.int32, device="cuda")
        self.table_RM = (torch.randperm(number - 1, device="cuda")[: B * pages] + 1).view(B, pages).int()
        self.cache = torch.randn(2, number, kv_heads, page, head_dim, device="cuda", dtype=torch.bfloat16)
        self.heads_BND = torch.randn(B, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        self.rotary = torch.randn(2, longest, head_dim // 2, device="cuda", dtype=torch.bfloat16)
        gains = torch.rand(2, head_dim, device="cuda", dtype=torch.bfloat16) + 0.5
        self.norms = (gains[0], gains[1]) if has_norms else None
        for row, position in enumerate(positions_B.tolist()):
            at, inside = divmod(max(position, 0), page)
            self.cache[:, self.table_RM[row, at], :, inside:] = torch.nan
            self.cache[:, self.table_RM[row, at + 1 :].long()] = torch.nan

    def reference(self) -> tuple[Tensor, Tensor]:
        keys, values = cache = self.cache.clone()
        batch, tile = DecodeBatch(self.positions_B, self.lines_B, self.table_RM), choose_tile(99, 99, self.head_dim)
        return decode_attention(self.heads_BND, keys, values, batch, self.rotary, self.norms, EPS, tile), cache

    def streamed(self, cache: Tensor, *, is_stored: bool = False) -> Tensor:
        arrived = torch.zeros(len(self.positions_B) * self.kv_heads, dtype=torch.int32, device="cuda")
        plan = plan_step(self.positions_B, self.lines_B, self.table_RM, arrived, self.kv_heads, self.head_dim)
        out_BHD = streamed_attention(self.heads_BND, *cache, plan, self.rotary, self.norms, EPS, is_stored=is_stored)
        assert not arrived.any(), "zeros for the next launch"
        return out_BHD


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert bool(ours.isfinite().all())
    assert float((ours.float() - expected.float()).norm() / expected.float().norm()) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("rows", "least", "most"), [(1, 5000, 5001), (3, 1, 4000), (24, 1, 3000), (128, 1, 900), (700, 1, 200)]
)
def test_it_is_decode_attention(heads: tuple[int, int, int, bool], page: int, rows: int, least: int, most: int) -> None:
    positions_B = torch.randint(least, most, (rows,), generator=torch.Generator().manual_seed(rows))
    if rows > 2:
        positions_B[rows // 2], positions_B[0] = -1, 0
    case = Case(*heads, page, positions_B)
    expected, written = case.reference()
    cache = case.cache.clone()
    first = case.streamed(cache)
    assert_near(first, expected)
    assert not first[case.positions_B < 0].any()
    live = written.isfinite()
    assert torch.equal(cache.isfinite(), live)
    torch.testing.assert_close(cache[live].float(), written[live].float(), rtol=0.02, atol=0)  # norms add up in another order
    assert torch.equal(case.streamed(case.cache.clone()), first)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
def test_tokens_of_one_row_that_are_stored_are_read_like_others(heads: tuple[int, int, int, bool]) -> None:
    """Eight entries are tokens 700 to 707 of one line, others single."""
    case = Case(*heads, 64, torch.tensor([*range(700, 708), 30, 31, 64, 900, 0, -1]))
    case.lines_B[:8] = 0
    for place in range(700, 708):
        case.cache[:, case.table_RM[0, place // 64], :, place % 64] = torch.nan
    slots_B = case.table_RM[case.lines_B.long(), case.positions_B.clamp(min=0) // 64] * 64 + case.positions_B % 64
    slots_B = torch.where(case.positions_B < 0, 0, slots_B).long()
    keys, values = cache = case.cache.clone()
    places = (case.positions_B.clamp(min=0), slots_B)
    rotate_and_store(case.heads_BND, keys, values, *places, case.rotary, case.norms, EPS, in_place=False)
    before = cache.clone()
    found = case.streamed(cache, is_stored=True)
    assert torch.equal(cache.nan_to_num(7.0), before.nan_to_num(7.0)), "nothing is written"
    batch, tile = DecodeBatch(case.positions_B, case.lines_B, case.table_RM), choose_tile(99, 99, case.head_dim)
    assert_near(found, decode_attention(case.heads_BND, keys, values, batch, case.rotary, case.norms, EPS, tile))
