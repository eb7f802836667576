"""Policy losses as pure functions of per-token numbers. M trained tokens, all tensors float32[M]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class PolicyLoss:
    loss: Tensor
    """Scalar, to be minimised."""
    ratio_M: Tensor
    """π_new / π_old of each token, detached."""
    clipped_M: Tensor
    """True where clipping removed the token's gradient."""


def grpo_loss(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, weights_M: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3) without the KL term:

        L = - 1/S Σ_s 1/|o_s| Σ_t min(r_st A_s, clip(r_st, 1 - clip_low, 1 + clip_high) A_s),
        r_st = π(o_st | q, o_s<t) / π_old(o_st | q, o_s<t)

    The two means arrive as weights: `weights_M` holds 1 / (S |o_s|) for each token (`sequence_mean_weights`).
    """
    ratio_M = torch.exp(logprobs_M - old_logprobs_M)
    clipped_ratio_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    objective_M = torch.minimum(ratio_M * advantages_M, clipped_ratio_M * advantages_M)
    binding_M = (clipped_ratio_M * advantages_M) < (ratio_M * advantages_M)
    return PolicyLoss(-(weights_M * objective_M).sum(), ratio_M.detach(), binding_M.detach())


def sequence_mean_weights(lengths_S: Tensor, num_sequences: int) -> Tensor:
    """1 / (S |o_s|) per sequence: every attempt weighs the same, whatever its length."""
    return 1.0 / (num_sequences * lengths_S.to(torch.float32))
