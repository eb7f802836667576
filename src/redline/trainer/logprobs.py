"""Log-probabilities of chosen tokens without ever holding all logits.

For a vocabulary of 150k, the logits of a few thousand tokens weigh more than the model. Here they exist one chunk at a
time, and the backward pass computes them again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 32 * 2**20
"""Logits per chunk: 128 MiB in float32."""


def selected_logprobs(hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """float32 log softmax(hidden @ weightᵀ / temperature)[target], and the entropy of each distribution (no gradient)."""
    return _SelectedLogprobs.apply(hidden_ME, weight_VE, targets_M, temperature)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, normalizers, entropies = [], [], []
        for hidden, targets in _chunks(weight_VE, hidden_ME, targets_M):
            logits = _scaled_logits(hidden, weight_VE, temperature)
            normalizer = torch.logsumexp(logits, dim=-1)
            logprobs.append(logits.gather(1, targets[:, None]).squeeze(1) - normalizer)
            normalizers.append(normalizer)
            # H = log Z - Σ p·logit; the product overwrites the probabilities.
            probabilities = torch.exp(logits - normalizer[:, None])
            entropies.append(normalizer - probabilities.mul_(logits).sum(dim=-1))
        ctx.save_for_backward(hidden_ME, weight_VE, targets_M, torch.cat(normalizers))
        ctx.temperature = temperature
        entropy_M = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_M)
        return torch.cat(logprobs), entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_ME, weight_VE, targets_M, normalizer_M = ctx.saved_tensors
        grad_hidden, grad_weight = [], torch.zeros_like(weight_VE, dtype=torch.float32)
        for hidden, targets, normalizer, grad in _chunks(weight_VE, hidden_ME, targets_M, normalizer_M, grads[0]):
            # d logprob / d logit = (1[v = target] - p_v) / temperature
            grad_logits = (
                _scaled_logits(hidden, weight_VE, ctx.temperature).sub_(normalizer[:, None]).exp_().mul_(-grad[:, None])
            )
            grad_logits.scatter_add_(1, targets[:, None], grad[:, None])
            grad_logits = grad_logits.div_(ctx.temperature).to(weight_VE.dtype)
            grad_hidden.append(grad_logits @ weight_VE)
            grad_weight += grad_logits.T @ hidden
        return torch.cat(grad_hidden), grad_weight.to(weight_VE.dtype), None, None


def _scaled_logits(hidden: Tensor, weight_VE: Tensor, temperature: float) -> Tensor:
    """float32 [chunk, V], a fresh tensor that the caller may overwrite."""
    return F.linear(hidden, weight_VE).to(torch.float32, copy=weight_VE.dtype != torch.float32).div_(temperature)


def _chunks(weight_VE: Tensor, *tensors_M: Tensor) -> zip[tuple[Tensor, ...]]:
    rows = max(1, CHUNK_ELEMENTS // len(weight_VE))
    return zip(*(tensor.split(rows) for tensor in tensors_M), strict=True)
