"""Attention over packed segments in C, beside float64 on every sequence on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from redline.kernels.cpu import attention
from redline.kernels.cpu.attention import Families
from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention.limits import Limits
from redline.models.attention.packed import PackedAttention

if not attention.is_there(torch.float32, 64):
    pytest.skip("no compiler here serves", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("threads")

HEADS = [(6, 2, 64), (3, 3, 48), (5, 1, 80)]
LAYOUTS = {
    "one token": ([1], [-1]),
    "one": ([49], [-1]),
    "a block and its neighbours": ([47, 48, 49, 96, 97, 144], [-1] * 6),
    "long": ([300, 131], [-1, -1]),
    "prompts": ([5, 3, 60, 3, 64, 1, 17, 101], [-1, 0, 0, 0, -1, 4, 4, 4]),
    "children before their parent": ([30, 100, 7, 250, 17, 0, 90], [1, -1, 1, -1, 3, 3, 1]),
    "an empty parent": ([0, 20, 33], [-1, 0, 0]),
}
OFF = {torch.float32: 3e-6, torch.bfloat16: 2**-7}
"""Of the largest number: rounded to bfloat16 once, where it is written; the backward pass reads rounded outputs."""


def segments_of(name: str) -> Segments:
    lengths, parents = LAYOUTS[name]
    return Segments(np.cumsum([0, *lengths], dtype=np.int64), np.array(parents, dtype=np.int64))


def drawn(segments: Segments, heads: tuple[int, int, int], dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Queries, keys, values, and what flows back."""
    generator = torch.Generator().manual_seed(0)
    H, K, D = heads
    q, k, v, grad = (torch.randn(int(segments.offsets[-1]), count, D, generator=generator) for count in (H, K, K, H))
    return tuple(each.to(dtype) for each in (scale * q, k, v, grad))


def on_its_own(segments: Segments, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64, each segment with what is before it."""
    group, rows = q.shape[1] // k.shape[1], []
    for start, length, parent in zip(segments.offsets, segments.lengths, segments.parents, strict=False):
        before = [] if parent == NO_PARENT else range(segments.offsets[parent], segments.offsets[parent + 1])
        sequence, own = [*before, *range(start, start + length)], slice(start, start + length)
        keys, values = (each[sequence].repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[own], keys) / math.sqrt(q.shape[2])
        later = torch.ones(length, len(sequence), dtype=torch.bool).triu(len(sequence) - length + 1)
        rows.append(torch.einsum("hqn,nhd->qhd", torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1), values))
    return torch.cat(rows)


def all_of(attend: object, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """What comes out, and what comes back."""
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    out = attend(*leaves)  # type: ignore[operator]
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("parts", ["a task for all heads of a key", "a task for each head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_are_those_of_every_sequence_on_its_own(
    layout: str, heads: tuple[int, int, int], dtype: torch.dtype, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ENOUGH", 0 if parts == "a task for all heads of a key" else 10**6)
    segments = segments_of(layout)
    given = drawn(segments, heads, dtype)
    found = all_of(Families(segments).attend, *given)
    expected = all_of(lambda *leaves: on_its_own(segments, *leaves), *(each.double() for each in given))
    for ours, right in zip(found, expected, strict=True):
        assert ours.dtype is dtype
        assert float((ours.double() - right).abs().max()) < OFF[dtype] * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_scores_are_no_trouble(scale: float) -> None:
    segments = segments_of("prompts")
    given = drawn(segments, (8, 2, 128), torch.float32, scale)
    found = all_of(Families(segments).attend, *given)
    expected = all_of(lambda *leaves: on_its_own(segments, *leaves), *(each.double() for each in given))
    for ours, right in zip(found, expected, strict=True):  # scores of some thousands are off by some thousandths
        assert float((ours.double() - right).abs().max()) < 1e-5 * scale * max(1.0, float(right.abs().max()))


def test_without_gradients_the_outputs_have_the_same_bits() -> None:
    segments = segments_of("prompts")
    q, k, v, grad = drawn(segments, (6, 2, 64), torch.float32)
    with torch.no_grad():
        out = Families(segments).attend(q, k, v)
    assert torch.equal(out, all_of(Families(segments).attend, q, k, v, grad)[0])


@pytest.mark.parametrize("enough", [0, 10**6])
def test_bits_do_not_go_by_threads_nor_company(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ENOUGH", enough)
    segments = segments_of("prompts")
    given = drawn(segments, (6, 2, 64), torch.float32)
    found = all_of(Families(segments).attend, *given)
    torch.set_num_threads(1)
    first = int(segments.offsets[4])  # the first family
    alone = Segments(segments.offsets[:5], segments.parents[:4])
    for whole, part in zip(found, all_of(Families(alone).attend, *(each[:first] for each in given)), strict=True):
        assert torch.equal(whole[:first], part)


def test_what_is_no_number_stays_in_its_family() -> None:
    segments = segments_of("prompts")
    given = drawn(segments, (6, 2, 64), torch.float32)
    clean = all_of(Families(segments).attend, *given)
    first = int(segments.offsets[4])
    for which in range(4):
        spoilt = [each.clone() for each in given]
        spoilt[which][3] = math.nan
        found = all_of(Families(segments).attend, *spoilt)
        assert any(bool(each[:first].isnan().any()) for each in found)
        assert all(torch.equal(ours[first:], right[first:]) for ours, right in zip(found, clean, strict=True))


def test_a_window_that_hides_nothing_is_none_and_others_are_torchs() -> None:
    segments = segments_of("prompts")
    q, k, v, _ = drawn(segments, (6, 2, 64), torch.float32)
    attend = PackedAttention(segments)
    whole = attend(0, q, k, v)
    assert attend._padded is None
    assert torch.equal(attend(0, q, k, v, Limits(window=65 + 100)), whole)
    assert attend._padded is None
    assert not torch.allclose(attend(0, q, k, v, Limits(window=64)), whole)
    torch.testing.assert_close(attend(0, q, k, v, Limits(softcap=1e6)), whole)
    assert attend._padded is not None


def test_values_of_another_type_are_torchs() -> None:
    segments = segments_of("one")
    q, k, v, _ = drawn(segments, (1, 1, 16), torch.float32)
    assert Families(segments).serves(q, k, v)
    assert not Families(segments).serves(q, k, v.bfloat16())
    assert not Families(segments).serves(q.double(), k.double(), v.double())
    assert not Families(segments).serves(q[..., :8], k[..., :8], v[..., :8])


def test_large_scores_and_rounded_outputs_leave_the_gradients_exact() -> None:
    """Scores of 10,000, of which the last bit is a thousandth; and outputs in bfloat16, of which the gradients are not made."""
    segments = segments_of("prompts")
    for dtype, scale in ((torch.float32, 3000.0), (torch.bfloat16, 30.0)):
        given = drawn(segments, (6, 2, 64), dtype, scale)
        found = all_of(Families(segments).attend, *given)[1]
        expected = all_of(lambda *leaves: on_its_own(segments, *leaves), *(each.double() for each in given))[1]
        assert float((found.double() - expected).abs().max()) < 2**-8 * max(0.1, float(expected.abs().max()))


def test_it_computes_on_the_cpu_whatever_the_default_device_is() -> None:
    segments = segments_of("prompts")
    given = drawn(segments, (6, 2, 64), torch.float32)
    expected = all_of(Families(segments).attend, *given)
    with torch.device("meta"):
        found = all_of(Families(segments).attend, *given)
    assert all(torch.equal(ours, right) for ours, right in zip(found, expected, strict=True))


def test_there_are_no_second_derivatives() -> None:
    segments = segments_of("one")
    q, k, v, grad = drawn(segments, (1, 1, 16), torch.float32)
    out = Families(segments).attend(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="leave out create_graph"):
        torch.autograd.grad(out, q, grad, create_graph=True)
