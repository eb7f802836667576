"""When a learning curve reaches a target, beside closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from redline.lab.cost.curve import FEWEST, Reaching, reaching

STEPS = np.arange(1, 101)


def line(step: np.ndarray) -> np.ndarray:
    return 0.1 + 0.005 * step


def levelling_off(step: np.ndarray) -> np.ndarray:
    return 0.8 - 0.7 * np.exp(-step / 60)


def slow_start(step: np.ndarray) -> np.ndarray:
    return 0.1 + 0.7 / (1 + np.exp(-(step - 50) / 12))


CURVES = [
    (line, 0.4, 60.0),
    (line, 0.7, 120.0),
    (levelling_off, 0.4, -60 * math.log(0.4 / 0.7)),
    (levelling_off, 0.7, -60 * math.log(0.1 / 0.7)),
    (slow_start, 0.4, 50 + 12 * math.log(3 / 4)),
    (slow_start, 0.7, 50 + 12 * math.log(6)),
]
"""A curve, a target, and the step at which the curve has it."""


def noisy(curve: Callable[[np.ndarray], np.ndarray], target: float, seed: int, noise: float = 0.04) -> Reaching:
    random = np.random.default_rng(seed)
    found = reaching(STEPS, curve(STEPS) + noise * random.standard_normal(len(STEPS)), target, seed)
    assert found is not None
    return found


@pytest.mark.parametrize(("curve", "target", "when"), CURVES)
def test_a_curve_without_noise_reaches_its_target_when_the_formula_says(
    curve: Callable[[np.ndarray], np.ndarray], target: float, when: float
) -> None:
    found = noisy(curve, target, 0, noise=0.0)
    assert found.step == pytest.approx(when, rel=0.04)


@pytest.mark.parametrize(("curve", "target", "when"), CURVES)
def test_the_interval_holds_the_truth_nine_times_in_ten(
    curve: Callable[[np.ndarray], np.ndarray], target: float, when: float
) -> None:
    found = [noisy(curve, target, seed) for seed in range(20)]
    held = [(each.low or math.inf) <= when <= (each.high or math.inf) for each in found]
    assert sum(held) >= 18


def test_a_kink_that_no_curve_of_the_family_has_is_inside_the_interval() -> None:
    """The reward rises to 1 until step 67 and stays: no curve of the family does, and all that fit reach 0.99 much later."""
    found = noisy(lambda step: np.minimum(1.0, step / 67), 0.99, 0, noise=0.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 0.99 * 67 <= found.high


def test_more_noise_means_a_wider_interval() -> None:
    def width(noise: float) -> float:
        found = noisy(levelling_off, 0.5, 1, noise)
        assert found.low is not None
        return (found.high or found.horizon) - found.low

    assert width(0.01) < width(0.05) < width(0.15)


def test_a_flat_curve_does_not_reach_a_target() -> None:
    for seed in range(10):
        found = noisy(lambda step: np.full(len(step), 0.3), 0.7, seed)
        assert found.step is None
        assert found.is_flat
        assert found.level == pytest.approx(0.3, abs=0.06)


def test_a_falling_curve_does_not_reach_a_target() -> None:
    found = noisy(lambda step: 0.6 - 0.003 * step, 0.7, 0)
    assert (found.step, found.share) == (None, 0.0)
    assert found.rise[2] < 0


@pytest.mark.parametrize(
    "curve",
    [
        lambda step: np.where(step <= 60, 0.1 + 0.7 * step / 60, 0.2),
        lambda step: 0.1 + 0.7 * (step % 50) / 50,
        lambda step: 0.1 + 0.7 * np.exp(-(((step - 45) / 15) ** 2)),
    ],
    ids=["collapse", "reset", "hill"],
)
def test_a_target_that_was_reached_and_lost_again_was_reached(curve: Callable[[np.ndarray], np.ndarray]) -> None:
    target = 0.6
    when = float(STEPS[curve(STEPS) >= target][0])
    for seed in range(10):
        found = noisy(curve, target, seed)
        assert found.step == pytest.approx(when, abs=12)
        assert found.low is not None
        assert found.high is not None
        assert found.low - 4 <= when <= found.high


def test_a_target_that_is_lost_again_is_said_to_be() -> None:
    collapse = noisy(lambda step: np.where(step <= 60, 0.1 + 0.7 * step / 60, 0.2), 0.6, 0)
    assert collapse.ends_at == pytest.approx(0.2, abs=0.06)
    assert noisy(slow_start, 0.7, 0).ends_at is None


def test_noise_around_a_level_below_the_target_has_not_reached_it() -> None:
    for seed in range(30):
        found = noisy(lambda step: np.full(len(step), 0.5), 0.55, seed)
        assert found.step is None or found.step > found.last_step


def test_a_target_beyond_twice_the_steps_is_not_promised() -> None:
    found = noisy(line, 1.5, 0, noise=0.005)  # the line has it at step 280
    assert found.step is None
    assert not found.is_flat
    assert found.horizon == 200


def test_a_plateau_below_the_target_is_seen_before_the_curve_ends() -> None:
    found = noisy(slow_start, 0.95, 0, noise=0.01)
    assert (found.step, found.share) == (None, 0.0)


def test_a_target_that_the_policy_had_from_the_beginning_is_reached_at_the_first_step() -> None:
    found = noisy(lambda step: np.full(len(step), 0.9), 0.5, 0)
    assert (found.step, found.low, found.high) == (1.0, 1.0, 1.0)


def test_few_points_are_too_few() -> None:
    assert reaching(range(1, FEWEST), [0.1] * (FEWEST - 1), 0.5) is None
    assert reaching([1] + [2] * 20, [0.1] + [math.nan] * 20, 0.5) is None


def test_a_long_curve_is_averaged_and_says_the_same() -> None:
    steps = np.arange(1, 20_001)
    random = np.random.default_rng(0)
    found = reaching(steps, levelling_off(steps / 200) + 0.2 * random.standard_normal(len(steps)), 0.7)
    assert found is not None
    assert found.step == pytest.approx(200 * CURVES[3][2], rel=0.1)


def test_the_same_points_give_the_same_answer() -> None:
    assert noisy(line, 0.4, 5) == noisy(line, 0.4, 5)
