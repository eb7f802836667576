"""Attention over the paged cache, against every query on its own in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.engine.native.cache import attention as module
from redline.engine.native.cache.attention import MAX_PADDING, GatherAttention, Runs, _groups
from redline.engine.native.cache.kv_cache import KVCache

LAYERS = 2
CPU = torch.device("cpu")


@dataclass
class Heads:
    """What a network says of its attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int = LAYERS


@dataclass
class Batch:
    """Runs of new tokens after contexts that are in the cache already."""

    contexts: list[int]
    lengths: list[int]
    block_size: int

    @property
    def ends(self) -> list[int]:
        return [context + length for context, length in zip(self.contexts, self.lengths, strict=True)]

    @property
    def blocks_needed(self) -> list[int]:
        return [-(-end // self.block_size) for end in self.ends]

    def tables(self, generator: np.random.Generator, width: int) -> np.ndarray:
        """Every sequence its own blocks, in any order. The rest of a table names blocks at random, as a row's old tenants leave
        it."""
        order = generator.permutation(np.arange(1, 1 + sum(self.blocks_needed)))
        tables = generator.choice(order, size=(len(self.contexts), width))
        parts = np.split(order, np.cumsum(self.blocks_needed)[:-1])
        for table, blocks in zip(tables, parts, strict=True):
            table[: len(blocks)] = blocks
        return tables.astype(np.int32)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    size = draw(st.integers(1, 7))
    length = st.one_of(st.just(1), st.integers(1, 25)) if draw(st.booleans()) else st.just(1)
    runs = draw(st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 40)), length), min_size=1, max_size=7))
    return Batch([context for context, _ in runs], [length for _, length in runs], size)


head_shapes = st.sampled_from([Heads(1, 1, 4), Heads(2, 2, 8), Heads(4, 2, 6), Heads(6, 2, 8), Heads(3, 1, 10)])


@dataclass
class Case:
    """A cache with the contexts in it, and new tokens."""

    batch: Batch
    cache: KVCache
    runs: Runs
    keys: list[Tensor]
    values: list[Tensor]
    """Of each sequence: [layers, tokens, K, D], contexts included."""
    q: Tensor
    """[layers, new tokens, H, D]."""

    def new(self, whole: list[Tensor], layer: int) -> Tensor:
        return torch.cat([x[layer, context:] for x, context in zip(whole, self.batch.contexts, strict=True)])

    def attend(self, attention: GatherAttention, layer: int) -> Tensor:
        return attention(layer, self.q[layer], self.new(self.keys, layer), self.new(self.values, layer))

    def expected(self, layer: int) -> Tensor:
        """float64[new tokens, H, D]."""
        queries = self.q[layer].split(self.batch.lengths)
        return torch.cat([naive(q, k[layer], v[layer]) for q, k, v in zip(queries, self.keys, self.values, strict=True)])


def naive(q_QHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
    """The last Q of N tokens attend."""
    (Q, H, D), (N, K, _) = q_QHD.shape, k_NKD.shape
    keys, values = (x.double().repeat_interleave(H // K, dim=1) for x in (k_NKD, v_NKD))
    scores = torch.einsum("qhd,nhd->hqn", q_QHD.double(), keys) / math.sqrt(D)
    hidden = torch.arange(N) > torch.arange(N - Q, N)[:, None]
    return torch.einsum("hqn,nhd->qhd", torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1), values)


def make_case(
    batch: Batch, heads: Heads, seed: int, *, heads_first: bool = False, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Case:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cache = KVCache(heads, 1 + sum(batch.blocks_needed), batch.block_size, CPU, dtype, heads_first=heads_first)
    cache.blocks.copy_(1000 * randn(*cache.blocks.shape))  # whatever was there before must not matter
    tables = batch.tables(rng, width=max(batch.blocks_needed) + 3)
    keys, values = ([randn(LAYERS, end, heads.num_kv_heads, heads.head_dim) for end in batch.ends] for _ in range(2))
    for sequence, context in enumerate(batch.contexts):
        position = np.arange(context)
        slots = tables[sequence, position // batch.block_size].astype(np.int64) * batch.block_size + position % batch.block_size
        for layer in range(LAYERS):
            cache.write(layer, torch.from_numpy(slots), keys[sequence][layer, :context], values[sequence][layer, :context])
    runs = Runs(np.array(batch.contexts), np.array(batch.lengths), tables)
    q = scale * randn(LAYERS, sum(batch.lengths), heads.num_heads, heads.head_dim)
    return Case(batch, cache, runs, keys, values, q)


# ── attention ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(batches(), head_shapes, st.integers(0, 2**31), st.booleans(), st.sampled_from([0.1, 1.0, 10.0]))
@example(Batch([0], [1], 4), Heads(4, 2, 6), 0, False, 1.0)
@example(Batch([3, 4, 5], [1, 1, 1], 4), Heads(4, 2, 6), 0, False, 1.0)
@example(Batch([0, 4, 8, 7], [4, 4, 8, 1], 4), Heads(4, 2, 6), 0, False, 1.0)
@example(Batch([0, 0, 40, 40], [25, 1, 1, 25], 4), Heads(6, 2, 8), 0, True, 1.0)
def test_every_new_token_attends_to_itself_and_to_all_before_it(
    batch: Batch, heads: Heads, seed: int, heads_first: bool, scale: float
) -> None:
    case = make_case(batch, heads, seed, heads_first=heads_first, scale=scale)
    attention = GatherAttention(case.cache, case.runs, torch.float32)
    for layer in range(LAYERS):
        torch.testing.assert_close(case.attend(attention, layer).double(), case.expected(layer), rtol=1e-4, atol=2e-5)


@settings(max_examples=60)
@given(batches(), st.integers(0, 2**31), st.sampled_from([1, 50, 400]), st.sampled_from([None, 3]))
@example(Batch([0, 5], [25, 20], 4), 0, 50, None)
def test_large_rectangles_are_attended_to_piece_by_piece(batch: Batch, seed: int, most: int, window: int | None) -> None:
    case, sizes = make_case(batch, Heads(4, 2, 8), seed), list[int]()
    limits, attend = module.Limits(window), module._attend

    def noted(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, softcap: float | None) -> Tensor:
        sizes.append(bias.numel() if bias.shape[2] > 1 else 0)
        return attend(q, keys, values, bias, softcap)

    given = (case.q[0], case.new(case.keys, 0), case.new(case.values, 0))
    whole = GatherAttention(case.cache, case.runs, torch.float32)(0, *given, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_PAIRS", most)
        patch.setattr(module, "_attend", noted)
        in_pieces = GatherAttention(case.cache, case.runs, torch.float32)(0, *given, limits)
    assert max(sizes) <= most
    torch.testing.assert_close(in_pieces, whole, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(batches(), st.integers(0, 2**31))
def test_both_layouts_of_the_cache_give_the_same(batch: Batch, seed: int) -> None:
    found = []
    for heads_first in (False, True):
        case = make_case(batch, Heads(4, 2, 8), seed, heads_first=heads_first)
        found.append(case.attend(GatherAttention(case.cache, case.runs, torch.float32), 0))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("cuts", [[30], [1, 1, 28], [7, 8, 9, 6], [16, 14], [4, 4, 4, 4, 4, 4, 4, 2], [1] * 30])
def test_a_prompt_in_chunks_is_the_prompt_at_once(cuts: list[int], heads_first: bool) -> None:
    whole = make_case(Batch([0], [30], 4), Heads(4, 2, 6), 0, heads_first=heads_first)
    outputs, start = [], 0
    for length in cuts:
        runs = Runs(np.array([start]), np.array([length]), whole.runs.tables_SN)
        new = slice(start, start + length)
        attention = GatherAttention(whole.cache, runs, torch.float32)
        assert attention.positions_T.tolist() == list(range(start, start + length))
        outputs.append(attention(1, whole.q[1, new], whole.keys[0][1, new], whole.values[0][1, new]))
        start += length
    torch.testing.assert_close(torch.cat(outputs).double(), whole.expected(1), rtol=1e-4, atol=2e-5)


def test_sequences_may_share_the_blocks_of_their_beginning_in_the_step_that_computes_them() -> None:
    """Two prompts of eight equal tokens and a ninth: the first computes all, the second only its own last one."""
    case = make_case(Batch([0], [9], 4), Heads(4, 2, 6), 0)
    [first, second, third] = case.runs.tables_SN[0, :3].tolist()
    case.cache.blocks = torch.cat([case.cache.blocks, torch.zeros_like(case.cache.blocks[:, :, :1])], dim=2)
    fourth = case.cache.blocks.shape[2] - 1
    runs = Runs(np.array([0, 8]), np.array([9, 1]), np.array([[first, second, third], [first, second, fourth]]))
    q, k, v = (torch.cat([x, x[-1:]]) for x in (case.q[0], case.keys[0][0], case.values[0][0]))
    found = GatherAttention(case.cache, runs, torch.float32)(0, q, k, v)
    torch.testing.assert_close(found[:9].double(), case.expected(0), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found[9], found[8], rtol=1e-5, atol=1e-6)


@settings(max_examples=30)
@given(batches(), st.integers(0, 2**31))
def test_bfloat16_is_as_close_as_its_eight_bits_allow(batch: Batch, seed: int) -> None:
    case = make_case(batch, Heads(4, 2, 8), seed, dtype=torch.bfloat16)
    found = case.attend(GatherAttention(case.cache, case.runs, torch.bfloat16), 0)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), case.expected(0), rtol=2e-2, atol=3e-2)


@settings(max_examples=60)
@given(batches(), st.integers(0, 2**31), st.booleans(), st.data())
def test_a_sequence_of_nan_is_nobody_elses_problem(batch: Batch, seed: int, heads_first: bool, data: st.DataObject) -> None:
    """Blocks beyond a sequence's own are read to fill up a rectangle, and masking does not keep a NaN out."""
    case = make_case(batch, Heads(4, 2, 6), seed, heads_first=heads_first)
    case.cache.blocks.clamp_(-1, 1)
    sick = data.draw(st.integers(0, len(batch.contexts) - 1))
    case.cache.blocks[:, :, case.runs.tables_SN[sick, : batch.blocks_needed[sick]].tolist()] = math.nan
    case.keys[sick][:], case.values[sick][:] = math.nan, math.nan
    attention = GatherAttention(case.cache, case.runs, torch.float32)
    found = case.attend(attention, 0).isnan().flatten(1).any(dim=1).split(batch.lengths)
    for sequence, is_nan in enumerate(found):
        assert bool(is_nan.all()) if sequence == sick else not bool(is_nan.any())


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=12), st.integers(1, 8))
def test_rectangles_hold_every_run_once_and_waste_little(pairs: list[tuple[int, int]], size: int) -> None:
    starts, lengths = (np.array(column) for column in zip(*pairs, strict=True))
    runs = Runs(starts, lengths, np.zeros((len(pairs), 100), np.int32))
    groups = list(_groups(runs, size))
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(pairs)))
    blocks = -(-runs.ends // size)
    for group in groups:
        assert len(group) * blocks[group].max() <= MAX_PADDING * blocks[group].sum()
        assert lengths[group].max() <= 4 * lengths[group].min(), "each is within a factor of two of the first"


# ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_know_the_place_of_every_token() -> None:
    runs = Runs(np.array([3, 0, 7]), np.array([2, 3, 1]), np.array([[9, 5, 0], [2, 0, 0], [4, 8, 0]]))
    assert runs.ends.tolist() == [5, 3, 8]
    assert runs.offsets.tolist() == [0, 2, 5, 6]
    assert runs.positions().tolist() == [3, 4, 0, 1, 2, 7]
    assert runs.slots(4).tolist() == [9 * 4 + 3, 5 * 4 + 0, 2 * 4 + 0, 2 * 4 + 1, 2 * 4 + 2, 8 * 4 + 3]


# ── the cache ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("heads_first", [False, True])
def test_what_is_written_is_gathered_in_order(heads_first: bool) -> None:
    heads = Heads(4, 2, 3)
    cache = KVCache(heads, 6, 4, CPU, torch.float32, heads_first=heads_first)
    k, v = torch.randn(7, 2, 3), torch.randn(7, 2, 3)
    slots = torch.tensor([20, 21, 22, 23, 8, 9, 10])
    cache.write(1, slots, k, v)
    keys, values = cache.gather(1, torch.tensor([[5, 2], [2, 5]]))
    assert keys.shape == values.shape == (2, 2, 8, 3)
    for found, written in ((keys, k), (values, v)):
        assert torch.equal(found[0, :, :7].transpose(0, 1), written)
        assert torch.equal(found[1, :, :3].transpose(0, 1), written[4:])
        assert torch.equal(found[1, :, 4:].transpose(0, 1), written[:4])
    assert not cache.blocks[0].any(), "the other layer is left alone"


@pytest.mark.parametrize("heads_first", [False, True])
def test_blocks_are_copied_in_all_layers(heads_first: bool) -> None:
    cache = KVCache(Heads(4, 2, 3), 6, 4, CPU, torch.float32, heads_first=heads_first)
    cache.blocks.normal_(generator=torch.Generator().manual_seed(0))
    before = cache.blocks.clone()
    cache.copy(torch.tensor([1, 1, 4]), torch.tensor([2, 3, 5]))
    assert torch.equal(cache.blocks[:, :, [2, 3, 5]], before[:, :, [1, 1, 4]])
    assert torch.equal(cache.blocks[:, :, [0, 1, 4]], before[:, :, [0, 1, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_begins_with_zeros_and_is_as_large_as_it_says(dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 6)
    cache = KVCache(heads, 5, 4, CPU, dtype)
    assert cache.blocks.dtype == dtype
    assert not cache.blocks.any()
    assert cache.bytes == 5 * KVCache.bytes_per_block(heads, 4, dtype) == 5 * 2 * LAYERS * 4 * 2 * 6 * dtype.itemsize
