from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from redline.errors import CompareError, ConfigError
from redline.lab.evidence.diagnosis import diagnose
from redline.lab.evidence.experiment import Experiment, Metric, Pair, Phase, Round, Wish, run
from redline.lab.evidence.guards import KL, MEMORY, REWARD, TOLERANCES, check, read_tolerances
from redline.lab.evidence.sample_size import MIN_PAIRS, noise, pairs_needed
from redline.lab.evidence.verdict import Verdict, judge

STEP = Metric("step_s")


@dataclass
class NoisyMachine:
    """Slows down as it goes, is disturbed by other people's work in bursts, and runs no two processes alike."""

    random: np.random.Generator
    effect: float = 0.0
    """B takes this share longer than A."""
    spread: float = 0.05
    """Of a round, as a logarithm; Student's t with two degrees of freedom, which has no variance."""
    process: float = 0.01
    """What a process is faster or slower by than the next, for its whole life."""
    drift: float = 0.002
    """What the machine slows down by from one measurement to the next."""
    bursts: float = 0.05
    """How often a measurement takes a multiple."""
    first_pays: float = 0.0
    """What whoever runs first takes longer."""
    rounds: int = 4
    _measured: int = field(default=0, init=False)

    def measure(self, phase: Phase, number: int) -> Pair:
        own = self.random.normal(0, self.process, 2)
        own[1] += math.log1p(self.effect) if phase == "A/B" else 0.0
        logs = own + self.spread * self.random.standard_t(2, (self.rounds, 2))
        logs += np.where(self.random.random((self.rounds, 2)) < self.bursts, self.random.pareto(1.5, (self.rounds, 2)), 0)
        a_first = self.random.random(self.rounds) < 0.5
        place = np.where(a_first[:, None], [0, 1], [1, 0])
        time = self._measured + 2 * np.arange(self.rounds)[:, None] + place
        logs += self.drift * time + self.first_pays * (place == 0)
        self._measured += 2 * self.rounds
        seconds = np.exp(np.clip(logs, -50, 50))
        return Pair(
            [
                Round({STEP.name: a}, {STEP.name: b}, bool(first))
                for (a, b), first in zip(seconds.tolist(), a_first, strict=True)
            ]
        )

    def experiment(self, effect: float = 0.05, max_pairs: int = 400) -> Experiment:
        """Asked for `effect`, with as many pairs as it takes."""
        return run(STEP, Wish(effect=effect, max_pairs=max_pairs), self.measure, clock=lambda: 0.0)


def verdicts(trials: int, **machine: Any) -> list[Verdict]:
    """Of whole experiments, each on a machine of its own: the tool chooses how many pairs it takes."""
    seeds = np.random.SeedSequence(11).spawn(trials)
    return [judge(NoisyMachine(np.random.default_rng(seed), **machine).experiment(), {}) for seed in seeds]


def share(found: list[Verdict], *kinds: str) -> float:
    return sum(verdict.kind in kinds for verdict in found) / len(found)


# ── by simulation ──────────────────────────────────────────────────────────────────────────────────────────────────────

NOISES = [{"spread": 0.01}, {"spread": 0.04, "process": 0.03}, {"spread": 0.1, "bursts": 0.1, "drift": 0.01}]


@pytest.mark.parametrize("machine", NOISES[:2])
def test_a_side_against_itself_is_seldom_called_different(machine: dict[str, float]) -> None:
    found = verdicts(200, **machine)
    assert share(found, "faster", "slower") <= 0.06
    assert share(found, "no different") >= 0.8


@pytest.mark.parametrize("machine", NOISES[:2])
def test_five_percent_are_found_with_the_pairs_that_the_tool_asks_for(machine: dict[str, float]) -> None:
    found = verdicts(150, effect=0.05, **machine)
    assert share(found, "slower") >= 0.8
    assert share(found, "faster") == 0


@pytest.mark.slow
@pytest.mark.parametrize("machine", [*NOISES, {"spread": 0.02, "drift": 0.05}, {"spread": 0.02, "bursts": 0.2}])
def test_the_rates_hold_on_many_machines(machine: dict[str, float]) -> None:
    assert share(verdicts(1000, **machine), "faster", "slower") <= 0.06
    assert share(verdicts(250, effect=0.05, **machine), "slower") >= 0.8


def test_the_interval_covers_the_true_ratio_in_95_of_100_experiments() -> None:
    found = verdicts(300, effect=0.05, spread=0.03)
    covered = [v.comparison.interval[0] <= 1 / 1.05 <= v.comparison.interval[1] for v in found]
    assert sum(covered) / len(covered) >= 0.94


# ── how many pairs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_normal_noise_is_measured_as_its_standard_deviation() -> None:
    assert noise((0.07 * np.random.default_rng(0).normal(size=4000)).tolist()) == pytest.approx(0.07, rel=0.05)


def test_half_the_effect_takes_four_times_the_pairs_and_a_wild_value_hardly_more() -> None:
    logs = (0.1 * np.random.default_rng(1).normal(size=40)).tolist()
    assert pairs_needed(logs, 0.01) == pytest.approx(4 * pairs_needed(logs, 0.02), rel=0.05)
    assert pairs_needed([*logs[:-1], 50.0], 0.02) < 1.3 * pairs_needed(logs, 0.02)


def test_noise_that_is_not_known_asks_for_no_number() -> None:
    assert pairs_needed([0.1, -0.1], 0.03) == math.inf
    assert pairs_needed([], 0.03) == math.inf


def test_a_calm_machine_needs_the_fewest_pairs_and_a_large_effect_ends_a_long_plan_early() -> None:
    calm = NoisyMachine(np.random.default_rng(0), spread=0.001, process=0.001, bursts=0).experiment()
    assert len(calm.against_itself) == len(calm.pairs) == MIN_PAIRS
    large = NoisyMachine(np.random.default_rng(0), effect=0.5, spread=0.1).experiment(effect=0.01)
    assert large.pairs_wanted > 4 * len(large.pairs)
    assert judge(large, {}).kind == "slower"


def test_when_the_time_is_up_nothing_more_is_measured() -> None:
    times = iter(range(100))
    found = run(STEP, Wish(max_seconds=10.5), NoisyMachine(np.random.default_rng(0)).measure, lambda: next(times))
    assert found.out_of_time
    assert len(found.against_itself) + len(found.pairs) == 10
    verdict = judge(found, {})
    assert (verdict.kind, verdict.exit_code) == ("abstained", 2)


# ── verdicts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def pair(a: float, b: float, a_first: bool = True, **more: float) -> Pair:
    return Pair([Round({STEP.name: a}, {STEP.name: b}, a_first)], **more)


def experiment(ratios: list[float], wish: Wish = Wish(), itself: list[float] | None = None) -> Experiment:  # noqa: B008
    """`ratios`: B's seconds over A's. Who is first alternates."""
    calm = itself or [1.001, 0.999, 1.002, 0.998, 1.0, 1.001, 0.997, 1.003]
    return Experiment(
        STEP,
        wish,
        [pair(1, ratio, bool(i % 2)) for i, ratio in enumerate(calm)],
        [pair(1, ratio, bool(i // 2 % 2)) for i, ratio in enumerate(ratios)],
    )


JITTER = [1.004, 0.997, 1.001, 0.995, 1.003, 0.999, 1.005, 0.996, 1.002, 0.998, 1.0005, 0.9985]


def test_the_sentence_is_one_a_person_would_write() -> None:
    faster = judge(experiment([ratio / 1.31 for ratio in JITTER]), {})
    assert faster.sentence == "B is 1.31× faster, 95% interval 1.31–1.31, 12 pairs"
    slower = judge(experiment([1.031 * ratio for ratio in JITTER]), {})
    assert slower.sentence.startswith("B is 1.031× slower, 95% interval 1.02")
    same = judge(experiment(JITTER), {})
    assert same.sentence.startswith("no difference of 3%: ratio 1.000, 95% interval 0.99")
    assert [verdict.exit_code for verdict in (faster, slower, same)] == [0, 1, 0]


def test_a_metric_that_is_no_speed_is_better_or_worse() -> None:
    logs = experiment([ratio / 1.31 for ratio in JITTER])
    logs.metric = replace(STEP, unit="bytes")
    assert judge(logs, {}).sentence.startswith("B is 1.31× better")


def test_what_is_slower_within_the_tolerance_passes() -> None:
    slower = [1.031 * ratio for ratio in JITTER]
    assert judge(experiment(slower, Wish(tolerance=0.05)), {}).exit_code == 0
    assert judge(experiment(slower, Wish(tolerance=0.02)), {}).exit_code == 1


def test_larger_can_be_better() -> None:
    per_s = Metric("tokens_per_s", larger_is_better=True)
    twice = Round({"tokens_per_s": 100.0}, {"tokens_per_s": 200.0}, True)
    assert per_s.log_ratio(twice) == pytest.approx(math.log(2))
    with pytest.raises(CompareError, match="no ratio"):
        per_s.log_ratio(Round({"tokens_per_s": 100.0}, {"tokens_per_s": 0.0}, True))


# ── abstaining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def reasons(found: Experiment) -> str:
    verdict = judge(found, {})
    assert (verdict.kind, verdict.exit_code) == ("abstained", 2)
    assert verdict.sentence.startswith("no verdict: ")
    return "; ".join(verdict.reasons)


def test_seven_pairs_are_too_few() -> None:
    assert "7 pairs are too few" in reasons(experiment([1.5] * 7))


def test_noise_that_hides_the_effect_is_said_with_the_pairs_it_would_take() -> None:
    wild = [1.3, 0.8, 1.1, 0.7, 1.4, 0.9, 1.2, 0.75]
    assert "8 pairs are too few to tell a difference of 3%" in reasons(experiment(wild, Wish(max_pairs=8)))
    assert "--max-pairs is 8" in reasons(experiment(wild, Wish(max_pairs=8)))


def test_a_ratio_that_drifts_is_no_ratio() -> None:
    assert "drift" in reasons(experiment([1.0 + 0.01 * i for i in range(12)]))


def test_drift_of_the_machine_alone_changes_nothing() -> None:
    """It hits both sides of a pair."""
    slowing = [pair(1.1**i, 1.1**i * ratio, bool(i // 2 % 2)) for i, ratio in enumerate(JITTER)]
    found = experiment(JITTER)
    found.pairs = slowing
    assert judge(found, {}).kind == "no different"


def test_an_order_effect_is_found_between_pairs_and_within_them() -> None:
    between = [ratio * (1.05 if i // 2 % 2 else 0.95) for i, ratio in enumerate(JITTER)]
    assert "order effect" in reasons(experiment(between))
    machine = NoisyMachine(np.random.default_rng(3), spread=0.005, bursts=0, drift=0, first_pays=0.2, rounds=8)
    assert "order effect" in " ".join(suspicion.what for suspicion in diagnose(machine.experiment()))


@pytest.mark.parametrize(("effect", "kind"), [(0.03, "slower"), (0.0, "no different")])
def test_an_order_effect_within_pairs_cancels(effect: float, kind: str) -> None:
    machine = NoisyMachine(
        np.random.default_rng(5), effect=effect, spread=0.004, process=0.004, bursts=0, drift=0, first_pays=0.06, rounds=30
    )
    found = machine.experiment()
    assert "order effect" in " ".join(suspicion.what for suspicion in diagnose(found))
    verdict = judge(found, {})
    assert verdict.kind == kind, verdict.sentence


def test_an_order_effect_too_small_to_matter_is_not_a_reason() -> None:
    found = experiment([2 * ratio * (1.05 if i // 2 % 2 else 0.95) for i, ratio in enumerate(JITTER)])
    assert "order effect" in diagnose(found)[0].what
    assert judge(found, {}).kind == "slower"


def test_a_harness_that_prefers_a_side_is_found_by_A_against_itself() -> None:
    found = experiment([1.05 * ratio for ratio in JITTER], itself=[1.05 * ratio for ratio in JITTER[:8]])
    assert "A differs from itself by 4.9%" in reasons(found)


def test_a_ratio_that_moves_within_the_pairs_is_not_steady() -> None:
    rounds = [Round({STEP.name: 1.0}, {STEP.name: 1.0 + (0.1 if i >= 4 else 0.0)}, bool(i % 2)) for i in range(8)]
    found = experiment(JITTER)
    found.pairs = [Pair(rounds)] * 12
    assert "no steady state" in reasons(found)


# ── guards ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def guarded(b_bytes: float = 1e9, reward: float = 0.5, kl: float = 1e-3, count: int = 8) -> list[Pair]:
    """A has 1 GB, reward 0.5 and KL 1e-3, up to a jitter that both sides share only in part."""
    pairs = []
    for number in range(count):
        wobble = JITTER[number % 12]
        a = {STEP.name: 1.0, "rollouts/reward_mean": 0.5 * wobble, "trainer/mismatch_kl": 1e-3 * wobble}
        b = {STEP.name: wobble, "rollouts/reward_mean": reward, "trainer/mismatch_kl": kl}
        pairs.append(Pair([Round(a, b, bool(number % 2))], (1e9 * wobble, b_bytes)))
    return pairs


def states(pairs: list[Pair]) -> dict[str, str]:
    return {guard.name: guard.state for guard in check(pairs, TOLERANCES)}


def test_guards_hold_where_nothing_changed() -> None:
    assert states(guarded()) == {MEMORY: "holds", REWARD: "holds", KL: "holds"}
    assert [guard.words for guard in check(guarded(), TOLERANCES)] == [
        "no change in memory",
        "no change in reward",
        "no change in KL",
    ]


def test_a_guard_is_checked_on_its_bad_side_alone() -> None:
    assert states(guarded(b_bytes=0.5e9, reward=0.9, kl=1e-5)) == {MEMORY: "holds", REWARD: "holds", KL: "holds"}
    assert states(guarded(b_bytes=1.2e9)) == {MEMORY: "broken", REWARD: "holds", KL: "holds"}
    assert states(guarded(reward=0.3))[REWARD] == "broken"
    assert states(guarded(kl=5e-3))[KL] == "broken"


def test_a_mismatch_of_rounding_may_double() -> None:
    pairs = [Pair([Round({"trainer/mismatch_kl": 1e-7}, {"trainer/mismatch_kl": 5e-6}, True)])] * 8
    assert states(pairs) == {KL: "holds"}


def test_a_change_within_the_tolerance_is_said() -> None:
    found = experiment(JITTER[:8])
    found.pairs = guarded(b_bytes=1.03e9)
    assert judge(found, {MEMORY: 0.05}).sentence.endswith("8 pairs; memory +3%")
    assert judge(found, {MEMORY: 0.05}).exit_code == 0
    assert judge(found, {MEMORY: 0.01}).sentence.endswith("; memory +3%, beyond +1%")
    assert judge(found, {MEMORY: 0.01}).exit_code == 1


def test_four_pairs_leave_a_guard_unclear() -> None:
    assert states(guarded(count=4)) == {MEMORY: "unclear", REWARD: "unclear", KL: "unclear"}


def test_tolerances_are_read_by_name() -> None:
    assert read_tolerances(["Memory=0.1", "kl=2"]) == {MEMORY: 0.1, REWARD: 0.05, KL: 2.0}
    for wrong in ("speed=1", "memory", "memory=-1", "memory=nan"):
        with pytest.raises(ConfigError, match="NAME=TOLERANCE"):
            read_tolerances([wrong])
