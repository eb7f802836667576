"""Attention's kernels against `PackedAttention` and autograd, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from redline.models import attention_kernels
from redline.models.attention_kernels import AttentionKernels, Tile, Tiles
from redline.models.attention_plan import children_follow, key_blocks, query_blocks
from redline.models.flash_attention import FlashPackedAttention
from redline.models.packed_attention import NO_PARENT, PackedAttention, Segments
from redline.models.rope import rotary_table, rotate

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
@pytest.mark.parametrize("undivided", [4, 1000])
def test_gradients_are_of_what_was_rotated(undivided: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = replace(attention_kernels.TILES[64], undivided=undivided)
    monkeypatch.setitem(attention_kernels.TILES, 64, tiles)
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


@pytest.mark.parametrize("programs", [1, 7, 1000])
def test_every_unit_of_every_key_block_is_in_one_part(programs: int) -> None:
    heads, size, query_size, undivided = 3, 32, 16, 5
    plan = key_blocks(PROMPTS, size, query_size, heads, programs, undivided)
    by_block: dict[int, list[tuple[int, int, int]]] = {}
    for first, end, stop, from_unit, to_unit, slot in plan.parts.tolist():
        assert end <= stop
        by_block.setdefault(first, []).append((from_unit, to_unit, slot))
        assert to_unit - from_unit <= max(undivided, -(-_all_units(size, query_size, heads) // programs))
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


def _all_units(size: int, query_size: int, heads: int) -> int:
    whole = key_blocks(PROMPTS, size, query_size, heads, 1, 1)
    return int((whole.parts[:, 4] - whole.parts[:, 3]).sum())


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
