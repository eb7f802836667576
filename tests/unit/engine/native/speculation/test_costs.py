"""What a step is said to cost."""

from __future__ import annotations

import pytest

from redline.engine.native.speculation.costs import (
    ENOUGH,
    FORGET_AFTER,
    MEASURE_AGAIN_EVERY,
    MEASURE_EVERY,
    Costs,
    StepClock,
    Timed,
    size_bin,
)
from redline.engine.native.speculation.speculation import best_counts


def measured(plain: dict[int, float], verifying: dict[int, float] | None = None) -> Costs:
    costs = Costs()
    for rows, seconds in plain.items():
        for _ in range(ENOUGH):
            costs.add_plain(rows, seconds)
    for tokens, seconds in (verifying or {}).items():
        for _ in range(ENOUGH):
            costs.add_verifying(tokens, seconds)
    return costs


def test_bins_grow_by_a_half_or_a_third() -> None:
    assert [size_bin(size) for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 25, 64)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 16, 24, 32, 64),
    ]


def test_a_size_that_was_never_tried_counts_as_the_next_smaller_one() -> None:
    costs = measured({2: 1.0}, {4: 1.5, 16: 4.0})
    assert costs.verifying(2, 3) == 1.0
    assert costs.verifying(2, 8) == 1.5
    assert costs.verifying(2, 16) == 4.0


def test_a_size_that_was_never_tried_costs_what_as_many_rows_cost() -> None:
    costs = measured({2: 1.0, 8: 3.0})
    assert costs.verifying(2, 8) == 3.0
    costs.add_verifying(8, 2.0)
    costs.add_verifying(8, 2.0)
    assert costs.verifying(2, 8) == 2.0, "it was tried since"


def test_a_size_that_took_long_by_bad_luck_counts_no_more_than_a_larger_one() -> None:
    costs = measured({2: 1.0}, {8: 90.0, 16: 2.0})
    assert [costs.verifying(2, size) for size in (6, 8, 12, 16, 24)] == [1.0, 2.0, 2.0, 2.0, 2.0]


def test_what_verifying_took_is_forgotten_when_nothing_is_verified_for_long() -> None:
    costs = measured({2: 1.0}, {8: 90.0})
    for _ in range(FORGET_AFTER - 1):
        costs.add_plain(2, 1.0)
    assert costs.verifying(2, 8) == 90.0
    costs.add_plain(2, 1.0)
    assert costs.verifying(2, 8) == 1.0


def test_a_launch_is_not_timed_where_the_next_one_was_captured_meanwhile() -> None:
    clock, launch = StepClock(), Timed(4, 8, 0)
    assert clock.step(launch, 0.0, runs_ahead=True, has_waited=True) is None, "nothing came before it"
    assert clock.step(launch, 0.0, runs_ahead=True, has_waited=True, was_held_up=True) is None
    done = clock.step(launch, 0.0, runs_ahead=True, has_waited=True)
    assert done is not None
    assert done[1:] == launch


def test_a_first_step_that_is_slow_does_not_count() -> None:
    costs = measured({1: 1.0})
    costs.add_verifying(8, 90.0)
    assert costs.verifying(1, 8) == 1.0
    costs.add_verifying(8, 2.0)
    assert costs.verifying(1, 8) == 2.0


def test_a_plain_step_is_due_before_the_first_guess_and_now_and_then() -> None:
    costs = Costs()
    assert costs.needs_plain(4)
    costs = measured({4: 1.0})
    assert not costs.needs_plain(4)
    for _ in range(MEASURE_EVERY):
        costs.add_verifying(8, 1.0)
    assert costs.needs_plain(4)


def test_plain_steps_that_a_busy_machine_made_long_are_measured_again() -> None:
    """Else what is saved is counted in seconds that nobody would spend, and any guess seems to pay."""
    costs = measured({4: 8.0})
    for _ in range(MEASURE_AGAIN_EVERY):
        costs.add_verifying(12, 2.0)
    assert costs.needs_plain(4)
    costs.add_plain(4, 1.0)
    assert costs.plain(4) == 1.0
    for _ in range(MEASURE_AGAIN_EVERY):
        costs.add_verifying(12, 2.0)
    assert not costs.needs_plain(4)


def test_plain_steps_that_do_take_longer_are_measured_now_and_then() -> None:
    costs = measured({4: 8.0})
    for _ in range(MEASURE_AGAIN_EVERY):
        assert not costs.needs_plain(4)
        costs.add_verifying(12, 2.0)
    assert costs.needs_plain(4)
    costs.add_plain(4, 8.0)
    assert not costs.needs_plain(4)


def test_a_plain_step_of_about_as_many_rows_stands_for_one_that_was_not_measured() -> None:
    costs = measured({4: 1.0, 16: 3.0})
    assert [costs.plain(rows) for rows in (1, 2, 4, 6, 8, 12, 32, 64)] == [None, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, None]


def test_nothing_is_guessed_where_tokens_cost_as_much_as_steps() -> None:
    dear = {size: 1.0 * size for size in range(1, 64)}
    assert best_counts([0.6, 0.6], [8, 8], measured({2: 2.0}, dear)) == [0, 0]


def test_where_tokens_are_free_all_that_may_be_right_is_tried() -> None:
    free = dict.fromkeys(range(1, 64), 1.0)
    assert best_counts([0.9, 0.9], [8, 3], measured({2: 1.0}, free)) == [8, 3]


def test_rows_that_accept_get_what_rows_that_do_not_would_waste() -> None:
    steps = {size: 1.0 + 0.08 * size for size in range(1, 64)}
    sure, unsure = best_counts([0.95, 0.02], [8, 8], measured({2: 1.0}, steps))
    assert sure > 3
    assert unsure == 0


@pytest.mark.parametrize("longest", [[0, 0], [0, 5]])
def test_rows_without_a_draft_get_none(longest: list[int]) -> None:
    counts = best_counts([1.0, 1.0], longest, measured({2: 1.0}, {64: 1.0}))
    assert counts == longest
