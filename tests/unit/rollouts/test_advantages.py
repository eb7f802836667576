from __future__ import annotations

import itertools
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.config.sections.rollouts import AdvantageEstimator
from redline.rollouts.advantages import group_advantages

rewards_lists = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


every_estimator = st.sampled_from(get_args(AdvantageEstimator))
group_estimators = st.sampled_from(["group", "group_centred", "leave_one_out", "batch_baseline"])


def advantages(rewards: list[float], failed: list[bool] | None = None, estimator: str = "group") -> np.ndarray:
    mask = np.array(failed if failed is not None else [False] * len(rewards), dtype=bool)
    return group_advantages(np.array(rewards, dtype=np.float32), mask, estimator)


@given(right=st.integers(1, 32), wrong=st.integers(1, 32))
def test_right_and_wrong_answers_get_their_closed_form(right: int, wrong: int) -> None:
    """With share p right, mean p and deviation sqrt(p(1-p)): right gets sqrt((1-p)/p), wrong gets -sqrt(p/(1-p))."""
    found = advantages([1.0] * right + [0.0] * wrong)
    np.testing.assert_allclose(found[:right], math.sqrt(wrong / right), rtol=1e-5)
    np.testing.assert_allclose(found[right:], -math.sqrt(right / wrong), rtol=1e-5)


@given(right=st.integers(1, 32), wrong=st.integers(1, 32))
def test_centred_they_get_the_distance_to_the_share_of_right_answers(right: int, wrong: int) -> None:
    found = advantages([1.0] * right + [0.0] * wrong, estimator="group_centred")
    np.testing.assert_allclose(found[:right], wrong / (right + wrong), rtol=1e-6)
    np.testing.assert_allclose(found[right:], -right / (right + wrong), rtol=1e-6)


@given(rewards_lists)
def test_left_one_out_an_attempt_is_compared_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(advantages(rewards, estimator="leave_one_out"), expected, rtol=1e-5, atol=1e-4)


def test_left_one_out_the_mean_advantage_of_a_policy_is_its_gradient_without_bias() -> None:
    """E[A_1 f(a_1)] = E[r f] - E[r] E[f], exactly, over all outcomes of three attempts with two actions."""
    chance, reward, f = {0: 0.3, 1: 0.7}, {0: 0.0, 1: 2.0}, {0: 5.0, 1: -1.0}
    found = 0.0
    for actions in itertools.product((0, 1), repeat=3):
        probability = math.prod(chance[a] for a in actions)
        found += probability * f[actions[0]] * float(advantages([reward[a] for a in actions], estimator="leave_one_out")[0])
    means = [sum(chance[a] * g(a) for a in (0, 1)) for g in (lambda a: reward[a] * f[a], reward.get, f.get)]
    assert found == pytest.approx(means[0] - means[1] * means[2])


@given(rewards_lists)
def test_what_the_trainer_completes_starts_from_the_reward_or_from_its_distance_to_the_mean(rewards: list[float]) -> None:
    for estimator in ("batch", "gae"):
        np.testing.assert_array_equal(advantages(rewards, estimator=estimator), np.array(rewards, dtype=np.float32))
    np.testing.assert_array_equal(
        advantages(rewards, estimator="batch_baseline"), advantages(rewards, estimator="group_centred")
    )


@given(rewards_lists)
def test_normalized_advantages_have_mean_zero_and_deviation_one_or_less(rewards: list[float]) -> None:
    found = advantages(rewards).astype(np.float64)
    deviation = math.sqrt(sum((r - math.fsum(rewards) / len(rewards)) ** 2 for r in rewards) / len(rewards))
    assert abs(found.sum()) < 1e-4
    assert math.sqrt((found**2).mean()) == pytest.approx(deviation / (deviation + 1e-6), abs=1e-4)


@given(rewards_lists, st.permutations(range(16)))
def test_the_order_of_the_attempts_does_not_matter(rewards: list[float], order: list[int]) -> None:
    order = [i for i in order if i < len(rewards)]
    np.testing.assert_allclose(advantages([rewards[i] for i in order]), advantages(rewards)[order], atol=1e-4)


@given(rewards_lists, st.lists(st.sampled_from([0.0, 1.0, math.nan, -1e30]), max_size=4), every_estimator)
def test_failed_attempts_get_zero_and_change_nothing_for_the_others(
    rewards: list[float], failures: list[float], estimator: str
) -> None:
    found = advantages(rewards + failures, [False] * len(rewards) + [True] * len(failures), estimator)
    np.testing.assert_array_equal(found[: len(rewards)], advantages(rewards, estimator=estimator))
    assert np.all(found[len(rewards) :] == 0)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 16), group_estimators)
def test_equal_rewards_give_exactly_zero(reward: float, size: int, estimator: str) -> None:
    assert np.all(advantages([reward] * size, estimator=estimator) == 0)


@given(every_estimator)
def test_an_empty_group_has_no_advantages(estimator: str) -> None:
    assert len(advantages([], estimator=estimator)) == 0


def test_a_group_with_one_valid_attempt_gives_exactly_zero() -> None:
    assert np.all(advantages([1.0, 0.0, 0.0], [False, True, True]) == 0)


def test_a_group_where_every_attempt_failed_gives_exactly_zero() -> None:
    assert np.all(advantages([1.0, 0.0], [True, True]) == 0)


def test_advantages_are_float32_and_one_per_attempt() -> None:
    found = advantages([1.0, 0.0, 0.5])
    assert (found.dtype, found.shape) == (np.float32, (3,))


def test_the_rewards_are_left_as_they_were() -> None:
    rewards = np.array([1.0, 0.0], dtype=np.float32)
    group_advantages(rewards, np.array([False, False]), "group")
    assert rewards.tolist() == [1.0, 0.0]
