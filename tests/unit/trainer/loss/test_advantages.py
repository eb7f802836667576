"""The trainer's advantages against the recursions and means of the papers, written with loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from redline.trainer.loss.advantages import (
    batch_advantages,
    discounted_sums,
    generalized_advantages,
    normalized,
    token_advantages,
    token_rewards,
)

LENGTHS = [1, 7, 2, 1, 16, 33]
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)


def random_values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=len(SEQUENCE))


def by_sequence(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(LENGTHS)[:-1])


def whitened(values: np.ndarray) -> np.ndarray:
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    return (values - mean) / (deviation + 1e-6)


def gae_by_hand(rewards: np.ndarray, values: np.ndarray, gamma: float, lambda_: float) -> np.ndarray:
    """The recursion, from the last token to the first: A_t = δ_t + γλ A_{t+1}."""
    advantages = np.zeros(len(rewards))
    later = next_value = 0.0
    for t in reversed(range(len(rewards))):
        later = rewards[t] + gamma * next_value - values[t] + gamma * lambda_ * later
        advantages[t], next_value = later, values[t]
    return advantages


# ── sums ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.95, 1.0])
def test_discounted_sums_are_the_recursion_within_each_sequence(discount: float) -> None:
    values = random_values(0)
    expected = []
    for part in by_sequence(values):
        later, sums = 0.0, []
        for value in part[::-1]:
            later = value + discount * later
            sums.append(later)
        expected += sums[::-1]
    found = discounted_sums(torch.tensor(values), torch.tensor(SEQUENCE), discount)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_the_values_are_left_as_they_were() -> None:
    values = torch.tensor(random_values(1))
    before = values.clone()
    discounted_sums(values, torch.tensor(SEQUENCE), 0.9)
    assert torch.equal(values, before)


# ── gae ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_recursion_of_the_paper(gamma: float, lambda_: float) -> None:
    rewards, values = random_values(2), random_values(3)
    found = generalized_advantages(torch.tensor(rewards), torch.tensor(values), torch.tensor(SEQUENCE), gamma, lambda_)
    pairs = zip(by_sequence(rewards), by_sequence(values), strict=True)
    expected = np.concatenate([gae_by_hand(r, v, gamma, lambda_) for r, v in pairs])
    np.testing.assert_allclose(found.advantages_M, whitened(expected), rtol=1e-7)
    np.testing.assert_allclose(found.returns_M, expected + values, rtol=1e-7, atol=1e-10)


def test_with_lambda_one_the_returns_are_the_rewards_to_go_whatever_the_critic_says() -> None:
    rewards = random_values(4)
    expected = np.concatenate([np.cumsum(part[::-1])[::-1] for part in by_sequence(rewards)])
    for seed in (5, 6):
        found = generalized_advantages(torch.tensor(rewards), torch.tensor(random_values(seed)), torch.tensor(SEQUENCE), 1, 1)
        np.testing.assert_allclose(found.returns_M, expected, atol=1e-9)


def test_a_critic_that_is_right_leaves_no_advantage() -> None:
    rewards = random_values(7)
    to_go = np.concatenate([np.cumsum(part[::-1])[::-1] for part in by_sequence(rewards)])
    found = generalized_advantages(torch.tensor(rewards), torch.tensor(to_go), torch.tensor(SEQUENCE), 1.0, 0.95)
    np.testing.assert_allclose(found.returns_M, to_go, atol=1e-9)


def test_the_outcome_arrives_at_the_last_token_and_the_penalty_at_each() -> None:
    sequence = torch.tensor([0, 0, 0, 1, 2, 2])
    outcomes, penalties = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert token_rewards(outcomes, sequence).tolist() == [0, 0, 1, -2, 0, 0.5]
    np.testing.assert_allclose(token_rewards(outcomes, sequence, penalties), [-0.1, -0.2, 0.7, -2.4, -0.5, -0.1], atol=1e-6)


# ── over the batch ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_advantages_are_the_outcomes_normalised_over_tokens() -> None:
    outcomes = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.0])
    found = batch_advantages(torch.tensor(outcomes), torch.tensor(SEQUENCE))
    np.testing.assert_allclose(found, whitened(outcomes[SEQUENCE]), rtol=1e-7)


def test_a_kl_in_the_reward_is_subtracted_from_every_token_before_it() -> None:
    """REINFORCE++, eq. 8: A_t = r - β Σ_{u ≥ t} KL_u."""
    outcomes, penalties = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.0]), np.abs(random_values(8))
    raw = []
    for outcome, part in zip(outcomes, by_sequence(penalties), strict=True):
        raw += [outcome - sum(part[t:]) for t in range(len(part))]
    found = batch_advantages(torch.tensor(outcomes), torch.tensor(SEQUENCE), torch.tensor(penalties))
    np.testing.assert_allclose(found, whitened(np.array(raw)), rtol=1e-7)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_equal_advantages_are_exactly_zero(value: float) -> None:
    assert not normalized(torch.full((9,), value)).any()


def test_nearly_equal_advantages_are_not_blown_up() -> None:
    found = normalized(torch.tensor([0.0, 1e-9], dtype=torch.float64))
    assert float(found.abs().max()) < 1e-3


@pytest.mark.parametrize("size", [0, 1])
def test_a_batch_of_at_most_one_token_has_no_advantage(size: int) -> None:
    assert normalized(torch.ones(size)).tolist() == [0.0] * size


# ── all estimators ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("estimator", ["group", "group_centred", "leave_one_out"])
def test_the_advantage_of_a_group_estimator_is_its_attempts_at_every_token(estimator: str) -> None:
    outcomes = torch.tensor([1.0, -1.0, 0.5, 0.25, 0.0, 2.0])
    found = token_advantages(outcomes, torch.tensor(SEQUENCE), estimator)
    assert torch.equal(found.advantages_M, outcomes[torch.tensor(SEQUENCE)])
    assert found.returns_M is None


@pytest.mark.parametrize("estimator", ["group", "group_centred", "leave_one_out", "batch", "batch_baseline", "gae"])
def test_an_empty_batch_has_no_advantages(estimator: str) -> None:
    found = token_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), estimator, values_M=torch.zeros(0))
    assert len(found.advantages_M) == 0


def test_gae_without_values_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="without a critic's values"):
        token_advantages(torch.ones(1), torch.zeros(3, dtype=torch.int64), "gae")


def test_gae_from_outcomes_is_gae_from_their_rewards() -> None:
    outcomes, penalties, values = random_values(9)[:6], random_values(10), random_values(11)
    sequence = torch.tensor(SEQUENCE)
    found = token_advantages(
        torch.tensor(outcomes),
        sequence,
        "gae",
        penalties_M=torch.tensor(penalties),
        values_M=torch.tensor(values),
        gamma=0.99,
        lambda_=0.9,
    )
    rewards = -penalties
    rewards[np.cumsum(LENGTHS) - 1] += outcomes
    pairs = zip(by_sequence(rewards), by_sequence(values), strict=True)
    expected = np.concatenate([gae_by_hand(r, v, 0.99, 0.9) for r, v in pairs])
    np.testing.assert_allclose(found.advantages_M, whitened(expected), rtol=1e-7)
