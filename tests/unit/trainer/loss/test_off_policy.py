from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from redline.config.sections.trainer import TrainerConfig
from redline.trainer.loss.algorithm import LossInputs, policy_loss
from redline.trainer.loss.off_policy import correction_for
from redline.trainer.loss.policy import PolicyLoss


@pytest.mark.parametrize("lags", [(), (0,), (0, 0, 0)])
def test_a_batch_of_the_current_policy_changes_nothing(lags: tuple[int, ...]) -> None:
    config = TrainerConfig()
    assert correction_for(lags, config) is config


@pytest.mark.parametrize(
    ("loss", "correction"), [("clip", "token_truncate"), ("gspo", "geometric_truncate"), ("reinforce", "token_truncate")]
)
def test_one_older_group_is_enough_for_truncated_importance_sampling(loss: str, correction: str) -> None:
    config = TrainerConfig(loss=loss, mismatch={"high": 3.0})
    corrected = correction_for((0, 2, 0), config)
    assert corrected == TrainerConfig(loss=loss, mismatch={"kind": correction, "high": 3.0})
    assert config.mismatch.kind == "none"


def test_cispo_weighs_older_samples_itself_within_its_own_bound() -> None:
    config = TrainerConfig(loss="cispo", clip_low=1.0, clip_high=4.0)
    assert correction_for((1,), config) is config


def test_after_its_first_update_reinforce_has_samples_of_an_older_policy() -> None:
    config = TrainerConfig(loss="reinforce", epochs=2)
    assert correction_for((0,), config).mismatch.kind == "token_truncate"
    assert correction_for((0,), TrainerConfig(loss="reinforce")).mismatch.kind == "none"
    assert correction_for((0,), TrainerConfig(loss="clip", epochs=2)).mismatch.kind == "none", "its ratio says so"


# ── what becomes of the loss ───────────────────────────────────────────────────────────────────────────────────────────


def lagging(seed: int = 0) -> LossInputs:
    """Eight sequences of eight tokens, the policy a good way from the one that sampled, and half as far from the anchor."""
    generator = torch.Generator().manual_seed(seed)
    sampled, moved, further = (torch.randn(64, generator=generator) for _ in range(3))
    anchor = sampled - 2 + 0.4 * moved
    return LossInputs(
        logprobs_M=(anchor + 0.3 * further).requires_grad_(),
        old_logprobs_M=sampled - 2,
        advantages_M=torch.randn(8, generator=generator).repeat_interleave(8),
        weights_M=torch.full((64,), 1 / 64),
        sequence_M=torch.arange(8).repeat_interleave(8),
        anchor_logprobs_M=anchor,
    )


def gradient(inputs: LossInputs, config: TrainerConfig) -> tuple[torch.Tensor, PolicyLoss]:
    found = policy_loss(inputs, correction_for((1,), config))
    return torch.autograd.grad(found.loss, inputs.logprobs_M)[0], found


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_with_lag_the_clip_bounds_the_way_from_the_beginning_of_the_step(loss: str) -> None:
    """w · ρ · min(r A, clip(r) A), with r = π / π_anchor, and ρ the bounded π_anchor / π_engine."""
    inputs = lagging()
    narrow, found = gradient(inputs, TrainerConfig(loss=loss, clip_low=0.05, clip_high=0.05, mini_batches=4))
    wide, _ = gradient(inputs, TrainerConfig(loss=loss, clip_low=0.9, clip_high=50.0, mini_batches=4))
    assert inputs.anchor_logprobs_M is not None
    log_r, log_rho = inputs.logprobs_M - inputs.anchor_logprobs_M, inputs.anchor_logprobs_M - inputs.old_logprobs_M
    if loss == "gspo":
        log_r = log_r.reshape(8, 8).mean(dim=1).repeat_interleave(8)
        log_rho = log_rho.reshape(8, 8).mean(dim=1).repeat_interleave(8)
    r, rho = log_r.exp(), log_rho.exp().clamp(0, 2)
    objective = rho * torch.minimum(r * inputs.advantages_M, r.clamp(0.95, 1.05) * inputs.advantages_M)
    expected = -(inputs.weights_M * objective).sum()
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(narrow, torch.autograd.grad(expected, inputs.logprobs_M)[0])
    assert not torch.equal(narrow, wide)
    assert 0 < found.clipped_M.float().mean() < 1


def test_with_lag_cispo_has_its_own_cap() -> None:
    inputs = replace(lagging(), anchor_logprobs_M=None)
    found, _ = gradient(inputs, TrainerConfig(loss="cispo", clip_low=1.0, clip_high=0.3))
    ratio = (inputs.logprobs_M.detach() - inputs.old_logprobs_M).exp()
    assert ratio.max() > 1.3
    torch.testing.assert_close(found, -inputs.weights_M * ratio.clamp(max=1.3) * inputs.advantages_M)


def test_with_lag_gspo_weighs_a_sequence_by_its_mean_whatever_its_length() -> None:
    for length in (8, 512, 4096):
        drift = torch.full((length,), 0.01)
        sequence = torch.zeros(length, dtype=torch.int64)
        inputs = LossInputs(drift.requires_grad_(), torch.zeros(length), torch.ones(length), torch.ones(length), sequence)
        _, found = gradient(inputs, TrainerConfig(loss="gspo"))
        assert found.correction_M is not None
        torch.testing.assert_close(found.correction_M, torch.full((length,), 0.01).exp())


def test_a_correction_that_the_recipe_chose_stands() -> None:
    config = TrainerConfig(mismatch="token_mask")
    assert correction_for((3,), config) is config


def test_a_recipe_may_want_none_at_all_also_after_its_config_was_written_and_read_again() -> None:
    config = TrainerConfig(mismatch={"correct_lag": False})
    assert correction_for((3,), TrainerConfig(**config.model_dump())).mismatch.kind == "none"
    assert correction_for((3,), TrainerConfig(**TrainerConfig().model_dump())).mismatch.kind == "token_truncate"
