"""Workers for rewards in simulated time, around the real buffer: rewards take as long as each test says."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random

import pytest
from support.simulated_rollouts import Simulation

from redline.buffer.control.groups import PATIENCE, WINDOW, Controller, Decision, Observation
from redline.buffer.control.workers import SETTLING, Controllers, WorkerController

STEPS = 200
BATCH = 8
MOST = 8

SCORE_S = {
    "fast": lambda version, rng: 0.01,
    "slow": lambda version, rng: 0.5 * rng.uniform(0.8, 1.2),
    "slower than all workers": lambda version, rng: 2.0 * rng.uniform(0.8, 1.2),
    "heavy tail": lambda version, rng: rng.lognormvariate(-1.5, 1.0),
    "about as fast as training": lambda version, rng: 0.125 * rng.lognormvariate(0, 0.5),
    "slow for a while": lambda version, rng: (0.5 if 60 <= version < 120 else 0.01) * rng.uniform(0.8, 1.2),
}
"""Seconds that the reward of a group takes; a step of the trainer takes one, and has eight groups."""


def group_s(version: int, rng: Random) -> float:
    return 0.8 * rng.uniform(0.7, 1.3)


def train_s(version: int, rng: Random) -> float:
    return rng.uniform(0.9, 1.1)


@cache
def simulated(rewards: str, most: int = MOST, *, max_lag: int = 4, compute: bool = False) -> Simulation:
    simulation = Simulation(group_s, train_s, max_lag, BATCH, score_s=SCORE_S[rewards], max_workers=most)
    simulation.rewards_compute = compute
    return simulation.run(STEPS)


def num_moves(workers: list[int]) -> int:
    return sum(a != b for a, b in pairwise(workers))


@pytest.mark.parametrize("max_lag", [1, 4])
def test_fast_rewards_keep_one_worker(max_lag: int) -> None:
    assert set(simulated("fast", max_lag=max_lag).workers) == {1}


def test_slow_rewards_get_workers_until_the_trainer_no_longer_waits() -> None:
    """Eight groups of half a second are four worker-seconds a step; the trainer needs a step every second."""
    found, alone = simulated("slow"), simulated("slow", 1)
    assert alone.step_s(100, 199) > 3.5
    assert found.workers[-1] >= 4
    assert found.step_s(100, 199) < 1.05
    assert found.workers[10] >= 4, "and most of them soon"


def test_rewards_that_are_slower_than_all_workers_get_all_and_keep_them() -> None:
    assert set(simulated("slower than all workers").workers[10:]) == {MOST}


@pytest.mark.parametrize("rewards", ["heavy tail", "about as fast as training"])
@pytest.mark.parametrize("max_lag", [1, 4])
def test_chance_makes_it_move_seldom(rewards: str, max_lag: int) -> None:
    late = simulated(rewards, max_lag=max_lag).workers[STEPS // 2 :]
    assert num_moves(late) <= len(late) / WINDOW / 2


def test_it_is_about_as_fast_as_with_all_workers_from_the_beginning() -> None:
    for rewards in ("slow", "heavy tail", "about as fast as training"):
        score_s = SCORE_S[rewards]
        with_all = Simulation(group_s, train_s, 4, BATCH, score_s=score_s, max_workers=MOST, are_all_held=True).run(STEPS)
        assert simulated(rewards).step_s(100, 199) < 1.02 * with_all.step_s(100, 199), rewards


@pytest.mark.parametrize("max_lag", [1, 4])
def test_a_load_that_changes_is_followed(max_lag: int) -> None:
    found = simulated("slow for a while", max_lag=max_lag)
    assert max(found.workers[:60]) <= 2
    assert max(found.workers[60:120]) >= 4
    assert found.workers[-1] <= 2
    assert found.step_s(100, 118) < 1.4, "one worker takes 4 s"


@pytest.mark.parametrize("max_lag", [1, 4])
def test_rewards_that_compute_gain_nothing_and_are_left_to_one_worker_for_longer_and_longer(max_lag: int) -> None:
    found = simulated("slow", max_lag=max_lag, compute=True).workers
    assert found[-1] == 1
    assert sum(count > 1 for count in found) < STEPS / 2
    raises = [step for step, (a, b) in enumerate(pairwise(found)) if b > a]
    waits = [b - a for a, b in pairwise(raises)]
    assert waits
    assert waits == sorted(waits)


def test_no_more_groups_are_tried_while_workers_may_be_what_is_missing() -> None:
    found = simulated("slow", max_lag=4)
    assert set(found.targets[: found.workers.index(max(found.workers))]) == {2 * BATCH}


# ── single decisions ───────────────────────────────────────────────────────────────────────────────────────────────────


def step(wait: float, to_score: int, train: float = 1.0) -> Observation:
    """So many groups are to be scored, all the time."""
    return Observation(wait, train, 0, [0.0] * to_score + [wait + train])


def after(controller: WorkerController, steps: int, observation: Observation) -> list[Decision]:
    """The decisions that changed something over so many equal steps."""
    decisions = [controller.observe(observation) for _ in range(steps)]
    return [decision for decision in decisions if decision.is_change]


def test_it_begins_with_one() -> None:
    assert WorkerController(8).count == 1


def test_there_are_as_many_as_scoring_needs_and_some_more_and_the_reason_says_why() -> None:
    """One is busy for 3 s that a step of 1 s could do with: three, and half as many again."""
    why = "the trainer waited for 67% of the time, and groups for a worker for 100%"
    assert after(WorkerController(8), WINDOW // 2, step(2.0, 5)) == [Decision(1, 5, why)]
    assert after(WorkerController(4), WINDOW // 2, step(2.0, 5)) == [Decision(1, 4, why)]


def test_a_trainer_that_waits_for_something_else_is_no_reason() -> None:
    assert not after(WorkerController(8), 3 * WINDOW, step(2.0, 1))
    assert not after(WorkerController(8), 3 * WINDOW, step(2.0, 0))


def test_groups_that_wait_are_no_reason_while_the_trainer_does_not() -> None:
    assert not after(WorkerController(8), 3 * WINDOW, step(0.0, 5))


def test_a_raise_that_does_not_help_is_undone_and_not_tried_again_soon() -> None:
    controller = WorkerController(8)
    up, back = after(controller, WINDOW // 2 + SETTLING + 2 * WINDOW + PATIENCE - 1, step(2.0, 12))
    assert (up.new, back.new) == (5, 1)
    assert back.why == "4 more workers made steps no shorter"


def test_a_raise_after_a_vain_one_comes_sooner_if_the_trainer_waits_much_longer() -> None:
    controller = WorkerController(8)
    after(controller, WINDOW // 2 + SETTLING + 2 * WINDOW, step(1.0, 12))
    assert controller.count == 1
    assert after(controller, WINDOW, step(3.0, 12))[0].new == 6


def test_workers_without_work_become_fewer_slowly() -> None:
    controller = WorkerController(8)
    after(controller, WINDOW // 2, step(2.0, 5))
    assert not after(controller, SETTLING + 2 * WINDOW - 1, step(0.0, 2, train=0.9))
    assert after(controller, 1, step(0.0, 2, train=0.9)) == [Decision(5, 2, "for 99% of the time there was work for 2 at most")]


def test_workers_that_turned_out_to_be_of_no_use_are_not_tried_again_soon() -> None:
    controller = WorkerController(8)
    after(controller, WINDOW // 2, step(2.0, 5))
    after(controller, SETTLING + 2 * WINDOW, step(0.0, 1, train=0.9))
    assert controller.count == 1
    assert not after(controller, WINDOW, step(0.1, 5))


def test_who_may_have_no_more_says_so_once() -> None:
    controller = WorkerController(1)
    decisions = [controller.observe(step(2.0, 5)) for _ in range(10 * WINDOW)]
    assert not any(decision.is_change for decision in decisions)
    [news] = [decision for decision in decisions if decision.is_news]
    assert news.why.endswith("groups for a worker for 100%; rollouts.max_reward_workers allows no more than 1")


def test_one_of_the_two_moves_at_a_time() -> None:
    groups, workers, rng = Controller(8, 40), WorkerController(8), Random(0)
    both = Controllers(groups, workers)
    for _ in range(2000):
        was_trying = groups.is_trying, workers.is_trying
        one, other = both.observe(step(rng.choice([0.0, rng.random()]), rng.randrange(12)))
        assert (one.new, other.new) == (groups.target, workers.count)
        assert not (one.is_change and (other.is_change or was_trying[1]))
        assert not (other.is_change and was_trying[0])
        assert 1 <= workers.count <= 8


def test_without_workers_groups_are_decided_on_as_ever() -> None:
    alone, both = Controller(8, 40), Controllers(Controller(8, 40), WorkerController(1))
    rng = Random(1)
    for _ in range(500):
        observation = Observation(rng.choice([0.0, rng.random()]), 1.0, rng.randrange(6))
        assert both.observe(observation)[0] == alone.observe(observation)


def test_steps_that_take_no_time_at_all_are_no_reason_to_stumble() -> None:
    assert not after(WorkerController(8), 3 * WINDOW, Observation(0.0, 0.0, 0))
