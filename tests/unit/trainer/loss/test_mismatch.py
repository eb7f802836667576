from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from redline.trainer.loss.mismatch import mismatch_kl, mismatch_weights

KINDS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOW, HIGH = 0.7, 1.5


def weights_by_hand(log_ratios: np.ndarray, sequence: np.ndarray, kind: str, low: float, high: float) -> list[float]:
    """Token by token, in probabilities."""
    weights = []
    for token, s in zip(log_ratios, sequence, strict=True):
        ratio = math.exp(token) if kind.startswith("token") else math.prod(math.exp(x) for x in log_ratios[sequence == s])
        if kind.endswith("truncate"):
            weights.append(low if ratio < low else high if ratio > high else ratio)
        else:
            weights.append(0.0 if ratio < low or ratio > high else ratio)
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_the_weights_are_the_bounded_ratios(kind: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    sequence = np.repeat(np.arange(6), generator.integers(1, 6, 6))
    log_ratios = 0.3 * generator.standard_normal(len(sequence))
    found = mismatch_weights(torch.tensor(log_ratios), torch.tensor(sequence), kind, LOW, HIGH)
    expected = weights_by_hand(log_ratios, sequence, kind, LOW, HIGH)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert len(set(expected)) > 2, "everything is bounded, so that the ratio itself is not tested"


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_agrees_changes_nothing(kind: str) -> None:
    assert torch.equal(mismatch_weights(torch.zeros(4), torch.tensor([0, 0, 1, 1]), kind, LOW, HIGH), torch.ones(4))


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_carry_no_gradient(kind: str) -> None:
    log_ratios = torch.zeros(3).requires_grad_()
    assert not mismatch_weights(log_ratios, torch.tensor([0, 0, 1]), kind, LOW, HIGH).requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [-math.inf, -500.0, 500.0, math.inf])
def test_an_extreme_ratio_is_bounded_like_any_other(kind: str, change: float) -> None:
    found = mismatch_weights(torch.tensor([change, 0.0]), torch.tensor([0, 1]), kind, LOW, HIGH)
    bound = 0.0 if kind.endswith("mask") else LOW if change < 0 else HIGH
    assert found.tolist() == pytest.approx([bound, 1.0])


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_truncate"])
def test_a_lower_bound_of_zero_is_none(kind: str) -> None:
    found = mismatch_weights(torch.tensor([-5.0]), torch.tensor([0]), kind, 0.0, HIGH)
    assert float(found) == pytest.approx(math.exp(-5))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_have_no_weights(kind: str) -> None:
    assert len(mismatch_weights(torch.zeros(0), torch.zeros(0, dtype=torch.int64), kind, LOW, HIGH)) == 0


def test_importance_weights_make_the_engines_samples_the_trainers() -> None:
    """Σ_v π_engine(v) ρ(v) f(v) = Σ_v π_trainer(v) f(v), exactly, where nothing is bounded."""
    generator = np.random.default_rng(0)
    engine, trainer, f = generator.dirichlet(np.full(9, 20.0)), generator.dirichlet(np.full(9, 20.0)), generator.normal(size=9)
    log_ratio = torch.tensor(np.log(trainer / engine))
    weights = mismatch_weights(log_ratio, torch.arange(9), "token_truncate", 0.0, 100.0)
    assert float((torch.tensor(engine * f) * weights).sum()) == pytest.approx(float((trainer * f).sum()))


def test_the_measured_divergence_is_that_of_the_engine_from_the_trainer() -> None:
    """An expectation over the engine's samples, so that nothing is left to chance."""
    generator = np.random.default_rng(1)
    engine, trainer = generator.dirichlet(np.ones(9)), generator.dirichlet(np.ones(9))
    estimates = mismatch_kl(torch.tensor(np.log(trainer / engine)))
    expected = float((engine * np.log(engine / trainer)).sum())
    assert float((torch.tensor(engine) * estimates).sum()) == pytest.approx(expected)


def test_a_divergence_below_the_resolution_of_float32_is_still_measured() -> None:
    found = mismatch_kl(torch.tensor([1e-5, -1e-5]))
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, 5e-11, rtol=1e-4)
