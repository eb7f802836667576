from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.rollouts.advantages import group_advantages

rewards_lists = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def advantages(rewards: list[float], failed: list[bool] | None = None, normalize: bool = True) -> np.ndarray:
    mask = np.array(failed if failed is not None else [False] * len(rewards))
    return group_advantages(np.array(rewards, dtype=np.float32), mask, normalize)


@given(right=st.integers(1, 32), wrong=st.integers(1, 32))
def test_right_and_wrong_answers_get_their_closed_form(right: int, wrong: int) -> None:
    """With share p right, mean p and deviation sqrt(p(1-p)): right gets sqrt((1-p)/p), wrong gets -sqrt(p/(1-p))."""
    found = advantages([1.0] * right + [0.0] * wrong)
    np.testing.assert_allclose(found[:right], math.sqrt(wrong / right), rtol=1e-5)
    np.testing.assert_allclose(found[right:], -math.sqrt(right / wrong), rtol=1e-5)


@given(right=st.integers(1, 32), wrong=st.integers(1, 32))
def test_without_normalizing_they_get_the_distance_to_the_share_of_right_answers(right: int, wrong: int) -> None:
    found = advantages([1.0] * right + [0.0] * wrong, normalize=False)
    np.testing.assert_allclose(found[:right], wrong / (right + wrong), rtol=1e-6)
    np.testing.assert_allclose(found[right:], -right / (right + wrong), rtol=1e-6)


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


@given(rewards_lists, st.lists(st.sampled_from([0.0, 1.0, math.nan, -1e30]), max_size=4), st.booleans())
def test_failed_attempts_get_zero_and_change_nothing_for_the_others(
    rewards: list[float], failures: list[float], normalize: bool
) -> None:
    found = advantages(rewards + failures, [False] * len(rewards) + [True] * len(failures), normalize)
    np.testing.assert_array_equal(found[: len(rewards)], advantages(rewards, normalize=normalize))
    assert np.all(found[len(rewards) :] == 0)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 16), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize: bool) -> None:
    assert np.all(advantages([reward] * size, normalize=normalize) == 0)


def test_a_group_with_one_valid_attempt_gives_exactly_zero() -> None:
    assert np.all(advantages([1.0, 0.0, 0.0], [False, True, True]) == 0)


def test_a_group_where_every_attempt_failed_gives_exactly_zero() -> None:
    assert np.all(advantages([1.0, 0.0], [True, True]) == 0)


def test_advantages_are_float32_and_one_per_attempt() -> None:
    found = advantages([1.0, 0.0, 0.5])
    assert (found.dtype, found.shape) == (np.float32, (3,))


def test_the_rewards_are_left_as_they_were() -> None:
    rewards = np.array([1.0, 0.0], dtype=np.float32)
    group_advantages(rewards, np.array([False, False]), normalize=True)
    assert rewards.tolist() == [1.0, 0.0]
