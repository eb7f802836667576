from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from redline.trainer.loss.kl import kl_estimates

BY_HAND = {
    "k1": lambda p, q: math.log(p) - math.log(q),
    "k2": lambda p, q: 0.5 * math.log(q / p) ** 2,
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
}
every_estimator = pytest.mark.parametrize("estimator", BY_HAND)


def random_policies(seed: int, vocabulary: int = 7) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.dirichlet(np.full(vocabulary, 5.0)), generator.dirichlet(np.full(vocabulary, 5.0))


@every_estimator
@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_is_its_formula_in_probabilities(estimator: str, seed: int) -> None:
    policy, reference = random_policies(seed)
    found = kl_estimates(torch.tensor(policy).log(), torch.tensor(reference).log(), estimator)
    np.testing.assert_allclose(found, [BY_HAND[estimator](p, q) for p, q in zip(policy, reference, strict=True)], rtol=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_estimate_over_the_policy_is_the_divergence(estimator: str, seed: int) -> None:
    """An expectation over the whole vocabulary, so that nothing is left to chance."""
    policy, reference = random_policies(seed)
    divergence = float((policy * np.log(policy / reference)).sum())
    found = kl_estimates(torch.tensor(policy).log(), torch.tensor(reference).log(), estimator)
    assert float((found * torch.tensor(policy)).sum()) == pytest.approx(divergence, rel=1e-9)


def expected_loss_gradient(logits: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """The mean gradient of the estimate as a loss, over tokens that the policy samples."""
    logprobs = torch.log_softmax(logits, dim=0)
    loss = (logprobs.exp().detach() * kl_estimates(logprobs, reference, estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


def test_as_a_loss_k1_has_no_gradient_on_average_and_k2_that_of_the_divergence() -> None:
    policy, reference = (torch.tensor(p).log() for p in random_policies(4))
    logits = policy.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    true_gradient = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)[0]
    assert float(true_gradient.abs().max()) > 0.01
    torch.testing.assert_close(expected_loss_gradient(logits, reference, "k1"), torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(expected_loss_gradient(logits, reference, "k2"), true_gradient)


@every_estimator
def test_the_gradient_is_the_finite_difference(estimator: str) -> None:
    policy, reference = (torch.tensor(p).log() for p in random_policies(5))
    assert torch.autograd.gradcheck(lambda p: kl_estimates(p, reference, estimator), policy.requires_grad_())


@every_estimator
def test_a_policy_that_is_the_reference_has_no_divergence(estimator: str) -> None:
    logprobs = -torch.rand(10)
    assert not kl_estimates(logprobs, logprobs, estimator).any()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(estimator: str) -> None:
    policy, reference = -5 * torch.rand(1000), -5 * torch.rand(1000)
    assert (kl_estimates(policy, reference, estimator) >= 0).all()


def test_a_token_the_policy_almost_never_says_gives_a_finite_k3_and_gradient() -> None:
    policy = torch.tensor([-500.0]).requires_grad_()
    found = kl_estimates(policy, torch.tensor([-1.0]), "k3")
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(policy.grad).all()


@pytest.mark.parametrize("distance", [1.0, 19.0, 21.0, 88.0, 500.0])
def test_k3_never_pushes_the_policy_away_from_a_reference_that_likes_the_token_better(distance: float) -> None:
    policy = torch.tensor([-1.0 - distance]).requires_grad_()
    kl_estimates(policy, torch.tensor([-1.0]), "k3").sum().backward()
    assert policy.grad is not None
    assert float(policy.grad) <= 0, "descent makes the token likelier, or leaves it"
