from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.lab.evidence.statistics import compare, hodges_lehmann, percentiles, signed_rank

# ── the signed-rank test ───────────────────────────────────────────────────────────────────────────────────────────────

DARWIN = [6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
"""Crossed against self-fertilised maize, the example the test is usually explained with; T = 24, p = 0.0413."""


def test_the_textbook_example_has_the_textbook_p_value() -> None:
    assert signed_rank(DARWIN) == 0.041259765625


@pytest.mark.parametrize("n", [1, 5, 8, 20])
def test_when_all_values_have_one_sign_p_is_two_of_all_sign_choices(n: int) -> None:
    assert signed_rank(range(1, n + 1)) == 2 / 2**n
    assert signed_rank([-value for value in range(1, n + 1)]) == 2 / 2**n


def test_zeros_say_nothing() -> None:
    assert signed_rank([0, *DARWIN, 0.0]) == signed_rank(DARWIN)
    assert signed_rank([0.0, 0.0]) == 1.0
    assert signed_rank([]) == 1.0


def by_enumeration(values: list[int]) -> float:
    """The definition: over all choices of signs, how often is the smaller rank sum as small as this."""
    kept = [value for value in values if value]
    sizes = [abs(value) for value in kept]
    ranks = [sum(other < size for other in sizes) + (sum(other == size for other in sizes) + 1) / 2 for size in sizes]

    def smaller_sum(signs: tuple[bool, ...]) -> float:
        positive = sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        return min(positive, sum(ranks) - positive)

    observed = smaller_sum(tuple(value > 0 for value in kept))
    choices = list(itertools.product((False, True), repeat=len(kept)))
    return sum(smaller_sum(signs) <= observed for signs in choices) / len(choices)


@given(st.lists(st.integers(-6, 6), max_size=8))
def test_p_is_exact_with_ties_and_zeros(values: list[int]) -> None:
    assert signed_rank(values) == pytest.approx(by_enumeration(values))


# ── the estimate and its interval ──────────────────────────────────────────────────────────────────────────────────────


def test_the_estimate_is_the_median_of_all_pairwise_means() -> None:
    assert hodges_lehmann([1, 2, 6]).value == 2.75  # of 1, 1.5, 2, 3.5, 4, 6


def test_five_pairs_are_too_few_for_an_interval_and_six_are_enough() -> None:
    assert hodges_lehmann([1, 2, 3, 4, 5]).interval is None
    assert hodges_lehmann([1, 2, 3, 4, 5, 9]).interval == (1, 9)


@pytest.mark.parametrize(("n", "cut"), [(7, 3), (8, 4), (9, 6), (10, 9), (12, 14), (15, 26), (20, 53)])
def test_the_interval_leaves_out_as_many_means_as_the_tables_say(n: int, cut: int) -> None:
    """The critical values of the test at 5%, two-sided, are 2, 3, 5, 8, 13, 25 and 52."""
    values = [math.sqrt(i) for i in range(1, n + 1)]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    assert hodges_lehmann(values).interval == (means[cut - 1], means[-cut])


@given(st.lists(st.integers(-(10**6), 10**6), min_size=6, max_size=12, unique=True))
def test_the_interval_holds_what_the_test_does_not_reject(values: list[int]) -> None:
    low, high = hodges_lehmann(values).interval
    assert low <= hodges_lehmann(values).value <= high
    beyond = (low - 0.25, high + 0.25)  # means are multiples of a half, so no value is tied with another here
    assert all(signed_rank([value - shift for value in values]) <= 0.05 for shift in beyond)
    if low < high:
        assert all(signed_rank([value - shift for value in values]) > 0.05 for shift in (low + 0.25, high - 0.25))


def test_a_factor_that_every_pair_shows_is_found() -> None:
    theirs = [1.0, 2.0, 3.0, 5.0, 8.0, 13.0]
    found = compare([2 * value for value in theirs], theirs)
    assert found.ratio == pytest.approx(2)
    assert found.interval == pytest.approx((2, 2))
    assert found.p_value == 2 / 2**6
    assert found.pairs == 6
    assert found.is_significant


def test_a_side_against_itself_is_not_different() -> None:
    drawn = np.random.default_rng(0).lognormal(size=(2, 12)).tolist()
    found = compare(*drawn)
    assert found.interval[0] < 1 < found.interval[1]
    assert not found.is_significant


def test_swapping_the_sides_inverts_the_ratio() -> None:
    ours, theirs = np.random.default_rng(1).lognormal(size=(2, 9)).tolist()
    there, back = compare(ours, theirs), compare(theirs, ours)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.interval == pytest.approx((1 / back.interval[1], 1 / back.interval[0]))
    assert there.p_value == back.p_value


# ── percentiles ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    expected = dict(zip(("p50", "p90", "p99"), np.percentile(values, [50, 90, 99]), strict=True))
    assert percentiles(values) == pytest.approx(expected)
