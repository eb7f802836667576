"""Causes of lost time that logs of others can show: functions of the figures, as the doctor's own rules are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.lab.doctor.facts import Facts, Parts, Pool, Side
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding

NO_PHASES = "the log does not say what the time of a step went to"


@dataclass(slots=True, frozen=True)
class LostTime:
    """Time under one metric that a change would spare."""

    metric: str
    side: Side
    pool: Pool
    title: str
    why: str
    parts: Parts
    """What of it is spared."""
    assumption: str


_LOST = {
    "slow_reward": LostTime(
        "timeline/reward_s",
        "rollouts",
        "rewards",
        "Rewards hold up the run.",
        "Everything else waits while the reward of attempts is computed.",
        Parts(0.2, 0.6, 0.95),
        "rewards of several attempts can be computed at once",
    ),
    "sync_stall": LostTime(
        "timeline/weight_sync_s",
        "trainer",
        "weights",
        "New weights take long to reach the engine.",
        "Engine and trainer stand still meanwhile.",
        Parts(0.2, 0.6, 0.95),
        "a faster way exists between these places",
    ),
    "double_forward": LostTime(
        "trainer/recompute_s",
        "trainer",
        "training",
        "Logprobs of the sampled tokens are computed again.",
        "The engine knew them when it sampled; a forward pass over all tokens repeats them.",
        Parts(0.5, 0.9, 1.0),
        "engine and trainer agree on logprobs",
    ),
    "io_bound": LostTime(
        "timeline/checkpoint_s",
        "trainer",
        "step",
        "Checkpoints hold up the run.",
        "The loop goes on when a checkpoint is written.",
        Parts(0.3, 0.5, 0.9),
        "half as many checkpoints are enough",
    ),
    "frequent_evaluation": LostTime(
        "timeline/evaluation_s",
        "trainer",
        "step",
        "Evaluations hold up the run.",
        "The loop goes on when the held-out tasks are done.",
        Parts(0.3, 0.5, 0.9),
        "half as many evaluations are enough",
    ),
    "staleness_waits": LostTime(
        "timeline_rollouts/wait_for_budget_s",
        "rollouts",
        "generation",
        "Trainer and rollouts wait for each other.",
        "Rollouts stop when they are too far ahead of the trainer.",
        Parts(0.2, 0.6, 1.0),
        "older attempts may be trained on",
    ),
}


def slow_reward(facts: Facts) -> Answer:
    """Everything waits while rewards are computed."""
    return _lost(facts, "slow_reward")


def sync_stall(facts: Facts) -> Answer:
    """New weights take long to reach the engine."""
    return _lost(facts, "sync_stall")


def double_forward(facts: Facts) -> Answer:
    """Logprobs are computed again that the engine has."""
    return _lost(facts, "double_forward")


def io_bound(facts: Facts) -> Answer:
    """Checkpoints are written while everything waits."""
    return _lost(facts, "io_bound")


def frequent_evaluation(facts: Facts) -> Answer:
    """Held-out tasks are evaluated while everything waits."""
    return _lost(facts, "frequent_evaluation")


def staleness_waits(facts: Facts) -> Answer:
    """Rollouts wait for the trainer, and the trainer for rollouts."""
    if facts.is_lockstep:
        return None
    return _lost(facts, "staleness_waits", np.minimum(facts.phase("wait_for_budget", "rollouts"), facts.trainer_waits))


def long_tail(facts: Facts) -> Answer:
    """A few long attempts keep the engine at work with most of its rows empty."""
    mean, most = facts.mean("rollouts/completion_tokens_mean"), facts.mean("rollouts/completion_tokens_max")
    if not mean or most is None:
        return Abstention("long_tail", "the log does not say how long the longest answers are")
    if most < 2 * mean:
        return None
    lost = _generation(facts)
    if lost is None:
        return Abstention("long_tail", NO_PHASES)
    empty = 1 - mean / most
    return Finding(
        cause="long_tail",
        title=f"The longest answer of a step is {most / mean:.1f} times the usual one.",
        why="While the last of them are decoded, most rows of the engine are empty.",
        evidence=(
            facts.evidence("rollouts/completion_tokens_mean", "tokens of an answer"),
            facts.evidence("rollouts/completion_tokens_max", "tokens of the longest of a step"),
            Evidence("generation", float(lost.mean()), "seconds a step"),
        ),
        gain=facts.saved(
            "rollouts",
            lost * empty,
            "generation",
            Parts(0.05, 0.4, 0.9),
            "the engine decodes all answers of a step at once",
        ),
        change={},
    )


def no_signal(facts: Facts) -> Answer:
    """Groups are sampled of which all attempts score alike: nothing is learned from them."""
    return _for_nothing(facts, "no_signal", "rollouts/no_signal_fraction", "of the groups have attempts that all score alike")


def failed_attempts(facts: Facts) -> Answer:
    """Attempts fail after they were sampled."""
    return _for_nothing(facts, "failed_attempts", "rollouts/failed_fraction", "of the attempts fail")


def imbalance(facts: Facts) -> Answer:
    """One rank has more tokens than the others, which wait for it."""
    uneven, training = facts.steps.get("trainer/imbalance"), facts.steps.get("timeline/training_s")
    if uneven is None or training is None:
        return Abstention("imbalance", "the log does not say how tokens were divided among ranks")
    part = np.nan_to_num(1 - 1 / np.maximum(1.0, np.nan_to_num(uneven, nan=1.0)))
    return Finding(
        cause="imbalance",
        title=f"The rank with most tokens has {np.nanmean(uneven):.2f} times the mean.",
        why="A step ends when that rank has done its part.",
        evidence=(
            facts.evidence("trainer/imbalance", "tokens of the fullest rank over the mean"),
            facts.evidence("timeline/training_s", "seconds a step"),
        ),
        gain=facts.saved(
            "trainer", np.nan_to_num(training) * part, "training", Parts(0.2, 0.6, 0.9), "the tokens can be divided evenly"
        ),
        change={},
    )


def _lost(facts: Facts, cause: str, seconds: np.ndarray | None = None) -> Answer:
    """Say what the time under one metric costs; an abstention where the log has no such time."""
    of = _LOST[cause]
    values = facts.steps.get(of.metric)
    if values is None:
        return Abstention(cause, f"the log has no {of.metric}")
    gain = facts.saved(of.side, np.nan_to_num(values) if seconds is None else seconds, of.pool, of.parts, of.assumption)
    return Finding(cause, of.title, of.why, (facts.evidence(of.metric, "seconds a step"),), gain, {})


def _for_nothing(facts: Facts, cause: str, metric: str, says: str) -> Answer:
    """Say what sampling costs that nothing is learned from."""
    share = facts.steps.get(metric)
    if share is None:
        return Abstention(cause, f"the log has no {metric}")
    generation = _generation(facts)
    if generation is None:
        return Abstention(cause, NO_PHASES)
    mean = facts.mean(metric) or 0.0
    return Finding(
        cause=cause,
        title=f"{mean:.0%} {says}.",
        why="Their sampling teaches nothing.",
        evidence=(
            facts.evidence(metric, "share, mean of the steps"),
            Evidence("generation", float(generation.mean()), "seconds a step"),
        ),
        gain=facts.saved(
            "rollouts",
            generation * np.nan_to_num(share),
            "generation",
            Parts(0.1, 0.5, 1.0),
            "others can be sampled in their place",
        ),
        change={},
    )


def _generation(facts: Facts) -> np.ndarray | None:
    """Seconds of sampling in each steady step; None where the log has none."""
    has = any(name.endswith("/generation_s") for name in facts.steps)
    return facts.phase("generation", "rollouts") if has else None
