"""The loop in simulated time, against closed forms and against the real buffer in simulated time."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from support.simulated_rollouts import Simulation

from redline.lab.simulate.costs import EngineCost, Range
from redline.lab.simulate.events import Loop, Outcome, Simulator
from redline.lab.simulate.recorded import Group

COST = EngineCost(step_s=0.01, row_s=0.001, pass_s=0.0, prompt_token_s=0.0, rows=Range(1, 64), error=0.0)
FLAT = EngineCost(step_s=0.01, row_s=0.0, pass_s=0.0, prompt_token_s=0.0, rows=Range(1, 64), error=0.0)


def equal(tokens: int, attempts: int = 4, environment_s: float = 0.0, prompt_tokens: int = 0) -> Group:
    return Group((tokens,) * attempts, (environment_s,) * attempts, prompt_tokens)


def simulated(group: Group, **changes: Any) -> Outcome:
    settings: dict[str, Any] = {
        "engine": COST, "engines": 1, "rows": 1000, "groups_per_step": 2, "max_lag": 0, "train_s": 0.0, "step_s": 0.5,
        "sync_s": 0.0, "steps": 10,
    }  # fmt: skip
    return Simulator(Loop(groups=(group,), **{**settings, **changes})).run()


def test_equal_answers_take_a_step_of_all_rows_per_token() -> None:
    assert simulated(equal(100)).step_s == pytest.approx([100 * (0.01 + 8 * 0.001) + 0.5] * 10)


def test_prompts_are_computed_once_per_group_and_weights_pause_the_engine() -> None:
    cost = EngineCost(0.01, 0.001, 0.04, 0.002, Range(1, 64), 0.0)
    steps = simulated(equal(100, prompt_tokens=50), engine=cost, sync_s=0.3).step_s
    assert steps[0] == pytest.approx(1.8 + 0.04 + 2 * 50 * 0.002 + 0.5)
    assert steps[1] == pytest.approx(steps[0] + 0.3)


def test_those_without_a_row_wait_for_one() -> None:
    assert simulated(equal(100), rows=4).step_s[0] == pytest.approx(2 * 100 * (0.01 + 4 * 0.001) + 0.5)


def test_those_that_get_a_row_later_cost_a_pass_over_prompts_each_time() -> None:
    """Two rows for eight attempts of one length: they begin in four pairs."""
    cost = replace(COST, pass_s=0.04)
    assert simulated(equal(100), engine=cost, rows=2).step_s[0] == pytest.approx(4 * (100 * (0.01 + 2 * 0.001) + 0.04) + 0.5)


def test_the_host_begins_attempts_one_after_the_other_before_an_engine_has_them() -> None:
    assert simulated(equal(100), begin_s=0.02).step_s == pytest.approx([8 * 0.02 + 1.8 + 0.5] * 10)
    after_sync = simulated(equal(100), begin_s=0.02, sync_s=0.3).step_s[1]
    assert after_sync == pytest.approx(0.3 + 8 * 0.02 + 1.8 + 0.5), "none is begun before the weights are there"
    beside = simulated(equal(100), engine=FLAT, step_s=3.0, max_lag=1, begin_s=0.02, steps=30)
    assert np.mean(beside.step_s[5:]) == pytest.approx(3.0, rel=0.01), "with a lag it does so while the trainer works"


def test_several_engines_divide_the_rows() -> None:
    assert simulated(equal(100), engines=4).step_s[0] == pytest.approx(100 * (0.01 + 2 * 0.001) + 0.5)


def test_environments_and_rewards_come_after_sampling_and_all_at_once() -> None:
    assert simulated(equal(100, environment_s=2.0)).step_s[0] == pytest.approx(1.8 + 2.0 + 0.5)


def test_training_grows_with_the_tokens_of_the_batch() -> None:
    assert simulated(equal(100), train_s=0.001).step_s[0] == pytest.approx(1.8 + 0.5 + 800 * 0.001)


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_with_a_lag_the_slower_side_sets_the_pace_and_no_group_is_too_old(max_lag: int) -> None:
    outcome = simulated(equal(100), engine=FLAT, step_s=3.0, max_lag=max_lag, steps=30)
    assert np.mean(outcome.step_s[5:]) == pytest.approx(3.0, rel=0.01)
    assert max(outcome.lags) <= max_lag
    assert len(outcome.lags) == 30 * 2


def test_where_one_device_is_shared_both_slow_each_other_down() -> None:
    apart, shared = (
        float(np.mean(simulated(equal(100), max_lag=1, step_s=1.5, slower=slower, steps=30).step_s[5:]))
        for slower in (1.0, 2.0)
    )
    assert shared > 1.3 * apart


def test_groups_that_were_held_up_together_are_held_up_together() -> None:
    """Ten steps were recorded, in one of which every group waited a second: so does one simulated step of ten, and not most."""
    groups = tuple(Group((100,), (1.0 if step == 3 else 0.0,), 0) for step in range(10) for _ in range(8))
    outcome = Simulator(Loop(groups, FLAT, 1, 1000, 8, 0, 0.0, 0.5, 0.0, steps=300)).run()
    assert set(np.round(outcome.step_s, 6)) == {1.5, 2.5}
    assert np.mean(np.array(outcome.step_s) > 2) == pytest.approx(0.1, abs=0.05)


def test_groups_that_are_no_whole_number_of_steps_are_all_drawn() -> None:
    """Of sixteen groups the last four are long: steps of twelve meet them as well."""
    groups = tuple(Group((100 if place < 12 else 1000,), (0.0,), 0) for place in range(16))
    seconds = Simulator(Loop(groups, FLAT, 1, 1000, 12, 0, 0.0, 0.5, 0.0, steps=60)).run().step_s
    assert set(np.round(seconds, 6)) == {1.5, 10.5}


def test_a_lost_engine_costs_time_and_no_attempt() -> None:
    calm = simulated(equal(100), engines=2, steps=40)
    lossy = simulated(equal(100), engines=2, steps=40, failure_every_s=10.0, recovery_s=5.0)
    assert lossy.failures > 3
    assert lossy.seconds > calm.seconds
    assert len(lossy.lags) == 40 * 2


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_steps_and_lags_are_those_of_the_real_buffer_in_simulated_time(max_lag: int) -> None:
    """Every group in rows of its own, of log-normal length; the trainer takes 0.6 of the usual group."""
    draw = Random(1)
    lengths = [max(1, round(draw.lognormvariate(4.6, 0.6))) for _ in range(8_000)]
    groups = tuple(Group((length,), (0.0,), 0) for length in lengths)
    own = Simulator(Loop(groups, FLAT, 1, 10_000, 8, max_lag, 0.0, 0.6, 0.0, steps=600)).run()
    real = Simulation(
        group_s=lambda version, chance: 0.01 * lengths[chance.randrange(8_000)], train_s=lambda version, chance: 0.6,
        max_lag=max_lag, groups_per_step=8, depth=max_lag + 1,
    ).run(600)  # fmt: skip
    assert own.seconds / 600 == pytest.approx(real.ends[-1] / 600, rel=0.05)
    assert np.mean(own.lags) == pytest.approx(np.mean(real.lags), abs=0.1)
