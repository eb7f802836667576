"""Each loss against its paper's equation in plain Python, case by case and sequence by sequence, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redline.trainer.loss.policy import (
    PolicyLoss,
    aggregation_weights,
    cispo_loss,
    clipped_loss,
    gspo_loss,
    reinforce_loss,
    sequence_means,
    sequence_sums,
)

LOW, HIGH = 0.2, 0.3


@dataclass
class Tokens:
    """Random tokens of a few sequences, float64 unless it says otherwise."""

    logprobs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    """The same for all tokens of a sequence."""
    weights: np.ndarray
    """The same for all tokens of a sequence."""
    sequence: np.ndarray
    """int64."""

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        numbers = [torch.tensor(a, dtype=dtype) for a in (self.logprobs, self.old, self.advantages, self.weights)]
        return [*numbers, torch.tensor(self.sequence)]

    def of(self, sequences: list[int]) -> Tokens:
        """A micro-batch: these sequences, numbered from 0."""
        picked = [np.flatnonzero(self.sequence == s) for s in sequences]
        index = np.concatenate(picked)
        numbers = np.concatenate([np.full(len(tokens), number) for number, tokens in enumerate(picked)])
        return Tokens(self.logprobs[index], self.old[index], self.advantages[index], self.weights[index], numbers)


def random_tokens(seed: int, num_sequences: int = 5, spread: float = 0.5) -> Tokens:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 9, num_sequences)
    sequence = np.repeat(np.arange(num_sequences), lengths)
    old = -generator.exponential(2.0, len(sequence))
    logprobs = old + spread * generator.standard_normal(len(sequence))
    advantages = generator.normal(size=num_sequences)[sequence]
    return Tokens(logprobs, old, advantages, generator.uniform(0.01, 1, num_sequences)[sequence], sequence)


# ── the equations ──────────────────────────────────────────────────────────────────────────────────────────────────────


def bounded(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """min(rA, clip(r) A), and max(·, cA) where A < 0, written as the cases they are."""
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage
    if advantage < 0 and dual is not None and ratio > dual:
        return dual * advantage
    return ratio * advantage


def clipped_by_hand(tokens: Tokens, low: float = LOW, high: float = HIGH, dual: float | None = None) -> float:
    total = 0.0
    for logprob, old, advantage, weight in zip(tokens.logprobs, tokens.old, tokens.advantages, tokens.weights, strict=True):
        total -= weight * bounded(math.exp(logprob - old), advantage, low, high, dual)
    return total


def gspo_by_hand(tokens: Tokens) -> float:
    total = 0.0
    for s in np.unique(tokens.sequence):
        mine = tokens.sequence == s
        ratio = math.prod(np.exp(tokens.logprobs[mine] - tokens.old[mine])) ** (1 / mine.sum())
        total -= tokens.weights[mine].sum() * bounded(ratio, tokens.advantages[mine][0], LOW, HIGH, None)
    return total


def cispo_by_hand(tokens: Tokens, held: Tokens) -> float:
    """The importance weights are those of `held`, through which no gradient goes."""
    total = 0.0
    for i in range(len(tokens.logprobs)):
        weight = min(max(math.exp(held.logprobs[i] - held.old[i]), 1 - LOW), 1 + HIGH)
        total -= tokens.weights[i] * weight * tokens.advantages[i] * tokens.logprobs[i]
    return total


def reinforce_by_hand(tokens: Tokens) -> float:
    return -sum(w * a * p for w, a, p in zip(tokens.weights, tokens.advantages, tokens.logprobs, strict=True))


LOSSES: dict[str, tuple[Callable[..., PolicyLoss], Callable[[Tokens, Tokens], float]]] = {
    "clip": (lambda p, o, a, w, s: clipped_loss(p, o, a, w, LOW, HIGH), lambda t, held: clipped_by_hand(t)),
    "dual clip": (lambda p, o, a, w, s: clipped_loss(p, o, a, w, LOW, HIGH, 1.5), lambda t, held: clipped_by_hand(t, dual=1.5)),
    "gspo": (lambda p, o, a, w, s: gspo_loss(p, o, a, w, s, LOW, HIGH), lambda t, held: gspo_by_hand(t)),
    "cispo": (lambda p, o, a, w, s: cispo_loss(p, o, a, w, LOW, HIGH), cispo_by_hand),
    "reinforce": (lambda p, o, a, w, s: reinforce_loss(p, o, a, w), lambda t, held: reinforce_by_hand(t)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_that_of_the_paper(name: str, seed: int) -> None:
    loss, by_hand = LOSSES[name]
    tokens = random_tokens(seed)
    found = loss(*tokens.tensors())
    assert float(found.loss) == pytest.approx(by_hand(tokens, tokens), rel=1e-10)
    assert not found.ratio_M.requires_grad


@every_loss
@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_is_the_finite_difference_of_the_papers_equation(name: str, seed: int) -> None:
    loss, by_hand = LOSSES[name]
    tokens = random_tokens(seed)
    variable, *others = tokens.tensors()
    variable.requires_grad_()
    loss(variable, *others).loss.backward()
    for index in range(len(tokens.logprobs)):
        values = []
        for step in (-1e-6, 1e-6):
            moved = tokens.logprobs.copy()
            moved[index] += step
            values.append(by_hand(Tokens(moved, tokens.old, tokens.advantages, tokens.weights, tokens.sequence), tokens))
        assert float(variable.grad[index]) == pytest.approx((values[1] - values[0]) / 2e-6, rel=1e-4, abs=1e-6), index


@pytest.mark.parametrize("name", ["clip", "dual clip", "reinforce"])
def test_torch_finds_the_gradient_of_a_loss_without_held_weights_right(name: str) -> None:
    """gspo and cispo stop gradients on purpose, which gradcheck would call an error."""
    loss, _ = LOSSES[name]
    variable, *others = random_tokens(11).tensors()
    assert torch.autograd.gradcheck(lambda p: loss(p, *others).loss, variable.requires_grad_())


@every_loss
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[3, 0], [4, 2, 1]]])
def test_micro_batches_add_up_to_the_batch_in_any_split(name: str, split: list[list[int]]) -> None:
    loss, _ = LOSSES[name]
    tokens = random_tokens(3)
    whole = loss(*tokens.tensors()).loss
    parts = sum(loss(*tokens.of(sequences).tensors()).loss for sequences in split)
    assert float(parts) == pytest.approx(float(whole), rel=1e-12)


@every_loss
def test_no_tokens_are_no_loss(name: str) -> None:
    loss, _ = LOSSES[name]
    empty = np.zeros(0)
    found = loss(*Tokens(empty, empty, empty, empty, np.zeros(0, dtype=np.int64)).tensors())
    assert float(found.loss) == 0
    assert len(found.ratio_M) == len(found.clipped_M) == 0


@every_loss
def test_without_advantage_there_is_neither_loss_nor_gradient(name: str) -> None:
    loss, _ = LOSSES[name]
    variable, old, _, weights, sequence = random_tokens(4).tensors()
    variable.requires_grad_()
    found = loss(variable, old, torch.zeros_like(old), weights, sequence)
    found.loss.backward()
    assert found.loss.item() == 0
    assert not variable.grad.any()


@every_loss
def test_on_policy_every_loss_has_the_plain_policy_gradient(name: str) -> None:
    """r = 1, and the gradient of log π is -w A. So far all of them agree."""
    loss, _ = LOSSES[name]
    _, old, advantages, weights, sequence = random_tokens(5).tensors()
    variable = old.clone().requires_grad_()
    found = loss(variable, old, advantages, weights, sequence)
    found.loss.backward()
    torch.testing.assert_close(variable.grad, -weights * advantages)
    assert not found.clipped_M.any()
    assert torch.equal(found.ratio_M, torch.ones_like(old))


@every_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("change", [-1000.0, -100.0, 100.0, 1000.0])
def test_an_extreme_ratio_gives_finite_numbers(name: str, advantage: float, change: float) -> None:
    loss, _ = LOSSES[name]
    old = torch.tensor([-1001.0, -2.0])
    variable = (old + torch.tensor([change, 0.0])).requires_grad_()
    found = loss(variable, old, torch.full((2,), advantage), torch.ones(2), torch.tensor([0, 1]))
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert torch.isfinite(variable.grad).all()
    assert torch.isfinite(found.ratio_M).all()


@pytest.mark.parametrize("name", ["clip", "dual clip", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_has_become_impossible_is_clipped_and_spoils_no_other(name: str, advantage: float) -> None:
    loss, _ = LOSSES[name]
    variable = torch.tensor([-math.inf, -2.0]).requires_grad_()
    old = torch.tensor([-1.0, -2.0])
    found = loss(variable, old, torch.full((2,), advantage), torch.ones(2), torch.tensor([0, 1]))
    found.loss.backward()
    if name == "gspo":
        assert not torch.isfinite(found.loss), "-inf - -inf is no number, and the trainer's guard must see it"
    else:
        assert variable.grad.tolist() == [0.0, -advantage]
        assert found.clipped_M.tolist() == [True, False]


@every_loss
def test_a_number_that_is_none_stays_one_for_the_trainer_to_see(name: str) -> None:
    loss, _ = LOSSES[name]
    tokens = random_tokens(6)
    tokens.logprobs[2] = math.nan
    assert torch.isnan(loss(*tokens.tensors()).loss)


# ── the clipped surrogate ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient", "clipped"),
    [
        # Inside the clip range: the plain policy gradient, -A·r.
        (1.0, 2.0, -2.0, -2.0, False),
        (1.0, -2.0, 2.0, 2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (0.9, -2.0, 1.8, 1.8, False),
        # A good token that became likely enough, a bad one that became unlikely enough: no more of it.
        (1.5, 2.0, -2.6, 0.0, True),
        (0.5, -2.0, 1.6, 0.0, True),
        # A good token that became unlikely, a bad one that became likely: the full gradient takes it back.
        (0.5, 2.0, -1.0, -1.0, False),
        (1.5, -2.0, 3.0, 3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipping_stops_only_what_goes_too_far_the_right_way(
    ratio: float, advantage: float, expected_loss: float, expected_gradient: float, clipped: bool
) -> None:
    old = torch.tensor([-2.0])
    logprob = (old + math.log(ratio)).requires_grad_()
    found = clipped_loss(logprob, old, torch.tensor([advantage]), torch.ones(1), LOW, HIGH)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected_loss, abs=1e-5)
    assert float(logprob.grad) == pytest.approx(expected_gradient, abs=1e-5)
    assert found.clipped_M.tolist() == [clipped]


@pytest.mark.parametrize(("advantage", "gradient", "clipped"), [(-2.0, 0.0, True), (2.0, 0.0, True)])
def test_the_dual_clip_stops_a_bad_token_that_became_far_likelier(advantage: float, gradient: float, clipped: bool) -> None:
    old = torch.tensor([-5.0])
    logprob = (old + math.log(4.0)).requires_grad_()
    found = clipped_loss(logprob, old, torch.tensor([advantage]), torch.ones(1), LOW, HIGH, dual_clip=3.0)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(6.0 if advantage < 0 else -2.6, abs=1e-5)
    assert float(logprob.grad) == gradient
    assert found.clipped_M.tolist() == [clipped]


# ── gspo and cispo ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gspo_gives_all_tokens_of_a_sequence_the_geometric_mean_of_their_ratios() -> None:
    tokens = random_tokens(7)
    found = gspo_loss(*tokens.tensors(), LOW, HIGH)
    for s in range(5):
        mine = tokens.sequence == s
        expected = math.exp((tokens.logprobs - tokens.old)[mine].mean())
        np.testing.assert_allclose(found.ratio_M[torch.tensor(mine)], expected)


def test_gspo_clips_a_sequence_as_a_whole() -> None:
    old = torch.full((4,), -2.0)
    variable = (old + torch.tensor([1.0, 0.0, 0.0, 0.1])).requires_grad_()
    found = gspo_loss(variable, old, torch.ones(4), torch.ones(4), torch.tensor([0, 0, 1, 1]), LOW, HIGH)
    found.loss.backward()
    assert found.clipped_M.tolist() == [True, True, False, False]
    assert (variable.grad != 0).tolist() == [False, False, True, True]


def test_gspo_with_an_advantage_for_each_token_gives_each_its_own_credit() -> None:
    """GSPO-token: the gradient of token t is -w_t A_t s."""
    old = torch.full((3,), -2.0, dtype=torch.float64)
    change, advantages = torch.tensor([0.1, -0.05, 0.05]).double(), torch.tensor([1.0, -2.0, 0.5]).double()
    variable = (old + change).requires_grad_()
    weights = torch.full_like(old, 0.25)
    gspo_loss(variable, old, advantages, weights, torch.zeros(3, dtype=torch.int64), LOW, HIGH).loss.backward()
    torch.testing.assert_close(variable.grad, -0.25 * advantages * torch.exp(change.mean()))


def test_cispo_keeps_the_gradient_of_every_token_and_bounds_its_weight() -> None:
    old = torch.full((3,), -3.0)
    variable = (old + torch.log(torch.tensor([0.5, 1.0, 2.0]))).requires_grad_()
    found = cispo_loss(variable, old, torch.ones(3), torch.ones(3), LOW, HIGH)
    found.loss.backward()
    torch.testing.assert_close(variable.grad, -torch.tensor([0.8, 1.0, 1.3]))
    assert found.clipped_M.tolist() == [True, False, True]


def test_cispo_with_a_lower_clip_of_one_has_no_lower_bound() -> None:
    old = torch.full((1,), -3.0)
    variable = (old + math.log(0.01)).requires_grad_()
    cispo_loss(variable, old, torch.ones(1), torch.ones(1), 1.0, 4.0).loss.backward()
    assert float(variable.grad) == pytest.approx(-0.01, rel=1e-4)


# ── means ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(lengths_lists, st.integers(0, 8), st.integers(0, 100))
def test_the_weights_are_those_of_the_mean(lengths: list[int], left_out: int, tokens_left_out: int) -> None:
    """Attempts that were left out of the batch count in the mean all the same."""
    sampled, tokens = len(lengths) + left_out, sum(lengths) + tokens_left_out
    expected = {
        "sequence_mean": [1 / (sampled * length) for length in lengths],
        "token_mean": [1 / tokens] * len(lengths),
        "constant": [1 / (sampled * 64)] * len(lengths),
    }
    for aggregation, weights in expected.items():
        found = aggregation_weights(torch.tensor(lengths), aggregation, sampled, tokens, 64)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, weights, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_an_empty_batch_has_no_weights(aggregation: str) -> None:
    assert len(aggregation_weights(torch.zeros(0, dtype=torch.int64), aggregation, 0, 0, 64)) == 0


def test_on_policy_the_loss_is_minus_the_mean_advantage() -> None:
    """r = 1 everywhere, so that L = -mean(A): over attempts of whatever length, or over tokens."""
    lengths, advantages = torch.tensor([3, 1, 6]), torch.tensor([1.0, -0.5, 0.25])
    per_token = torch.repeat_interleave(torch.arange(3), lengths)
    logprobs = -torch.rand(10)
    means = {"sequence_mean": 0.25, "token_mean": 0.4, "constant": 4.0 / (3 * 8)}
    for aggregation, mean in means.items():
        weights = aggregation_weights(lengths, aggregation, 3, 10, 8)
        found = clipped_loss(logprobs, logprobs, advantages[per_token], weights[per_token], LOW, HIGH)
        assert float(found.loss) == pytest.approx(-mean), aggregation


def test_sums_and_means_over_sequences_are_each_tokens_own() -> None:
    sequence, values = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1.0, 3.0, 5.0, 1.0, 2.0, 6.0])
    assert sequence_sums(values, sequence).tolist() == [4, 4, 5, 9, 9, 9]
    assert sequence_means(values, sequence).tolist() == [2, 2, 5, 3, 3, 3]
