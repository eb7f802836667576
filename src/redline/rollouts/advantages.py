"""How much better than its group each attempt was."""

from __future__ import annotations

import numpy as np

_EPS = 1e-6
"""Keeps nearly equal rewards from being blown up into full-size advantages by the division."""


def group_advantages(rewards: np.ndarray, failed: np.ndarray, normalize: bool) -> np.ndarray:
    """float32[G] from rewards float32[G] and failed bool[G].

    GRPO (DeepSeekMath, arXiv:2402.03300, §4.1.2), the group as its own baseline:

        A_i = (r_i - mean(r)) / (std(r) + eps)

    with the standard deviation of the group itself (divided by G, not G - 1). Without `normalize`, A_i = r_i - mean(r)
    (Dr. GRPO, arXiv:2503.20783). A failed attempt says nothing about the policy: it enters neither the mean nor the
    deviation, and its advantage is 0.
    """
    assert rewards.shape == failed.shape == (len(rewards),), (rewards.shape, failed.shape)
    advantages = np.zeros(len(rewards), dtype=np.float32)
    valid = rewards[~failed].astype(np.float64)
    # Equal rewards are tested for rather than left to the arithmetic: the mean of eight 0.1s is not quite 0.1, and a
    # group without signal must give exactly zero to be left out of the batch.
    if len(valid) < 2 or np.all(valid == valid[0]):
        return advantages
    centred = valid - valid.mean()
    advantages[~failed] = centred / (valid.std() + _EPS) if normalize else centred
    return advantages
