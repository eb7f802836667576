"""How much better than its group each attempt was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redline.config.sections.rollouts import AdvantageEstimator
from redline.types import Trajectory

_EPS = 1e-6
"""Keeps nearly equal rewards from being blown up into full-size advantages by the division."""


def group_advantages(
    rewards: np.ndarray, failed: np.ndarray, estimator: AdvantageEstimator, scores: np.ndarray | None = None
) -> np.ndarray:
    """float32[G] from rewards float32[G] and failed bool[G], with the group as its own baseline:

        group           (r_i - mean(r)) / (std(r) + eps)   GRPO (DeepSeekMath, arXiv:2402.03300, §4.1.2)
        group_centred   r_i - mean(r)                      Dr. GRPO (arXiv:2503.20783, §3.2)
        leave_one_out   r_i - 1/(G-1) Σ_{j≠i} r_j          RLOO (Ahmadian et al. 2024, arXiv:2402.14740)

    The standard deviation is that of the group itself (divided by G, not G - 1). The estimators that the trainer completes
    start from r_i - mean(r) (`batch_baseline`) or from r_i (`batch`, `gae`). A failed attempt says nothing about the policy: it
    enters no mean, and its advantage is 0.

    `scores`, float32[G], are the rewards before the penalty for length, where there is one. Where they are all equal, the group
    has no signal and gets zeros, as in DAPO (arXiv:2503.14476, §3.2): else the standard deviation of a few tokens' penalty
    would blow it up into advantages of full size.
    """
    assert rewards.shape == failed.shape == (len(rewards),), (rewards.shape, failed.shape)
    scores = rewards if scores is None else scores
    advantages = np.zeros(len(rewards), dtype=np.float32)
    advantages[~failed] = _compared(rewards[~failed].astype(np.float64), scores[~failed], estimator)
    return advantages


def advantages_of_sequences(
    trajectories: Sequence[Trajectory], scores: Sequence[float], estimator: AdvantageEstimator
) -> np.ndarray:
    """float32[S]: the advantage of each sequence of a group, which is that of its attempt and role. An attempt is compared
    with the others in the same role, and counts once however many sequences it has. `scores` are the rewards before the
    penalty for length."""
    if all(t.attempt is None and not t.role for t in trajectories):  # as in every run of single replies
        rewards = np.array([t.reward for t in trajectories], dtype=np.float32)
        failed = np.array([t.failure is not None for t in trajectories])
        return group_advantages(rewards, failed, estimator, np.array(scores, dtype=np.float32))
    advantages = np.zeros(len(trajectories), dtype=np.float32)
    for attempts in places_of_attempts(trajectories).values():
        firsts = [places[0] for places in attempts]
        rewards = np.array([trajectories[place].reward for place in firsts], dtype=np.float32)
        failed = np.array([trajectories[place].failure is not None for place in firsts])
        unpunished = np.array([scores[place] for place in firsts], dtype=np.float32)
        for places, advantage in zip(attempts, group_advantages(rewards, failed, estimator, unpunished), strict=True):
            advantages[places] = advantage
    return advantages


def places_of_attempts(trajectories: Sequence[Trajectory]) -> dict[str, list[list[int]]]:
    """Role → the places of the sequences of each of its attempts."""
    found: dict[str, dict[tuple[int | None, int], list[int]]] = {}
    for place, trajectory in enumerate(trajectories):
        alone = place if trajectory.attempt is None else -1
        found.setdefault(trajectory.role, {}).setdefault((trajectory.attempt, alone), []).append(place)
    return {role: list(attempts.values()) for role, attempts in found.items()}


def _compared(rewards: np.ndarray, scores: np.ndarray, estimator: AdvantageEstimator) -> np.ndarray:
    """float64: each reward beside the others."""
    if estimator in ("batch", "gae"):
        return rewards
    # Equal rewards are tested for rather than left to the arithmetic: the mean of eight 0.1s is not quite 0.1, and a
    # group without signal must give exactly zero to be left out of the batch.
    if len(rewards) < 2 or np.all(scores == scores[0]) or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards))
    centred: np.ndarray = rewards - rewards.mean()
    if estimator == "group":
        return centred / (rewards.std() + _EPS)
    if estimator in ("group_centred", "batch_baseline"):
        return centred
    if estimator == "leave_one_out":
        return centred * (len(rewards) / (len(rewards) - 1))
    raise AssertionError(estimator)
