"""The controller in simulated time, around the real buffer: rollouts and trainer take as long as each test says."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random

import pytest
from support.simulated_rollouts import Simulation

from redline.buffer.control.groups import WINDOW, Controller, Decision, Observation

STEPS = 300
MAX_LAG = 4
BATCH = 8

GROUP_S = {
    "as long as training": lambda version, rng: 1.0,
    "three times as long": lambda version, rng: 3.0,
    "heavy tail": lambda version, rng: rng.lognormvariate(-0.5, 1.0),
    "heavier tail": lambda version, rng: 0.5 * rng.paretovariate(1.6),
    "no variance any more": lambda version, rng: 0.3 * rng.paretovariate(1.2),
    "one in ten is slow": lambda version, rng: 6.0 if rng.random() < 0.1 else 0.5,
    "slower and slower": lambda version, rng: (0.5 + 1.5 * version / STEPS) * rng.uniform(0.7, 1.3),
    "faster and faster": lambda version, rng: (3.0 - 2.5 * version / STEPS) * rng.uniform(0.7, 1.3),
    "more than rollouts can do": lambda version, rng: 1.5 * rng.uniform(0.7, 1.3),
}
"""Seconds that a group takes; a step of the trainer takes one."""


def train_s(version: int, rng: Random) -> float:
    return 1.0


@cache
def simulated(workload: str, depth: int | None, seed: int = 0) -> Simulation:
    slots = BATCH if workload == "more than rollouts can do" else 1000
    return Simulation(GROUP_S[workload], train_s, MAX_LAG, BATCH, slots, depth, seed).run(STEPS)


@pytest.mark.parametrize(
    "depth", [3, MAX_LAG + 1, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (2, *range(4, MAX_LAG + 1)))]
)
@pytest.mark.parametrize("workload", GROUP_S)
def test_it_is_about_as_fast_as_any_fixed_depth(workload: str, depth: int) -> None:
    assert simulated(workload, None).steps_per_s >= 0.95 * simulated(workload, depth).steps_per_s


@pytest.mark.parametrize("workload", GROUP_S)
def test_groups_are_fresher_than_with_the_greatest_depth(workload: str) -> None:
    assert simulated(workload, None).mean_lag <= simulated(workload, MAX_LAG + 1).mean_lag - 0.75


@pytest.mark.parametrize("workload", ["as long as training", "three times as long"])
def test_it_comes_to_rest_where_nothing_changes(workload: str) -> None:
    assert len(set(simulated(workload, None).targets[STEPS // 2 :])) == 1


@pytest.mark.parametrize("workload", ["heavy tail", "heavier tail", "more than rollouts can do"])
def test_chance_makes_it_move_seldom_and_little(workload: str) -> None:
    late = simulated(workload, None).targets[STEPS // 2 :]
    assert sum(a != b for a, b in pairwise(late)) <= len(late) / WINDOW / 2
    assert max(late) - min(late) <= BATCH


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["heavy tail", "heavier tail"])
def test_on_a_heavy_tail_no_chance_makes_it_much_slower_than_the_best(workload: str) -> None:
    for seed in range(1, 4):
        fixed = [simulated(workload, depth, seed=seed).steps_per_s for depth in range(3, MAX_LAG + 2)]
        assert simulated(workload, None, seed=seed).steps_per_s >= 0.97 * max(fixed), seed


def almost_without_a_mean(version: int, rng: Random) -> float:
    return 0.6 * rng.paretovariate(1.1)


@pytest.mark.slow
def test_what_it_lacks_on_the_heaviest_tail_is_the_way_up() -> None:
    """From two batches to the six that this load needs it takes a hundred steps, one careful raise after the other. A short run
    is slower for that; a long one is not, and its groups are half as old as with the depth that is fastest."""

    def against_the_best(steps: int) -> tuple[float, float]:
        load = (almost_without_a_mean, train_s, 8, BATCH, 1000)
        best, found = (Simulation(*load, depth, seed=1).run(steps) for depth in (9, None))
        return found.steps_per_s / best.steps_per_s, found.mean_lag / best.mean_lag

    speed, lag = against_the_best(1500)
    assert against_the_best(300)[0] > 0.9
    assert speed > 0.97
    assert lag < 0.6


def test_it_follows_rollouts_that_slow_down_and_speed_up() -> None:
    slower, faster = simulated("slower and slower", None).targets, simulated("faster and faster", None).targets
    assert slower[-1] > slower[STEPS // 4]
    assert faster[-1] < faster[STEPS // 4]


# ── single decisions ───────────────────────────────────────────────────────────────────────────────────────────────────


def after(controller: Controller, steps: int, *, wait: float = 0.0, train: float = 1.0, left: int = 0) -> list[Decision]:
    """The decisions that changed something over so many equal steps."""
    decisions = [controller.observe(Observation(wait, train, left)) for _ in range(steps)]
    return [decision for decision in decisions if decision.is_change]


def test_it_begins_with_two_batches() -> None:
    assert Controller(8, 40).target == 16
    assert Controller(8, 8).target == 8


def test_a_waiting_trainer_gets_more_groups_and_the_reason_says_why() -> None:
    controller = Controller(8, 40)
    assert after(controller, WINDOW, wait=0.2) == [Decision(16, 20, "the trainer waited for 17% of the time")]


def test_waiting_groups_become_fewer_slowly() -> None:
    controller = Controller(8, 40)
    assert not after(controller, WINDOW, left=4)
    assert after(controller, WINDOW, left=4) == [Decision(16, 14, "every batch left 4 groups or more waiting")]


def test_one_batch_that_left_nothing_is_enough_to_keep_the_target() -> None:
    controller = Controller(8, 40)
    assert not after(controller, 2 * WINDOW - 1, left=4)
    assert not after(controller, 1, left=0)


def test_a_raise_that_does_not_help_is_undone_and_not_tried_again_soon() -> None:
    controller = Controller(8, 40)
    up, back = after(controller, 5 * WINDOW, wait=1.0)
    assert (up.old, up.new, back.new) == (16, 24, 16)
    assert back.why == "8 more groups made steps no shorter"


def test_a_raise_after_a_vain_one_comes_sooner_if_the_trainer_waits_much_longer() -> None:
    controller = Controller(8, 40)
    after(controller, 4 * WINDOW, wait=0.2)
    assert controller.target == 16
    assert after(controller, WINDOW + 2, wait=0.5)[0].new > 16


@pytest.mark.parametrize("most", [8, 12, 40])
def test_it_never_leaves_its_bounds(most: int) -> None:
    rng, controller = Random(0), Controller(8, most)
    for _ in range(3000):
        before = controller.target
        decision = controller.observe(Observation(rng.choice([0.0, 0.0, rng.random()]), rng.random(), rng.randrange(20)))
        assert (decision.old, decision.new) == (before, controller.target)
        assert 8 <= controller.target <= most
        assert abs(decision.new - decision.old) <= 8


def test_lockstep_and_a_fixed_depth_never_change() -> None:
    assert not after(Controller(8, 8), 100, wait=1.0)
    assert not after(Controller(8, 24, 24), 100, left=8)


def test_steps_that_take_no_time_at_all_are_no_reason_to_stumble() -> None:
    assert not after(Controller(8, 40), 3 * WINDOW, train=0.0)
