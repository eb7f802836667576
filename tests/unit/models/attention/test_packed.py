from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.kernels.cpu import attention
from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention import padded
from redline.models.attention.packed import PackedAttention


@dataclass
class Packing:
    """Segments in any order, as a caller may pack them."""

    lengths: list[int]
    parents: list[int]

    @property
    def segments(self) -> Segments:
        return Segments(np.cumsum([0, *self.lengths], dtype=np.int64), np.array(self.parents, dtype=np.int64))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def own(self, segment: int) -> list[int]:
        start = sum(self.lengths[:segment])
        return list(range(start, start + self.lengths[segment]))

    def whole(self, segment: int) -> list[int]:
        """Packed indices of the sequence that ends with this segment, parent first."""
        parent = self.parents[segment]
        return (self.own(parent) if parent != NO_PARENT else []) + self.own(segment)


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    """A few sequences, some continued by several segments, some of very different lengths, in a random order."""
    roots = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    children = [draw(st.lists(st.integers(0, 24), max_size=4)) for _ in roots]
    nodes = [(length, NO_PARENT) for length in roots]
    nodes += [(length, root) for root, lengths in enumerate(children) for length in lengths]
    order = draw(st.permutations(range(len(nodes))))
    place = {node: position for position, node in enumerate(order)}
    return Packing(
        [nodes[node][0] for node in order],
        [NO_PARENT if nodes[node][1] == NO_PARENT else place[nodes[node][1]] for node in order],
    )


head_shapes = st.sampled_from([(1, 1, 4), (2, 2, 8), (4, 2, 6), (6, 2, 8), (3, 1, 10), (6, 2, 16), (3, 1, 80)])


def random_heads(packing: Packing, heads: tuple[int, int, int], seed: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    H, K, D = heads
    q, k, v = (torch.randn(packing.num_tokens, count, D, generator=generator) for count in (H, K, K))
    return scale * q, k, v


def naive_attention(packing: Packing, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each sequence on its own, in float64; nothing is shared."""
    heads_per_key = q.shape[1] // k.shape[1]
    rows: dict[int, Tensor] = {}
    for segment in range(len(packing.lengths)):
        sequence, own = packing.whole(segment), packing.own(segment)
        keys, values = (x[sequence].double().repeat_interleave(heads_per_key, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[own].double(), keys) / math.sqrt(q.shape[2])
        later = torch.ones(len(own), len(sequence), dtype=torch.bool).triu(len(sequence) - len(own) + 1)
        attended = torch.einsum("hqn,nhd->qhd", torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1), values)
        rows |= dict(zip(own, attended, strict=True))
    return torch.stack([rows[token] for token in range(packing.num_tokens)])


@pytest.mark.parametrize("max_scores", [0, 10**9], ids=["fused kernel", "written out"])
@settings(max_examples=50)
@given(packing=packings(), heads=head_shapes, seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 20.0]))
@example(packing=Packing([5, 3, 3, 3], [-1, 0, 0, 0]), heads=(4, 2, 6), seed=0, scale=1.0)
@example(packing=Packing([3, 5, 3], [1, -1, 1]), heads=(4, 2, 6), seed=0, scale=1.0)
@example(packing=Packing([1], [-1]), heads=(1, 1, 4), seed=0, scale=1.0)
@example(
    packing=Packing([6, 16, 4, 21, 21, 1, 38, 24, 9], [6, 4, -1, 5, -1, -1, -1, 6, 6]), heads=(4, 2, 6), seed=362880, scale=20.0
)
def test_outputs_and_gradients_are_those_of_every_sequence_on_its_own(
    max_scores: int, packing: Packing, heads: tuple[int, int, int], seed: int, scale: float
) -> None:
    ours = [tensor.requires_grad_() for tensor in random_heads(packing, heads, seed, scale)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded, "MAX_SCORES", max_scores)
        patch.setattr(padded, "has_batched_products", lambda: True)
        patch.setattr(attention, "is_there", lambda *_: False)
        found = PackedAttention(packing.segments)(0, *ours)
    expected = naive_attention(packing, *theirs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-5)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed + 1))
    found.backward(direction)
    expected.backward(direction.double())
    for mine, right in zip(ours, theirs, strict=True):
        # Of sums that cancel, what is off goes by the largest of them: float32 written out is off by 5e-6 of it.
        largest = float(right.grad.abs().max())
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-3, atol=max(2e-4, 3e-5 * largest))


@given(packings())
def test_positions_count_from_the_beginning_of_the_sequence(packing: Packing) -> None:
    expected = np.zeros(packing.num_tokens, dtype=np.int64)
    for segment in range(len(packing.lengths)):
        sequence = packing.whole(segment)
        for token in packing.own(segment):
            expected[token] = sequence.index(token)
    np.testing.assert_array_equal(packing.segments.positions(), expected)
    np.testing.assert_array_equal(PackedAttention(packing.segments).positions_T.numpy(), expected)


@settings(max_examples=20)
@given(packings(), st.integers(0, 2**31))
def test_bfloat16_is_as_close_as_its_eight_bits_allow(packing: Packing, seed: int) -> None:
    q, k, v = (tensor.bfloat16() for tensor in random_heads(packing, (4, 2, 8), seed, 1.0))
    found = PackedAttention(packing.segments)(0, q, k, v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), naive_attention(packing, q, k, v), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layer", [0, 1, 5])
def test_one_packing_serves_every_layer(layer: int) -> None:
    packing = Packing([7, 2, 9], [-1, 0, 0])
    q, k, v = random_heads(packing, (4, 2, 6), layer, 1.0)
    torch.testing.assert_close(
        PackedAttention(packing.segments)(layer, q, k, v).double(), naive_attention(packing, q, k, v), rtol=1e-4, atol=2e-5
    )


def test_independent_sequences_have_no_parents() -> None:
    segments = Segments.independent([3, 1, 4])
    assert segments.offsets.tolist() == [0, 3, 4, 8]
    assert segments.parents.tolist() == [NO_PARENT] * 3
    assert segments.positions().tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
