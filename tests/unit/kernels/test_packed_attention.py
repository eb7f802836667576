"""Attention's kernels against `PackedAttention` and autograd, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels import attention_plan
from redline.kernels import packed_attention as attention_kernels
from redline.kernels.attention_plan import children_follow, key_blocks, part_size, query_blocks
from redline.kernels.packed_attention import AttentionKernels, Tile, Tiles
from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention.flash import FlashPackedAttention
from redline.models.attention.packed import PackedAttention
from redline.models.layers.rope import rotary_table, rotate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities

PROMPTS = Segments(np.cumsum([0, 19, 7, 40, 1, 21, 1, 1]), np.array([NO_PARENT, 0, 0, 0, NO_PARENT, NO_PARENT, 5]))
UNEVEN = Segments.independent([5, 1, 40])
LENGTHS = {
    "one token": Segments.independent([1]),
    "whole tiles": Segments.independent([32, 64]),
    "uneven": UNEVEN,
    "prompts": PROMPTS,
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that short segments have several blocks, and so many parts that blocks are divided."""
    for size in (64, 128):
        monkeypatch.setitem(attention_kernels.TILES, size, Tiles(Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), 4))


def check(found: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=limit, atol=limit * (expected.detach().abs().max().item() + 1e-6)
    )


def check_against_autograd(
    segments: Segments, heads: tuple[int, int, int], dtype: torch.dtype, *, rotated: bool = False
) -> None:
    torch.manual_seed(0)
    H, K, D = heads
    T = int(segments.offsets[-1])
    projected = torch.randn(T, H + 2 * K, D, device=DEVICE).to(dtype)
    grad = torch.randn(T, H, D, device=DEVICE).to(dtype)
    rotary = None
    before = projected.detach().float().requires_grad_()
    after = before
    if rotated:
        positions = torch.from_numpy(segments.positions()).to(DEVICE)
        rotary = rotary_table(10_000.0 ** (-torch.arange(0, D, 2, device=DEVICE) / D), 1.1, positions, torch.float32)
        after = torch.cat([rotate(before[:, : H + K], *rotary), before[:, H + K :]], dim=1)
    expected = PackedAttention(segments, DEVICE)(0, *after.split([H, K, K], dim=1))
    expected.backward(grad.float())

    kernels = AttentionKernels(segments, H, K, D, DEVICE)
    views = after.detach().to(dtype).split([H, K, K], dim=1)
    out, kept = kernels.forward(*views)
    check(out, expected)
    check(kernels.backward(grad, *views, out, kept, rotary), before.grad)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_values_and_gradients_are_those_of_autograd(lengths: str) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    check_against_autograd(LENGTHS[lengths], (4, 2, 64), dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("most", [4, 1000])
def test_gradients_are_of_what_was_rotated(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "part_size", lambda *_, **__: most)
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    check_against_autograd(UNEVEN, (2, 1, 64), dtype, rotated=True)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("heads", [(2, 2, 64), (3, 1, 128)])
def test_any_number_of_query_heads_shares_a_key_head(heads: tuple[int, int, int]) -> None:
    check_against_autograd(UNEVEN, heads, torch.float16)


@pytest.mark.parametrize("head_dim", sorted(attention_kernels.TILES))
def test_tiles_as_they_are_measured(head_dim: int) -> None:
    """More than one block of every kernel."""
    segments = Segments(np.cumsum([0, 130, 3]), np.array([NO_PARENT, 0]))
    check_against_autograd(segments, (2, 1, head_dim), torch.float16)


def test_no_tokens_are_no_work() -> None:
    kernels = AttentionKernels(Segments.independent([0]), 2, 1, 64, DEVICE)
    views = torch.empty(0, 4, 64, device=DEVICE).split([2, 1, 1], dim=1)
    out, kept = kernels.forward(*views)
    assert kernels.backward(out, *views, out, kept, None).shape == (0, 4, 64)


def test_every_query_is_in_one_block_and_the_longest_come_first() -> None:
    blocks = query_blocks(PROMPTS, 16)
    rows = [np.arange(first, min(first + 16, end)) for first, _, end, _, _ in blocks]
    assert sorted(np.concatenate(rows)) == list(range(PROMPTS.offsets[-1]))
    num_keys = [before + min(first + 16, end) - begin for first, begin, end, _, before in blocks]
    assert num_keys == sorted(num_keys, reverse=True)
    assert num_keys[0] == 19 + 40


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_every_unit_of_every_key_block_is_in_one_part(most: int) -> None:
    heads, size, query_size = 3, 32, 16
    plan = key_blocks(PROMPTS, size, query_size, heads, lambda _: most)
    by_block: dict[int, list[tuple[int, int, int]]] = {}
    for first, end, stop, from_unit, to_unit, slot in plan.parts.tolist():
        assert end <= stop
        by_block.setdefault(first, []).append((from_unit, to_unit, slot))
        assert to_unit - from_unit <= most
    slots = []
    for parts in by_block.values():
        parts.sort()
        assert parts[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        slots += [slot for *_, slot in parts] if len(parts) > 1 else []
        assert len(parts) > 1 or parts[0][2] == -1
    assert sorted(slots) == list(range(plan.num_slots))
    assert {first: end - start for first, _, start, end in plan.sums.tolist()} == {
        first: len(parts) for first, parts in by_block.items() if len(parts) > 1
    }
    prompt = max(to_unit for _, to_unit, _ in by_block[0])
    assert prompt == -(-(19 + 7 + 40 + 1) // query_size) * heads  # the prompt and all that continues it


@pytest.mark.parametrize("lengths", [[512] * 16, [256] * 32, [1024] * 8, [4096] * 2, [1727, 1249, 836, 489, 300] * 2, [5]])
def test_parts_of_key_blocks_end_sooner_together(lengths: list[int]) -> None:
    """On 132 multiprocessors with three programs each, two key heads of seven query heads."""
    blocks = key_blocks(Segments.independent(lengths), 64, 64, 7, lambda _: 10**6).parts
    units = blocks[:, 4] - blocks[:, 3]
    most = part_size(units, copies=2, places=396)

    def end(size: int) -> float:
        return attention_plan._end(units, size, 2, 396)

    assert end(most) <= end(10**6)  # undivided
    assert end(most) <= 1.02 * min(end(size) for size in (8, 16, 24, 32, 48, 64, 96))
    assert end(most) >= 2 * units.sum() / 396


def test_blocks_of_512_tokens_are_one_or_two_parts() -> None:
    """What was measured to be best (benchmarks/LOG.md): up to 28 units whole, 35 to 56 in halves."""
    blocks = key_blocks(Segments.independent([512] * 16), 64, 64, 7, partial(part_size, copies=2, places=396))
    assert len(blocks.parts) == 16 * 12


def test_many_blocks_are_divided_only_where_one_is_far_longer() -> None:
    units = np.full(4000, 7)
    assert part_size(units, copies=2, places=396) >= 7
    assert part_size(np.append(units, 500), copies=2, places=396) < 100
    assert part_size(np.zeros(0, dtype=np.int64), copies=2, places=396) == 1


def test_attempts_must_stand_behind_their_prompt() -> None:
    offsets = np.arange(5)
    assert children_follow(Segments(offsets, np.array([NO_PARENT, 0, 0, NO_PARENT])))
    assert not children_follow(Segments(offsets, np.array([NO_PARENT, NO_PARENT, 0, 0])))
    assert not children_follow(Segments(offsets, np.array([NO_PARENT, 0, NO_PARENT, 0])))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 32])
@pytest.mark.parametrize("parents", [[NO_PARENT, 0, 0, NO_PARENT], [NO_PARENT, NO_PARENT, 0, 1]])
def test_on_a_gpu_every_layout_has_the_gradients_of_autograd(head_dim: int, parents: list[int]) -> None:
    segments = Segments(np.cumsum([0, 70, 9, 130, 33]), np.array(parents))
    heads = [
        torch.randn(int(segments.offsets[-1]), n, head_dim, device=DEVICE).to(torch.bfloat16).requires_grad_()
        for n in (6, 2, 2)
    ]
    exact = [part.detach().float().requires_grad_() for part in heads]
    found = FlashPackedAttention(segments, DEVICE)(0, *heads)
    expected = PackedAttention(segments, DEVICE)(0, *exact)
    check(found, expected)
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad.float())
    for part, reference in zip(heads, exact, strict=True):
        check(part.grad, reference.grad)
