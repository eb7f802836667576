"""Losses, corrections and terms put together as a recipe wants them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redline.config.sections.trainer import TrainerConfig
from redline.trainer.loss.algorithm import LossInputs, policy_loss
from redline.trainer.loss.policy import PolicyLoss, aggregation_weights, clipped_loss

LENGTHS = [3, 1, 6, 2, 5]
LOSSES = ("clip", "gspo", "cispo", "reinforce")
MISMATCHES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def random_inputs(seed: int = 0, aggregation: str = "sequence_mean") -> LossInputs:
    """All that any loss needs, in float64; entropies are leaves of their own."""
    generator = np.random.default_rng(seed)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = torch.tensor(-generator.exponential(2.0, len(sequence)))
    noise = [torch.tensor(0.4 * generator.standard_normal(len(sequence))) for _ in range(3)]
    weights = aggregation_weights(torch.tensor(LENGTHS), aggregation, len(LENGTHS) + 2, sum(LENGTHS) + 9, 8).double()
    return LossInputs(
        logprobs_M=(old + noise[0]).requires_grad_(),
        old_logprobs_M=old,
        advantages_M=torch.tensor(generator.normal(size=len(LENGTHS)))[sequence],
        weights_M=weights[sequence],
        sequence_M=sequence,
        anchor_logprobs_M=old + noise[1],
        reference_logprobs_M=old + noise[2],
        entropy_M=torch.tensor(generator.uniform(0, 3, len(sequence))).requires_grad_(),
    )


def config(**values: Any) -> TrainerConfig:
    return TrainerConfig(**values)


def without_anchor(inputs: LossInputs) -> LossInputs:
    return dataclasses.replace(inputs, anchor_logprobs_M=None)


def gradient(found: PolicyLoss, inputs: LossInputs) -> Tensor:
    return torch.autograd.grad(found.loss, inputs.logprobs_M)[0]


def only(inputs: LossInputs, sequences: list[int]) -> LossInputs:
    """A micro-batch of these sequences, numbered from 0."""
    picked = [torch.nonzero(inputs.sequence_M == s).flatten() for s in sequences]
    numbers = torch.cat([torch.full_like(tokens, number) for number, tokens in enumerate(picked)])
    index = torch.cat(picked)
    tensors = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    parts = {name: tensor[index] for name, tensor in tensors.items() if tensor is not None}
    return LossInputs(**parts | {"sequence_M": numbers})


# ── as before ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_recipe_that_says_nothing_gets_grpo_without_kl() -> None:
    inputs = without_anchor(random_inputs())
    found = policy_loss(inputs, config())
    ratio = torch.exp(inputs.logprobs_M - inputs.old_logprobs_M)
    surrogate = torch.min(ratio * inputs.advantages_M, torch.clip(ratio, 0.8, 1.2) * inputs.advantages_M)
    assert torch.equal(found.loss, -(inputs.weights_M * surrogate).sum())
    assert found.kl_M is None
    assert found.correction_M is None


# ── all combinations ───────────────────────────────────────────────────────────────────────────────────────────────────

COMBINATIONS = list(itertools.product(LOSSES, MISMATCHES, ("sequence_mean", "token_mean", "constant"), (True, False)))


@pytest.mark.parametrize(("loss", "mismatch", "aggregation", "anchored"), COMBINATIONS)
def test_micro_batches_of_any_combination_add_up(loss: str, mismatch: str, aggregation: str, anchored: bool) -> None:
    settings = config(loss=loss, mismatch=mismatch, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.05)
    inputs = random_inputs(1, aggregation)
    inputs = inputs if anchored else without_anchor(inputs)
    whole = policy_loss(inputs, settings)
    whole_gradient = gradient(whole, inputs)
    for split in ([[0], [1], [2], [3], [4]], [[4, 1], [0, 3, 2]]):
        parts = [policy_loss(only(inputs, sequences), settings) for sequences in split]
        assert sum(float(part.loss.detach()) for part in parts) == pytest.approx(float(whole.loss.detach()), rel=1e-10)
        torch.testing.assert_close(sum(gradient(part, inputs) for part in parts), whole_gradient)


@pytest.mark.parametrize(("loss", "mismatch"), list(itertools.product(("clip", "reinforce"), MISMATCHES)))
def test_the_gradient_of_a_combination_is_the_finite_difference(loss: str, mismatch: str) -> None:
    """With an anchor, and with losses that hold nothing fixed: gradcheck cannot know of the rest."""
    inputs = random_inputs(2)
    settings = config(loss=loss, mismatch=mismatch, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.05)

    def total(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(dataclasses.replace(inputs, logprobs_M=logprobs, entropy_M=entropy), settings).loss

    assert torch.autograd.gradcheck(total, (inputs.logprobs_M, inputs.entropy_M))


# ── mismatch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_truncated_correction_multiplies_the_surrogate_against_the_anchor() -> None:
    """TIS: E[min(π_anchor / π_engine, C) · min(r A, clip(r) A)] with r = π / π_anchor."""
    inputs = random_inputs(3)
    found = policy_loss(inputs, config(mismatch={"kind": "token_truncate", "high": 1.25}))
    expected = 0.0
    anchors, engines = inputs.anchor_logprobs_M, inputs.old_logprobs_M
    for i, logprob in enumerate(inputs.logprobs_M.detach()):
        ratio, advantage = float(torch.exp(logprob - anchors[i])), float(inputs.advantages_M[i])
        correction = min(float(torch.exp(anchors[i] - engines[i])), 1.25)
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        expected -= float(inputs.weights_M[i]) * correction * surrogate
    assert found.loss.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_without_an_anchor_the_gradient_is_the_corrected_policy_gradient(loss: str, kind: str) -> None:
    """π is its own anchor: r = 1, nothing clips, and token t has the gradient -w ρ A."""
    inputs = without_anchor(random_inputs(4))
    level = "sequence" if loss == "gspo" else "token"
    settings = config(loss=loss, mismatch={"kind": f"{level}_{kind}", "low": 0.5, "high": 1.5})
    found = policy_loss(inputs, settings)
    log_ratio = (inputs.logprobs_M - inputs.old_logprobs_M).detach()
    if level == "sequence":
        log_ratio = torch.stack([log_ratio[inputs.sequence_M == s].sum() for s in range(len(LENGTHS))])[inputs.sequence_M]
    ratio = torch.exp(log_ratio)
    inside = (ratio >= 0.5) & (ratio <= 1.5)
    rho = torch.where(inside, ratio, 0.0) if kind == "mask" else ratio.clamp(0.5, 1.5)
    torch.testing.assert_close(found.correction_M, rho)
    torch.testing.assert_close(gradient(found, inputs), -inputs.weights_M * rho * inputs.advantages_M)
    assert not found.clipped_M.any()
    assert not bool(inside.all()), "nothing is outside the bounds, so that they are not tested"


def test_an_anchor_without_a_correction_replaces_the_engines_logprobs() -> None:
    inputs = random_inputs(5)
    found = policy_loss(inputs, config())
    tokens = (inputs.logprobs_M, inputs.anchor_logprobs_M, inputs.advantages_M, inputs.weights_M)
    assert torch.equal(found.loss, clipped_loss(*tokens, 0.2, 0.2).loss)


def test_where_engine_and_trainer_agree_a_correction_changes_nothing() -> None:
    inputs = without_anchor(random_inputs(6))
    inputs = dataclasses.replace(inputs, old_logprobs_M=inputs.logprobs_M.detach().clone())
    plain = gradient(policy_loss(inputs, config()), inputs)
    for mismatch in MISMATCHES[1:]:
        torch.testing.assert_close(gradient(policy_loss(inputs, config(mismatch=mismatch)), inputs), plain)


# ── KL and entropy ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mismatch", ["none", "token_mask"])
def test_the_kl_is_added_with_its_weight_whatever_the_correction(mismatch: str) -> None:
    inputs = random_inputs(7)
    plain = policy_loss(inputs, config(mismatch=mismatch))
    found = policy_loss(inputs, config(mismatch=mismatch, kl_coef=0.3))
    x = inputs.reference_logprobs_M - inputs.logprobs_M.detach()
    expected = torch.exp(x) - 1 - x
    torch.testing.assert_close(found.kl_M, expected)
    assert not found.kl_M.requires_grad
    assert (found.loss - plain.loss).item() == pytest.approx(0.3 * float((inputs.weights_M * expected).sum()), rel=1e-9)


def test_a_kl_in_the_reward_is_no_term_of_the_loss() -> None:
    inputs = random_inputs(8)
    found = policy_loss(inputs, config(kl_coef=0.3, kl_in="reward", kl_estimator="k1"))
    assert torch.equal(found.loss, policy_loss(inputs, config()).loss)
    assert found.kl_M is None


def test_the_entropy_is_rewarded_with_its_weight() -> None:
    inputs = random_inputs(9)
    plain, found = policy_loss(inputs, config()), policy_loss(inputs, config(entropy_coef=0.2))
    expected = -0.2 * float((inputs.weights_M * inputs.entropy_M).sum().detach())
    assert (found.loss - plain.loss).item() == pytest.approx(expected, rel=1e-9)
    bonus = torch.autograd.grad(found.loss, inputs.entropy_M)[0]
    torch.testing.assert_close(bonus, -0.2 * inputs.weights_M)


@pytest.mark.parametrize(
    ("missing", "settings", "message"),
    [
        ({"reference_logprobs_M": None}, {"kl_coef": 0.1}, "without the reference's logprobs"),
        ({"entropy_M": None}, {"entropy_coef": 0.1}, "without the entropy"),
        ({"entropy_M": torch.ones(sum(LENGTHS))}, {"entropy_coef": 0.1}, "without its gradient"),
    ],
)
def test_a_term_without_its_numbers_is_our_own_mistake(missing: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        policy_loss(dataclasses.replace(random_inputs(), **missing), config(**settings))
