"""Train-inference mismatch: the engine sampled with logprobs that are not quite the trainer's. Measured always, corrected on
request.

Other kernels, another precision or an older policy make the sampler's distribution another one, and the policy gradient is
biased. The importance ratio π_trainer / π_engine corrects for it; a bound on the ratio keeps its variance finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.config.sections.trainer import Mismatch
from redline.trainer.loss.policy import sequence_means, sequence_sums


def mismatch_weights(log_ratio_M: Tensor, sequence_M: Tensor, mismatch: Mismatch, low: float, high: float) -> Tensor:
    """float32[M], detached: the factor of each token's objective, from log π_trainer - log π_engine.

    token_*       ρ_t = π_trainer(o_t | ·) / π_engine(o_t | ·)
    sequence_*    ρ_t = Π_u ρ_u over the sequence: the exact ratio for a reward that comes at its end
    geometric_*   ρ_t = (Π_u ρ_u)^(1/|o|): the same length-normalised, as GSPO's own ratio is
    *_truncate    clip(ρ_t, low, high)              truncated importance sampling (Yao et al. 2025, "Your Efficient RL
                                                    Framework Secretly Brings You Off-Policy RL Training", with low = 0)
    *_mask        ρ_t where low ≤ ρ_t ≤ high, else 0    what is too far off says nothing (IcePop, arXiv:2510.18855)
    """
    assert mismatch != "none"
    level, _, bound = mismatch.partition("_")
    log_ratio_M = log_ratio_M.detach()
    if level == "sequence":
        log_ratio_M = sequence_sums(log_ratio_M, sequence_M)
    elif level == "geometric":
        log_ratio_M = sequence_means(log_ratio_M, sequence_M)
    # An overflow to infinity is right here: it is bounded or dropped like every other ratio that is too large.
    ratio_M = torch.exp(log_ratio_M)
    if bound == "truncate":
        return ratio_M.clamp(low, high)
    if bound == "mask":
        return torch.where((ratio_M >= low) & (ratio_M <= high), ratio_M, 0.0)
    raise AssertionError(mismatch)


def mismatch_kl(log_ratio_M: Tensor) -> Tensor:
    """float64[M]: k3 estimates of KL(π_engine ‖ π_trainer), r - 1 - log r with r = π_trainer / π_engine, in float64 because
    r - 1 of a well-made engine is less than float32 resolves. The largest r is exp of the largest log ratio."""
    log_ratio_M = log_ratio_M.double()
    return torch.expm1(log_ratio_M) - log_ratio_M
