from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.lab.evidence.rank_tests import mann_whitney, shift, trend
from redline.lab.evidence.statistics import EXACT, hodges_lehmann, signed_rank

# ── two samples ────────────────────────────────────────────────────────────────────────────────────────────────────────


def mann_whitney_by_enumeration(values: list[float], than: list[float]) -> float:
    """The definition: over all ways to deal out the values, how often is the smaller count as small as this."""
    pooled = [*values, *than]

    def smaller(chosen: tuple[int, ...]) -> int:
        first = [pooled[i] for i in chosen]
        second = [pooled[i] for i in range(len(pooled)) if i not in chosen]
        above = sum(a > b for a, b in itertools.product(first, second))
        return min(above, len(first) * len(second) - above)

    observed = smaller(tuple(range(len(values))))
    deals = list(itertools.combinations(range(len(pooled)), len(values)))
    return sum(smaller(deal) <= observed for deal in deals) / len(deals)


@given(st.lists(st.integers(-50, 50), min_size=4, max_size=9, unique=True), st.integers(1, 3))
def test_mann_whitney_is_exact_without_ties(values: list[int], first: int) -> None:
    assert mann_whitney(values[:first], values[first:]) == pytest.approx(
        mann_whitney_by_enumeration(values[:first], values[first:])
    )


def test_with_ties_the_approximation_is_near_the_exact_value_of_values_moved_apart() -> None:
    values, than = [1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11, 12]
    apart = [value - 0.01 * i for i, value in enumerate(values)]
    assert mann_whitney(values, than) == pytest.approx(mann_whitney(apart, than), abs=0.01)
    assert mann_whitney([3, 3], [3, 3]) == 1.0


def test_the_shift_is_the_median_difference_and_its_interval_inverts_the_test() -> None:
    """The critical value of U for two samples of 5 at 5%, two-sided, is 2: the third smallest difference is the first kept."""
    values, than = [1.1, 2.3, 4.7, 8.2, 9.9], [0.3, 1.6, 3.1, 3.3, 5.2]
    differences = sorted(a - b for a, b in itertools.product(values, than))
    found = shift(values, than)
    assert found.value == pytest.approx(statistics.median(differences))
    assert found.interval == pytest.approx((differences[2], differences[-3]))
    assert shift([1, 2, 3], [4, 5, 6]).interval is None


# ── trends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trend_by_enumeration(values: list[int]) -> float:
    def smaller(order: tuple[int, ...]) -> int:
        falling = sum(a > b for a, b in itertools.combinations(order, 2))
        return min(falling, math.comb(len(order), 2) - falling)

    observed = smaller(tuple(values))
    orders = list(itertools.permutations(values))
    return sum(smaller(order) <= observed for order in orders) / len(orders)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6, unique=True))
def test_kendalls_test_is_exact_without_ties(values: list[int]) -> None:
    assert trend(values)[0] == pytest.approx(min(1.0, trend_by_enumeration(values)))


def test_a_line_with_one_wild_value_has_its_slope() -> None:
    line = [0.5 * i for i in range(11)]
    line[4] = 100
    p_value, change = trend(line)
    assert change == pytest.approx(5.0)
    assert p_value < 0.01


def test_a_constant_has_no_trend() -> None:
    assert trend([2.0] * 9) == (1.0, 0.0)
    assert trend([2.0]) == (1.0, 0.0)


# ── many pairs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_beyond_the_exact_range_interval_and_test_go_on_as_they_were() -> None:
    """One more pair, in the middle, moves nothing by much: the approximation takes over without a jump."""
    values = (0.3 + np.random.default_rng(0).normal(size=EXACT)).tolist()
    middle = hodges_lehmann(values).value
    exact, approximate = hodges_lehmann(values).interval, hodges_lehmann([*values, middle]).interval
    assert approximate == pytest.approx(exact, abs=0.02)
    assert signed_rank([*values, 1e-9]) == pytest.approx(signed_rank(values), abs=0.001)
