from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.trainer.losses import grpo_loss, sequence_mean_weights

LOW, HIGH = 0.2, 0.3


def closed_form(
    logprobs: np.ndarray, old: np.ndarray, advantages: np.ndarray, weights: np.ndarray, low: float, high: float
) -> float:
    """The objective as the paper writes it, case by case, in float64: no minimum, no clamp."""
    total = 0.0
    for logprob, old_logprob, advantage, weight in zip(logprobs, old, advantages, weights, strict=True):
        ratio = math.exp(float(logprob) - float(old_logprob))
        if advantage > 0 and ratio > 1 + high:
            ratio = 1 + high
        if advantage < 0 and ratio < 1 - low:
            ratio = 1 - low
        total -= float(weight) * ratio * float(advantage)
    return total


@st.composite
def tokens(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    count = draw(st.integers(1, 12))
    numbers = {"min_size": count, "max_size": count}
    old = draw(st.lists(st.floats(-8, -0.01), **numbers))
    change = draw(st.lists(st.floats(-1.5, 1.5), **numbers))
    advantages = draw(st.lists(st.floats(-3, 3), **numbers))
    weights = draw(st.lists(st.floats(0.001, 1), **numbers))
    arrays = (np.array(old) + np.array(change), old, advantages, weights)
    return tuple(np.array(array, dtype=np.float32) for array in arrays)


@given(tokens())
def test_the_loss_is_its_closed_form(tokens: tuple[np.ndarray, ...]) -> None:
    found = grpo_loss(*map(torch.from_numpy, tokens), LOW, HIGH)
    assert float(found.loss) == pytest.approx(closed_form(*tokens, LOW, HIGH), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(found.ratio_M, np.exp(tokens[0].astype(np.float64) - tokens[1]), rtol=1e-5)


@given(tokens())
def test_the_gradient_is_the_finite_difference_of_the_closed_form(tokens: tuple[np.ndarray, ...]) -> None:
    logprobs, old, advantages, weights = tokens
    ratios = np.exp(logprobs.astype(np.float64) - old)
    at_a_corner = (np.abs(ratios - (1 - LOW)) < 1e-3) | (np.abs(ratios - (1 + HIGH)) < 1e-3)
    variable = torch.from_numpy(logprobs).requires_grad_()
    grpo_loss(variable, *map(torch.from_numpy, (old, advantages, weights)), LOW, HIGH).loss.backward()
    for index in np.flatnonzero(~at_a_corner):
        values = []
        for step in (-1e-5, 1e-5):
            moved = logprobs.astype(np.float64)
            moved[index] += step
            values.append(closed_form(moved, old, advantages, weights, LOW, HIGH))
        assert float(variable.grad[index]) == pytest.approx((values[1] - values[0]) / 2e-5, rel=1e-3, abs=1e-4)


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
    found = grpo_loss(logprob, old, torch.tensor([advantage]), torch.ones(1), LOW, HIGH)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(expected_loss, abs=1e-5)
    assert float(logprob.grad) == pytest.approx(expected_gradient, abs=1e-5)
    assert found.clipped_M.tolist() == [clipped]
    assert not found.ratio_M.requires_grad


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 8))
def test_every_attempt_weighs_the_same_whatever_its_length(lengths: list[int], left_out: int) -> None:
    """Attempts that were left out of the batch count in the mean all the same."""
    sampled = len(lengths) + left_out
    weights = sequence_mean_weights(torch.tensor(lengths), sampled)
    np.testing.assert_allclose(weights, [1 / (sampled * length) for length in lengths], rtol=1e-6)
    assert float((weights * torch.tensor(lengths)).sum()) == pytest.approx(len(lengths) / sampled)


def test_on_policy_the_loss_is_minus_the_mean_advantage() -> None:
    """r = 1 everywhere, so that L = -mean(A) over attempts, of whatever length."""
    lengths, advantages = torch.tensor([3, 1, 6]), torch.tensor([1.0, -0.5, 0.25])
    per_token = torch.repeat_interleave(torch.arange(3), lengths)
    logprobs = -torch.rand(10)
    found = grpo_loss(logprobs, logprobs, advantages[per_token], sequence_mean_weights(lengths, 3)[per_token], LOW, HIGH)
    assert float(found.loss) == pytest.approx(-0.25)
