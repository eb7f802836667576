"""The Triton kernels against torch, in Triton's interpreter where there is no GPU. The interpreter cannot multiply bfloat16 and
cuts where a GPU rounds, so float16 stands in for it there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
triton = pytest.importorskip("triton")

from redline.kernels.decode import DecodeBatch, SharedPrefixes, Tile, choose_splits, copy_blocks, rotate_and_store  # noqa: E402
from redline.kernels.decode.attention import decode_attention  # noqa: E402
from redline.kernels.decoder_steps import add_rms_norm, silu_mul  # noqa: E402
from redline.models.layers.rope import rotary_table, rotate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative and absolute: two roundings of the type, or float32 sums in another order."""
POISON = 0
"""A block of NaN that no sequence owns; tables name it beyond a sequence's end."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates is NaN until it is written."""
    if DEVICE == "cpu":
        interpreted = type(triton.language.cdiv).__name__ == "InterpretedFunction"
        assert interpreted, "triton was imported before TRITON_INTERPRET=1 was set; set it in tests/conftest.py"
    torch.manual_seed(0)
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


def check_rounding(out: Tensor, expected: Tensor) -> None:
    """Equal to the bit, but for the few values that a float32 sum in another order puts on the other side of a rounding."""
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[out.dtype], atol=1e-6)
    assert out.dtype == torch.float32 or (out == expected).float().mean() > 0.98


def test_fresh_memory_is_poisoned_here() -> None:
    assert torch.randn(2, 3, device=DEVICE).new_empty(4).isnan().all()


# ── norm and activation ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [64, 96, 896, 1100])
def test_a_residual_is_added_and_normed_as_torch_would(size: int, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(3, size, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(size, device=DEVICE).to(dtype)
    total, normed = add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    check_rounding(normed, F.rms_norm(x + delta, (size,), weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_residual_that_comes_in_parts_is_added_up_before_it_is_rounded(count: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 96, device=DEVICE).to(dtype), torch.randn(96, device=DEVICE).to(dtype)
    parts = torch.randn(count, 3, 96, device=DEVICE)
    total, normed = add_rms_norm(x, parts, weight, EPS)
    check_rounding(total, x + sum(parts).to(dtype))
    check_rounding(normed, F.rms_norm(total, (96,), weight, EPS))


def test_without_a_delta_the_residual_is_only_normed() -> None:
    x, weight = torch.randn(2, 96, device=DEVICE), torch.randn(96, device=DEVICE)
    total, normed = add_rms_norm(x, None, weight, EPS)
    assert total is x
    torch.testing.assert_close(normed, F.rms_norm(x, (96,), weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [8, 1024, 1100])
def test_gate_and_up_are_joined_as_torch_would(size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(3, 2 * size, device=DEVICE).to(dtype)
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, 88.0])
    gate, up = gate_up.chunk(2, dim=-1)
    check_rounding(silu_mul(gate_up), F.silu(gate) * up)


def test_no_tokens_are_no_work() -> None:
    nothing = torch.empty(0, 64, device=DEVICE)
    assert add_rms_norm(nothing, nothing, torch.ones(64, device=DEVICE), EPS)[1].shape == (0, 64)
    assert silu_mul(nothing).shape == (0, 32)


def test_a_kernel_without_gradient_refuses_a_tensor_that_wants_one() -> None:
    x = torch.randn(1, 64, device=DEVICE, requires_grad=True)
    with pytest.raises(AssertionError, match="no gradient"):
        add_rms_norm(x, None, torch.ones(64, device=DEVICE), EPS)
    with pytest.raises(AssertionError, match="no gradient"):
        silu_mul(x)


def rotary_of(num_positions: int, head_dim: int, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """cos and sin [2, positions, D / 2]."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    return torch.stack(rotary_table(frequencies, factor, torch.arange(num_positions, device=DEVICE), dtype)).squeeze(2)


# ── decode attention ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Case:
    """A decode step over a cache that is NaN wherever no token was written."""

    positions: list[int]
    group: int = 1
    """Query heads per key head."""
    kv_heads: int = 1
    head_dim: int = 64
    page: int = 16
    norm: bool = False
    dtype: torch.dtype = torch.float32
    shared: tuple[tuple[int, int, int], ...] = ()
    """(first row, rows, blocks) that have their first blocks in common."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        B, K, D = len(self.positions), self.kv_heads, self.head_dim
        self.heads = self._random(B, self.num_heads + 2 * K, D)
        self.rotary = rotary_of(max(self.positions) + 1, D, self.dtype, self.factor)
        self.norms = (self._random(D), self._random(D)) if self.norm else None
        self.rows = torch.randperm(B)
        self.table = torch.full((B, max(self.positions) // self.page + 3), POISON, dtype=torch.int32)
        self._assign_blocks()
        num_blocks = int(self.table.max()) + 2
        self.keys, self.values = (torch.full((num_blocks, K, self.page, D), torch.nan, dtype=self.dtype) for _ in range(2))
        for row, position in enumerate(self.positions):
            for token in range(position):
                block = self.table[self.rows[row], token // self.page]
                self.keys[block, :, token % self.page] = self._random(K, D).cpu()
                self.values[block, :, token % self.page] = self._random(K, D).cpu()
        self.keys, self.values = self.keys.to(DEVICE), self.values.to(DEVICE)

    @property
    def num_heads(self) -> int:
        return self.group * self.kv_heads

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype).to(DEVICE)

    def _assign_blocks(self) -> None:
        needed = [position // self.page + 1 for position in self.positions]
        free = (torch.randperm(sum(needed)) + POISON + 1).tolist()
        for row, count in enumerate(needed):
            self.table[self.rows[row], :count] = torch.tensor([free.pop() for _ in range(count)])
        for start, size, blocks in self.shared:
            for row in range(start, start + size):
                if self.positions[row] >= 0:
                    donor = next(r for r in range(start, start + size) if self.positions[r] >= 0)
                    self.table[self.rows[row], :blocks] = self.table[self.rows[donor], :blocks]

    def run(
        self,
        num_splits: int = 1,
        prefixes: SharedPrefixes | None = None,
        tile: Tile | None = None,
        arrived: Tensor | None = None,
    ) -> Tensor:
        positions = torch.tensor(self.positions, device=DEVICE)
        batch = DecodeBatch(positions, self.rows.int().to(DEVICE), self.table.to(DEVICE), num_splits, prefixes)
        return decode_attention(self.heads, self.keys, self.values, batch, self.rotary, self.norms, EPS, tile, arrived=arrived)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs in float32, and the two caches with the new tokens in."""
        H, K = self.num_heads, self.kv_heads
        keys, values = self.keys.clone(), self.values.clone()
        q, k, v = self.heads.split([H, K, K], dim=1)
        if self.norms:
            q, k = (F.rms_norm(x, (self.head_dim,), weight, EPS) for x, weight in zip((q, k), self.norms, strict=True))
        table = self.rotary[:, torch.tensor(self.positions).clamp(min=0)].unsqueeze(2)
        q, k = rotate(q, *table), rotate(k, *table)
        out = torch.zeros_like(q, dtype=torch.float32)
        for row, position in enumerate(self.positions):
            if position < 0:
                continue
            blocks = self.table[self.rows[row], : position // self.page + 1].long()
            keys[blocks[-1], :, position % self.page] = k[row]
            values[blocks[-1], :, position % self.page] = v[row]
            seen = [cache[blocks].transpose(0, 1).flatten(1, 2)[:, : position + 1].float() for cache in (keys, values)]
            all_keys, all_values = (cache.repeat_interleave(self.group, dim=0) for cache in seen)
            scores = torch.einsum("hd,hnd->hn", q[row].float(), all_keys) * self.head_dim**-0.5
            out[row] = torch.einsum("hn,hnd->hd", scores.softmax(dim=-1), all_values)
        return out, keys, values


def check(
    case: Case,
    num_splits: int = 1,
    prefixes: SharedPrefixes | None = None,
    tile: Tile | None = None,
    arrived: Tensor | None = None,
) -> None:
    expected, keys, values = case.expected()
    out = case.run(num_splits, prefixes, tile, arrived)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.keys, keys, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(case.values.nan_to_num(7.0), values.nan_to_num(7.0))


EDGES = [0, 1, 15, 16, 17, 31, 32, 33, 65]
"""Around the ends of pages of 16 and tiles of 32."""


def test_every_length_around_the_ends_of_pages_and_tiles() -> None:
    check(Case(EDGES, group=3))


def test_every_length_around_the_ends_of_splits() -> None:
    check(Case([0, 1, 32, 33, 65, 96, 97], group=3), num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_the_last_program_of_a_head_may_merge_its_parts(num_splits: int) -> None:
    positions = [0, 33, -1, 97]
    arrived = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # the second finds the counters as it needs them
        check(Case(positions, group=3), num_splits, arrived=arrived)
        assert not arrived.any()


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_query_heads_of_any_number_share_a_key_head(group: int, head_dim: int) -> None:
    dtype = HALF if group == 7 else torch.float32
    check(Case([37], group, kv_heads=2, head_dim=head_dim, norm=group == 4, dtype=dtype))


def test_more_query_heads_than_the_smallest_tile() -> None:
    check(Case([37], group=20))


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_a_page_may_be_smaller_or_larger_than_a_tile(page: int) -> None:
    check(Case([150, page - 1], page=page), num_splits=2)


@pytest.mark.parametrize("tile", [Tile(16, 1, 2), Tile(64, 4, 3), Tile(128, 4, 3)])
def test_a_tile_may_hold_any_number_of_tokens(tile: Tile) -> None:
    check(Case([70, 64]), tile=tile)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_that_are_not_live_get_zeros_and_write_nothing(num_splits: int) -> None:
    case = Case([-1, 20, -1, 3, -1], norm=True)
    case.heads[[0, 2, 4]] = torch.nan
    check(case, num_splits)


def test_more_splits_than_tiles_leave_some_without_work() -> None:
    check(Case([0, 40, 70], group=4), num_splits=4)


def test_keys_are_normed_and_rotated_to_the_bit_as_in_eager_torch() -> None:
    """All but a few: the sum of squares may be added up in another order."""
    case = Case([0, 1, 17, 63], norm=True, dtype=HALF, factor=1.2)
    _, keys, _ = case.expected()
    case.run()
    written = ~keys.isnan()
    assert (case.keys[written] == keys[written]).float().mean() > 0.999


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    positions = torch.randint(-1, 90, (2,), generator=draw).tolist()
    check(
        Case(positions, group=seed + 1, kv_heads=1 + seed % 2, norm=seed == 1, page=(16, 32, 64)[seed], dtype=HALF),
        num_splits=seed + 1,
    )


# ── prefixes that rows share ───────────────────────────────────────────────────────────────────────────────────────────


def prefixes_of(case: Case, room: int, num_splits: int = 1) -> SharedPrefixes:
    """The case's groups, and empty places up to `room`."""
    columns = [[start, size, blocks * case.page] for start, size, blocks in case.shared]
    columns += [[1, 0, 16]] * (room - len(columns))
    starts, sizes, lengths = torch.tensor(columns, dtype=torch.int32, device=DEVICE).T.contiguous()
    lengths_B = torch.zeros(len(case.rows), dtype=torch.int32, device=DEVICE)
    for start, size, blocks in case.shared:
        lengths_B[start : start + size] = blocks * case.page
    max_size = max(size for _, size, _ in case.shared)
    return SharedPrefixes(starts, sizes, lengths, lengths_B, max_size, num_splits)


@pytest.mark.parametrize(("num_splits", "prefix_splits"), [(1, 1), (2, 1), (1, 3)])
def test_a_shared_prefix_changes_nothing_but_how_it_is_read(num_splits: int, prefix_splits: int) -> None:
    case = Case([70, 64, 33, 16, 17], group=3, shared=((0, 2, 4), (3, 2, 1)), norm=True)
    check(case, num_splits, prefixes_of(case, room=3, num_splits=prefix_splits))


def test_a_group_outlives_its_members() -> None:
    case = Case([-1, 40, -1, 33, -1, -1], kv_heads=2, shared=((0, 4, 2), (4, 2, 1)))
    case.table[case.rows[0]] = POISON
    check(case, prefixes=prefixes_of(case, room=2))


def test_a_group_may_have_more_query_heads_than_one_tile() -> None:
    case = Case([20] * 10, group=7, shared=((0, 10, 1),), dtype=HALF)
    check(case, prefixes=prefixes_of(case, room=1))


def test_groups_that_are_not_there_cost_no_correctness() -> None:
    case = Case([20, 40], shared=((0, 2, 1),))
    nobody = prefixes_of(case, room=2)
    nobody.sizes_C.zero_()
    nobody.lengths_B.zero_()
    check(case, prefixes=nobody)


# ── prompts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "normed"), [(14, 2, 64, False), (3, 3, 16, True), (8, 1, 128, True)]
)
def test_a_prompts_heads_are_rotated_in_place_and_stored(
    num_heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    T, page, sizes = 21, 16, [num_heads, kv_heads, kv_heads]
    heads = torch.randn(T, sum(sizes), head_dim, device=DEVICE).to(dtype)
    norms = tuple(torch.randn(head_dim, device=DEVICE).to(dtype) for _ in range(2)) if normed else None
    rotary = rotary_of(5000, head_dim, dtype)
    positions, slots = torch.randint(0, 5000, (T,), device=DEVICE), torch.randperm(3 * page, device=DEVICE)[:T]
    keys, values = torch.full((2, 3, kv_heads, page, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    q, k, v = (part.clone() for part in heads.split(sizes, dim=1))
    if norms:
        q, k = (F.rms_norm(part, (head_dim,), weight, EPS) for part, weight in zip((q, k), norms, strict=True))
    expected_q, expected_k = (rotate(part, *rotary[:, positions].unsqueeze(2)) for part in (q, k))

    rotate_and_store(heads, keys, values, positions, slots, rotary, norms, EPS)

    check_rounding(heads, torch.cat([expected_q, expected_k, v], dim=1))
    check_rounding(keys[slots // page, :, slots % page], expected_k)
    assert torch.equal(values[slots // page, :, slots % page], v)
    assert int(keys[:, 0, :, 0].isfinite().sum()) == T, "nothing else was written"


def test_heads_that_are_not_rotated_in_place_are_stored_all_the_same() -> None:
    T, page, before = 5, 16, torch.randn(5, 4, 16, device=DEVICE)
    found = []
    for in_place in (True, False):
        heads, (keys, values) = before.clone(), torch.zeros((2, 1, 1, page, 16), device=DEVICE)
        places = torch.arange(T, device=DEVICE), torch.arange(T, device=DEVICE) * 2
        rotate_and_store(heads, keys, values, *places, rotary_of(100, 16, torch.float32), in_place=in_place)
        assert torch.equal(heads, before) != in_place
        found.append((keys, values))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ── the rest ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_splits_fill_the_device_where_the_batch_does_not() -> None:
    assert choose_splits(batch=512, kv_heads=2, max_tokens=4096, head_dim=64) == 1
    assert choose_splits(batch=64, kv_heads=2, max_tokens=4096, head_dim=64) == 4
    assert choose_splits(batch=1, kv_heads=2, max_tokens=256, head_dim=64) == 2
    assert choose_splits(batch=1, kv_heads=1, max_tokens=1, head_dim=64) == 1


def test_blocks_are_copied_in_all_layers() -> None:
    caches = torch.randn(2, 2, 7, 1, 16, 64, device=DEVICE).to(HALF)
    expected = caches.clone()
    expected[:, :, [3, 6]] = caches[:, :, [5, 0]]
    copy_blocks(caches, torch.tensor([5, -1, 0], device=DEVICE), torch.tensor([3, 1, 6], device=DEVICE))
    assert torch.equal(caches, expected)


def test_blocks_of_a_size_that_programs_do_not_divide_are_copied_whole() -> None:
    caches = torch.randn(1, 2, 3, 3, 16, 64, device=DEVICE)
    expected = caches.clone()
    expected[:, :, 2] = caches[:, :, 1]
    copy_blocks(caches, torch.tensor([1], device=DEVICE), torch.tensor([2], device=DEVICE))
    assert torch.equal(caches, expected)
