"""Gradients that are summed where they are made, against those of autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.kept_sums import Kept
from torch import nn

from redline.models.layers.gradient_sums import embedding, product_gradient, sum_gradients, sum_of
from redline.trainer.loss import logprobs
from redline.trainer.loss.logprobs import selected_logprobs


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_without_a_sum_a_gradient_is_autograds() -> None:
    weight, left, right = parameter(3, 4), torch.randn(5, 3), torch.randn(5, 4)
    assert sum_of(weight) is None
    assert torch.equal(product_gradient(weight, left, right), left.T @ right)
    parts = torch.randn(6, 4), torch.randn(7, 2)
    found = sum_gradients([parameter(4), parameter(2)], parts)
    assert all(torch.equal(one, part.sum(dim=0)) for one, part in zip(found, parts, strict=True))


def test_products_add_up() -> None:
    weight = parameter(3, 4)
    kept = Kept(weight)
    pairs = [(torch.randn(5, 3), torch.randn(5, 4)) for _ in range(3)]
    assert [product_gradient(weight, left, right) for left, right in pairs] == [None] * 3
    torch.testing.assert_close(kept.total, sum(left.T @ right for left, right in pairs))


@pytest.mark.parametrize(
    "shapes", [[(1, 4)], [(3, 16), (200, 37)], [(528, 130), (1, 1), (1056, 5)]], ids=["one", "two", "three at once"]
)
def test_parts_add_up(shapes: list[tuple[int, int]], interpreter: None) -> None:
    pytest.importorskip("triton")
    weights = [parameter(size) for _, size in shapes]
    kept = [Kept(weight) for weight in weights]
    steps = [[torch.randn(*shape) for shape in shapes] for _ in range(3)]
    for parts in steps:
        assert sum_gradients(weights, parts) == [None] * len(shapes)
    for own, *parts in zip(kept, *steps, strict=True):
        expected = sum(part.double().sum(dim=0) for part in parts).float()
        torch.testing.assert_close(own.total, expected, rtol=1e-5, atol=3e-4)  # the interpreter adds one after the other


def test_a_sum_ends_unless_another_has_taken_its_place() -> None:
    weight = parameter(2, 1)
    first, second = Kept(weight), Kept(weight)
    first.end()
    assert product_gradient(weight, torch.ones(3, 2), torch.ones(3, 1)) is None
    assert second.num_gradients == 1
    second.end()
    assert sum_of(weight) is None


def test_an_embeddings_gradient_is_that_of_its_rows() -> None:
    weight, tokens, incoming = parameter(7, 3), torch.tensor([1, 4, 1, 1, 6]), torch.randn(5, 3)
    F.embedding(tokens, weight).backward(incoming)
    expected, weight.grad = weight.grad, None
    kept = Kept(weight)
    for _ in range(2):
        found = embedding(tokens, weight)
        assert torch.equal(found, weight[tokens])
        found.backward(incoming)
    assert weight.grad is None
    torch.testing.assert_close(kept.total, 2 * expected)


@pytest.mark.parametrize("chunk_bytes", [2**30, 4 * 11 * 3])
def test_the_heads_gradient_is_the_same_in_any_chunks(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", chunk_bytes)
    weight, targets = parameter(11, 4), torch.randint(0, 11, (9,))
    results = []
    for keeps in (False, True):
        hidden = torch.linspace(-1, 1, 36).view(9, 4).requires_grad_()
        kept = Kept(weight) if keeps else None
        found, entropies = selected_logprobs(hidden, weight, targets, 0.7)
        (found * torch.arange(9) + entropies).sum().backward()
        results.append((kept.total if kept else weight.grad, hidden.grad))
        weight.grad = None if kept else weight.grad
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
