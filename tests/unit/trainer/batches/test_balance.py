from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.models.spec import ModelShape
from redline.trainer.batches.balance import deal, longest_first
from redline.trainer.batches.cost import CostModel

NO_LIMIT = 10**9
unit_costs = st.lists(st.integers(1, 1000), min_size=1, max_size=60).map(lambda costs: np.array(costs, dtype=np.float64))


def loads(cost_U: np.ndarray, bin_U: np.ndarray, num_bins: int) -> np.ndarray:
    return np.bincount(bin_U, cost_U, minlength=num_bins)


@given(unit_costs, st.integers(1, 8))
def test_no_bin_is_dearer_than_the_mean_and_almost_one_unit(cost_U: np.ndarray, num_bins: int) -> None:
    bin_U = longest_first(cost_U, np.ones(len(cost_U), dtype=np.int64), num_bins, NO_LIMIT)
    load_X = loads(cost_U, bin_U, num_bins)
    assert len(load_X) == num_bins
    assert load_X.max() <= load_X.mean() + (1 - 1 / num_bins) * cost_U.max() + 1e-6


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_dearest_bin_is_within_grahams_bound_of_the_best_possible(costs: list[int], num_bins: int) -> None:
    cost_U = np.array(costs, dtype=np.float64)
    bin_U = longest_first(cost_U, np.ones(len(costs), dtype=np.int64), num_bins, NO_LIMIT)
    best = min(loads(cost_U, np.array(each), num_bins).max() for each in product(range(num_bins), repeat=len(costs)))
    assert loads(cost_U, bin_U, num_bins).max() <= (4 / 3 - 1 / (3 * num_bins)) * best + 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100)), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 80)
)
def test_no_bin_has_more_tokens_than_the_budget_unless_one_unit_does(
    units: list[tuple[int, int]], num_bins: int, max_tokens: int
) -> None:
    cost_U, tokens_U = np.array([u[0] for u in units], dtype=np.float64), np.array([u[1] for u in units])
    bin_U = longest_first(cost_U, tokens_U, num_bins, max_tokens)
    for number in range(int(bin_U.max()) + 1):
        inside = tokens_U[bin_U == number]
        assert inside.sum() <= max_tokens or len(inside) == 1


def test_what_fits_nowhere_opens_another_bin() -> None:
    tokens_U = np.array([6, 6, 6])
    assert longest_first(tokens_U.astype(float), tokens_U, 2, 10).tolist() == [0, 1, 2]


def test_equal_units_go_to_bins_in_turn() -> None:
    assert longest_first(np.ones(5), np.ones(5, dtype=np.int64), 2, 10).tolist() == [0, 1, 0, 1, 0]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_every_bin_is_dealt_once_and_rounds_are_of_like_cost(num_ranks: int, num_rounds: int, seed: int) -> None:
    cost_X = np.random.default_rng(seed).lognormal(size=num_ranks * num_rounds)
    bins_RN = deal(cost_X, num_ranks)
    assert sorted(bins_RN.ravel().tolist()) == list(range(len(cost_X)))
    dealt_RN = cost_X[bins_RN]
    assert (dealt_RN.max(axis=0)[1:] <= dealt_RN.min(axis=0)[:-1]).all()
    # Totals differ by no more than the costs of one round do: the poorest rank gets the most of each.
    total_R, spread_N = dealt_RN.sum(axis=1), dealt_RN.max(axis=0) - dealt_RN.min(axis=0)
    assert total_R.max() - total_R.min() <= spread_N.max() + 1e-9


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_a_run_costs_as_much_in_two_parts(before: int, own: int) -> None:
    cost, zero = CostModel(), np.array(0)
    parts = cost.run(np.array(before), zero) + cost.run(np.array(own), np.array(before))
    assert parts == pytest.approx(cost.run(np.array(before + own), zero))


def test_attention_weighs_as_its_operations_do() -> None:
    shape = ModelShape("any", 1000, 64, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=16, max_positions=100)
    cost = CostModel.of(shape, num_parameters=10**6)
    # 4 · H · D operations per pair and layer, against 2 per token and parameter.
    assert cost.per_pair == pytest.approx((4 * 8 * 16 * 4) / (2 * 10**6))
