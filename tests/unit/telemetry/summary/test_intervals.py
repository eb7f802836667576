from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest

from redline.telemetry.summary.intervals import FEWEST_TASKS, mean_interval, share_interval

TRIALS = 2000


def test_an_interval_of_a_mean_is_that_of_students_t() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0]) or (0, 0)  # t = 2.776, s = 1.581
    assert low == pytest.approx(3 - 2.776 * 1.5811 / 5**0.5, abs=0.01)
    assert high - 3 == pytest.approx(3 - low)


def test_few_tasks_and_equal_values_have_no_interval() -> None:
    assert mean_interval([0.0, 1.0] * 2) is None
    assert mean_interval([0.5] * 9) is None
    assert share_interval([0.0, 1.0] * 2, 4) is None


def test_a_share_of_all_or_none_has_an_interval_that_shrinks_with_more_questions() -> None:
    for share in (0.0, 1.0):
        widths = [np.subtract(*(share_interval([share] * n, n) or (0, 0))[::-1]) for n in (FEWEST_TASKS, 20, 200)]
        assert all(wide > narrow > 0 for wide, narrow in pairwise(widths))
        assert all(0 <= end <= 1 for n in (5, 500) for end in share_interval([share] * n, n) or ())


@pytest.mark.parametrize(("questions", "samples"), [(20, 1), (64, 1), (64, 8), (200, 4)])
@pytest.mark.parametrize("mean", [0.1, 0.5, 0.9])
def test_an_interval_of_a_share_holds_the_truth_in_95_of_100_cases(questions: int, samples: int, mean: float) -> None:
    """Questions differ in difficulty, and attempts at one are alike: an interval that counts each attempt for itself is too
    narrow, and this one is not."""
    generator = np.random.default_rng(0)
    difficulty = generator.beta(2 * mean, 2 * (1 - mean), (TRIALS, questions))
    shares = generator.binomial(samples, difficulty) / samples
    found = [share_interval(list(row), questions * samples) or (1, 0) for row in shares]
    assert 0.935 < fmean(low <= mean <= high for low, high in found) < 0.985
    if samples == 8:
        naive = [1.96 * (row.mean() * (1 - row.mean()) / (questions * samples)) ** 0.5 for row in shares]
        assert fmean(abs(row.mean() - mean) <= half for row, half in zip(shares, naive, strict=True)) < 0.9
