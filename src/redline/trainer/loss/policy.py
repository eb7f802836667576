"""Policy losses as pure functions of per-token numbers. M trained tokens, all tensors float32[M] but `sequence_M`.

Every loss is a sum, -Σ_t w_t · objective_t. The mean an algorithm takes over a batch arrives as the weights w, made once from
the whole batch (`aggregation_weights`), so that the losses of micro-batches, in whatever split, add up to the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redline.config.sections.trainer import Aggregation

MAX_LOG_RATIO = 20.0
"""Log ratios beyond ±20 count as ±20 and have no gradient. exp overflows float32 at 88, and the zero gradient of a clipped
token times an infinite ratio would be NaN."""


@dataclass(slots=True, frozen=True)
class PolicyLoss:
    loss: Tensor
    """Scalar, to be minimised."""
    ratio_M: Tensor
    """π_new / π_old of each token (GSPO: of its sequence), detached."""
    clipped_M: Tensor
    """True where a clip bound: the token has no gradient or, under CISPO, a smaller one."""
    kl_M: Tensor | None = None
    """The estimate of each token's KL from the reference, detached, where the loss has a KL term."""
    correction_M: Tensor | None = None
    """The weight against train-inference mismatch of each token, 0 where it was dropped, where there is a correction."""


def clipped_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    weights_M: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), GRPO (Shao et al. 2024,
    arXiv:2402.03300, eq. 3) and DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 8: clip_high > clip_low):

        L = - Σ_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),
        r_t = π(o_t | q, o_<t) / π_old(o_t | q, o_<t)

    With `dual_clip` c (Ye et al. 2020, arXiv:1912.09729) the minimum is at least c A_t where A_t < 0: a bad token that
    became far likelier cannot outweigh the rest.
    """
    log_ratio_M = logprobs_M - old_logprobs_M
    ratio_M = _exp(log_ratio_M)
    free_M = ratio_M * advantages_M
    bounded_M = ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantages_M
    objective_M, binding_M = torch.minimum(free_M, bounded_M), bounded_M < free_M
    if dual_clip is not None:
        floor_M = torch.where(advantages_M < 0, dual_clip * advantages_M, -torch.inf)
        objective_M, binding_M = torch.maximum(objective_M, floor_M), binding_M | (floor_M > objective_M)
    binding_M = binding_M | (log_ratio_M.abs() > MAX_LOG_RATIO)
    return PolicyLoss(-(weights_M * objective_M).sum(), ratio_M.detach(), binding_M.detach())


def gspo_loss(
    logprobs_M: Tensor,
    old_logprobs_M: Tensor,
    advantages_M: Tensor,
    weights_M: Tensor,
    sequence_M: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071), one ratio per sequence, in the form of its eq. 13 and 14 (GSPO-token):

        L = - Σ_t w_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),
        s_t = sg[s] · π(o_t | q, o_<t) / sg[π(o_t | q, o_<t)],   s = exp(1/|o| Σ_t log π(o_t | ·) / π_old(o_t | ·))

    where sg stops the gradient. Value and gradient are those of eq. 5 where the tokens of a sequence share one advantage, and
    token-level advantages keep their meaning where they do not.
    """
    mean_log_ratio_M = sequence_means(logprobs_M.detach() - old_logprobs_M, sequence_M)
    sequence_logprobs_M = mean_log_ratio_M + (logprobs_M - logprobs_M.detach())
    return clipped_loss(sequence_logprobs_M, torch.zeros_like(old_logprobs_M), advantages_M, weights_M, clip_low, clip_high)


def cispo_loss(
    logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, weights_M: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5): the importance weight is clipped, the gradient is not.

        L = - Σ_t w_t sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log π(o_t | q, o_<t)

    where sg stops the gradient: no token is ever left out, rare ones that lead somewhere included. `clip_low` = 1 leaves the
    weight without a lower bound, as in the paper's runs.
    """
    ratio_M = _exp(logprobs_M.detach() - old_logprobs_M)
    bounded_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-(weights_M * bounded_M * advantages_M * logprobs_M).sum(), ratio_M, bounded_M != ratio_M)


def reinforce_loss(logprobs_M: Tensor, old_logprobs_M: Tensor, advantages_M: Tensor, weights_M: Tensor) -> PolicyLoss:
    """REINFORCE (Williams 1992), as RLOO uses it (Ahmadian et al. 2024, arXiv:2402.14740):

        L = - Σ_t w_t A_t log π(o_t | q, o_<t)

    Exact on-policy. For samples of another policy, the importance ratio is the correction of `mismatch.py`, multiplied into w.
    """
    ratio_M = _exp(logprobs_M.detach() - old_logprobs_M)
    return PolicyLoss(-(weights_M * advantages_M * logprobs_M).sum(), ratio_M, torch.zeros_like(ratio_M, dtype=torch.bool))


# ── means ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def aggregation_weights(
    lengths_S: Tensor, aggregation: Aggregation, num_sequences: int, num_tokens: int, max_new_tokens: int
) -> Tensor:
    """float32[S]: the weight w of every token of a sequence, from the trained tokens of each sequence, int64[S].

        sequence_mean   1 / (S |o_s|)   every attempt weighs the same (GRPO, arXiv:2402.03300, eq. 3)
        token_mean      1 / Σ_s |o_s|   every token weighs the same (DAPO, arXiv:2503.14476, eq. 8)
        constant        1 / (S L)       neither the attempt's length nor the others' matter; L is the most an attempt may
                                        have (Dr. GRPO, arXiv:2503.20783, §3.2)

    `num_sequences` and `num_tokens` count the whole batch, attempts that were left out for want of a gradient included.
    """
    lengths_S = lengths_S.to(torch.float32)
    if aggregation == "sequence_mean":
        return 1.0 / (num_sequences * lengths_S)
    if aggregation == "token_mean":
        return torch.full_like(lengths_S, 1.0 / max(1, num_tokens))
    if aggregation == "constant":
        return torch.full_like(lengths_S, 1.0 / max(1, num_sequences * max_new_tokens))
    raise AssertionError(aggregation)


def sequence_sums(values_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Each token's sum over its sequence. `sequence_M` numbers the sequences from 0; there are at most M of them, and room for
    M spares the device from being asked how many."""
    return torch.zeros_like(values_M).index_add(0, sequence_M, values_M)[sequence_M]


def sequence_means(values_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Each token's mean over its sequence."""
    return sequence_sums(values_M, sequence_M) / sequence_sums(torch.ones_like(values_M), sequence_M)


def _exp(log_ratio_M: Tensor) -> Tensor:
    return torch.exp(log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
