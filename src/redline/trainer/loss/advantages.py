"""From one number per attempt to one advantage per trained token, over a whole batch.

Group estimators are done when the batch arrives: every token gets its attempt's advantage. The others start from the attempt's
outcome (its reward, or its reward less the group's mean) and need what only the trainer has: all tokens of the batch, the
reference's logprobs, a critic's values. M trained tokens of the whole batch, laid end to end; S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.config.sections.rollouts import AdvantageEstimator

_EPS = 1e-6
"""Keeps nearly equal advantages from being blown up to full size by the division."""


@dataclass(slots=True, frozen=True)
class TokenAdvantages:
    advantages_M: Tensor
    """float32."""
    returns_M: Tensor | None = None
    """float32: what the critic should have said, with `gae`."""


def token_advantages(
    outcomes_S: Tensor,
    sequence_M: Tensor,
    estimator: AdvantageEstimator,
    *,
    penalties_M: Tensor | None = None,
    values_M: Tensor | None = None,
    gamma: float = 1.0,
    lambda_: float = 1.0,
) -> TokenAdvantages:
    """Advantages of a batch from `TrainBatch.advantages` (`outcomes_S`).

    `penalties_M` is kl_coef · KL_t, where the KL is part of the reward; `values_M` the critic's, for `gae`, which alone uses
    `gamma` and `lambda_`.
    """
    if estimator in ("group", "group_centred", "leave_one_out"):
        assert penalties_M is None, "group advantages are made before the KL is known"
        return TokenAdvantages(outcomes_S[sequence_M])
    if estimator in ("batch", "batch_baseline"):
        return TokenAdvantages(batch_advantages(outcomes_S, sequence_M, penalties_M))
    if estimator == "gae":
        assert values_M is not None, "gae without a critic's values"
        rewards_M = token_rewards(outcomes_S, sequence_M, penalties_M)
        return generalized_advantages(rewards_M, values_M, sequence_M, gamma, lambda_)
    raise AssertionError(estimator)


def batch_advantages(outcomes_S: Tensor, sequence_M: Tensor, penalties_M: Tensor | None = None) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, eq. 8 to 10), normalised over all tokens of the batch:

        A_t = r - Σ_{u ≥ t} β KL_u,     Â_t = (A_t - mean(A)) / (std(A) + eps)

    Its variant with a baseline is the same on r less the mean of the group, which is then what `outcomes_S` holds.
    """
    advantages_M = outcomes_S[sequence_M]
    if penalties_M is not None:
        advantages_M = advantages_M - discounted_sums(penalties_M, sequence_M, 1.0)
    return normalized(advantages_M)


def generalized_advantages(
    rewards_M: Tensor, values_M: Tensor, sequence_M: Tensor, gamma: float, lambda_: float
) -> TokenAdvantages:
    """GAE (Schulman et al. 2016, arXiv:1506.02438, eq. 16), the tokens of an attempt as its time steps:

        δ_t = r_t + γ V_{t+1} - V_t,    A_t = Σ_{k ≥ 0} (γλ)^k δ_{t+k},    R_t = A_t + V_t

    with V = 0 after the last token. R is the critic's target; the policy gets A normalised over the batch, as PPO does.
    """
    next_values_M = torch.where(_is_last(sequence_M), 0.0, values_M.roll(-1))
    deltas_M = rewards_M + gamma * next_values_M - values_M
    advantages_M = discounted_sums(deltas_M, sequence_M, gamma * lambda_)
    return TokenAdvantages(normalized(advantages_M), advantages_M + values_M)


def token_rewards(outcomes_S: Tensor, sequence_M: Tensor, penalties_M: Tensor | None = None) -> Tensor:
    """float32[M]: r_t = 1[t is the last of its sequence] · outcome - penalty_t."""
    rewards_M = torch.where(_is_last(sequence_M), outcomes_S[sequence_M], 0.0)
    return rewards_M if penalties_M is None else rewards_M - penalties_M


def normalized(advantages_M: Tensor) -> Tensor:
    """(A - mean) / (std + eps) over all tokens, dividing by M; exactly zero where all are equal."""
    if len(advantages_M) == 0 or bool((advantages_M == advantages_M[0]).all()):
        return torch.zeros_like(advantages_M)
    exact_M = advantages_M.double()
    centred_M = exact_M - exact_M.mean()
    return (centred_M / (centred_M.square().mean().sqrt() + _EPS)).to(advantages_M.dtype)


def discounted_sums(values_M: Tensor, sequence_M: Tensor, discount: float) -> Tensor:
    """Σ_{k ≥ 0} discount^k · value_{t+k} within t's sequence, all tokens at once.

    After a pass with distance d every token holds the sum of 2d terms, so that log2(longest sequence) passes do it:
    sum_t ← sum_t + discount^d · sum_{t+d}, for d = 1, 2, 4, …
    """
    sums_M = values_M.clone()
    distance = 1
    while distance < len(sums_M):
        same_M = sequence_M[distance:] == sequence_M[:-distance]
        if not bool(same_M.any()):
            break
        # The right-hand side is complete before anything is written: every sum is that of the pass before.
        sums_M[:-distance] += torch.where(same_M, discount**distance * sums_M[distance:], 0.0)
        distance *= 2
    return sums_M


def _is_last(sequence_M: Tensor) -> Tensor:
    """bool[M]: the token is the last of its sequence."""
    last_M = torch.ones_like(sequence_M, dtype=torch.bool)
    last_M[:-1] = sequence_M[1:] != sequence_M[:-1]
    return last_M
