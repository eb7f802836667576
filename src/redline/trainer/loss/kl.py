"""Distance of the policy from a reference, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.config.sections.trainer import KlEstimator
from redline.trainer.loss.policy import MAX_LOG_RATIO


def kl_estimates(logprobs_M: Tensor, reference_logprobs_M: Tensor, estimator: KlEstimator) -> Tensor:
    """float32[M]: estimates of KL(π ‖ π_ref) from tokens that π sampled (Schulman 2020, "Approximating KL Divergence"), with
    x = log π_ref - log π:

        k1 = -x               unbiased; may be negative
        k2 = x² / 2           low variance; as a loss its gradient is that of the KL
        k3 = exp(x) - 1 - x   unbiased, never negative (GRPO, arXiv:2402.03300, eq. 4)

    k1 is for the reward: its gradient as a loss, ∇ log π, is zero on average. In k3, an x beyond 20 counts as 20 in both terms
    and has no gradient: a clamped exp(x) beside an x that is not would push the policy away from the reference.
    """
    log_ratio_M = reference_logprobs_M - logprobs_M
    if estimator == "k1":
        return -log_ratio_M
    if estimator == "k2":
        return log_ratio_M.square() / 2
    if estimator == "k3":
        log_ratio_M = log_ratio_M.clamp(max=MAX_LOG_RATIO)
        return torch.expm1(log_ratio_M) - log_ratio_M
    raise AssertionError(estimator)
