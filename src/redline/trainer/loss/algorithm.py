"""The loss of a micro-batch as the recipe wants it: surrogate × mismatch correction + KL - entropy.

                     mismatch: none                        mismatch: anything else
    π_old is         the engine's policy; with             the anchor
                     recompute_old_logprobs the anchor
    w is multiplied  not at all                            by the bounded ratio of the anchor to the engine's policy

The anchor is the policy at the beginning of the step. Where a step has several updates, a pass before the first gives its
logprobs. Where it has one, π itself is the anchor: the current logprobs without their gradient, and no pass is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redline.config.sections.trainer import TrainerConfig
from redline.trainer.loss.kl import kl_estimates
from redline.trainer.loss.mismatch import mismatch_weights
from redline.trainer.loss.policy import PolicyLoss, cispo_loss, clipped_loss, gspo_loss, reinforce_loss


@dataclass(slots=True, frozen=True)
class LossInputs:
    """The M trained tokens of one micro-batch, whole sequences; float32[M] unless it says otherwise."""

    logprobs_M: Tensor
    """Logprobs under the policy that is trained, with gradient."""
    old_logprobs_M: Tensor
    """The engine's, of the distribution sampled from."""
    advantages_M: Tensor
    weights_M: Tensor
    """See `losses.aggregation_weights`."""
    sequence_M: Tensor
    """int64: which of the micro-batch's sequences, counted from 0."""
    anchor_logprobs_M: Tensor | None = None
    """Logprobs under the policy at the beginning of the step; None where that is the policy being trained."""
    reference_logprobs_M: Tensor | None = None
    """Where the loss has a KL term."""
    entropy_M: Tensor | None = None
    """Nats, with gradient, where the loss has an entropy bonus."""


def policy_loss(inputs: LossInputs, config: TrainerConfig) -> PolicyLoss:
    """L = surrogate(w · correction) + kl_coef Σ_t w_t KL_t - entropy_coef Σ_t w_t H_t.

    The KL and the bonus keep their plain weights: they are about the policy, not about what sampled.
    """
    old_logprobs_M, correction_M = _old_policy(inputs, config)
    weights_M = inputs.weights_M if correction_M is None else inputs.weights_M * correction_M
    policy = _surrogate(replace(inputs, old_logprobs_M=old_logprobs_M, weights_M=weights_M), config)
    loss, kl_M = policy.loss, None
    if config.kl_coef and config.kl_in == "loss":
        assert inputs.reference_logprobs_M is not None, "a KL term without the reference's logprobs"
        kl_M = kl_estimates(inputs.logprobs_M, inputs.reference_logprobs_M, config.kl_estimator)
        loss = loss + config.kl_coef * (inputs.weights_M * kl_M).sum()
    if config.entropy_coef:
        assert inputs.entropy_M is not None, "an entropy bonus without the entropy"
        assert inputs.entropy_M.requires_grad or not torch.is_grad_enabled(), "an entropy bonus without its gradient"
        loss = loss - config.entropy_coef * (inputs.weights_M * inputs.entropy_M).sum()
    return replace(policy, loss=loss, kl_M=None if kl_M is None else kl_M.detach(), correction_M=correction_M)


def _old_policy(inputs: LossInputs, config: TrainerConfig) -> tuple[Tensor, Tensor | None]:
    """log π_old, and what multiplies the weights."""
    given_M = inputs.anchor_logprobs_M
    anchor_M = inputs.logprobs_M.detach() if given_M is None else given_M
    mismatch = config.mismatch
    if mismatch.kind == "none":
        recomputes = given_M is not None or config.recompute_old_logprobs is True
        return (anchor_M if recomputes else inputs.old_logprobs_M), None
    correction_M = mismatch_weights(
        anchor_M - inputs.old_logprobs_M, inputs.sequence_M, mismatch.kind, mismatch.low, mismatch.high
    )
    return anchor_M, correction_M


def _surrogate(inputs: LossInputs, config: TrainerConfig) -> PolicyLoss:
    tokens = (inputs.logprobs_M, inputs.old_logprobs_M, inputs.advantages_M, inputs.weights_M)
    if config.loss == "clip":
        return clipped_loss(*tokens, config.clip_low, config.clip_high, config.dual_clip)
    if config.loss == "gspo":
        return gspo_loss(*tokens, inputs.sequence_M, config.clip_low, config.clip_high)
    if config.loss == "cispo":
        return cispo_loss(*tokens, config.clip_low, config.clip_high)
    if config.loss == "reinforce":
        return reinforce_loss(*tokens)
    raise AssertionError(config.loss)
