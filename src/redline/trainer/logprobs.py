"""Log-probabilities of chosen tokens without ever holding all logits.

For a vocabulary of 150k, the logits of a few thousand tokens weigh more than the model. Here they exist one chunk at a
time, and the backward pass computes them again."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Logits of one chunk: in float32 on the CPU, in the compute dtype on a GPU, which wants larger products."""
_HAS_TRITON = find_spec("triton") is not None


def selected_logprobs(hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """float32 log softmax(hidden @ weightᵀ / temperature)[target], and the entropy of each distribution."""
    return _SelectedLogprobs.apply(hidden_ME, weight_VE, targets_M, temperature)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        chunks = [
            _summarise(F.linear(hidden, weight_VE), targets, temperature)
            for hidden, targets in _chunks(weight_VE, hidden_ME, targets_M)
        ]
        logprobs_M, normalizers_M, entropies_M = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_ME, weight_VE, targets_M, normalizers_M, entropies_M)
        ctx.temperature = temperature
        return logprobs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_ME, weight_VE, *known = ctx.saved_tensors
        grad_hidden_ME = torch.empty_like(hidden_ME)
        grad_weight_VE: Tensor | None = None
        parts = _chunks(weight_VE, hidden_ME, grad_hidden_ME, *known, *grads)
        for hidden, grad_hidden, targets, normalizers, entropies, *incoming in parts:
            logits = F.linear(hidden, weight_VE)
            outgoing = _to_gradient(logits, targets, normalizers, entropies, (incoming[0], incoming[1]), ctx.temperature)
            torch.mm(outgoing, weight_VE, out=grad_hidden)
            if ctx.needs_input_grad[1]:
                grad_weight_VE = _plus(grad_weight_VE, outgoing.T @ hidden, alone=len(hidden) == len(hidden_ME))
        return grad_hidden_ME, None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype), None, None


def _summarise(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, log of the normalizer, and entropy."""
    if logits.is_cuda and _HAS_TRITON:
        from redline.trainer.logprob_kernels import summarise

        return summarise(logits, targets, temperature)
    scaled = _scaled(logits, temperature)
    normalizer = torch.logsumexp(scaled, dim=-1)
    logprob = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    # H = log Z - Σ p·logit; the product overwrites the probabilities.
    probabilities = torch.exp(scaled - normalizer[:, None])
    return logprob, normalizer, normalizer - probabilities.mul_(scaled).sum(dim=-1)


def _to_gradient(
    logits: Tensor, targets: Tensor, normalizers: Tensor, entropies: Tensor, grads: tuple[Tensor, Tensor], temperature: float
) -> Tensor:
    """What reaches the logits; they are overwritten."""
    if logits.is_cuda and _HAS_TRITON:
        from redline.trainer.logprob_kernels import to_gradient_

        return to_gradient_(logits, targets, normalizers, entropies, grads, temperature)
    (grad_logprob, grad_entropy), dtype = grads, logits.dtype
    log_p = _scaled(logits, temperature).sub_(normalizers[:, None])
    # d logprob / d logit = (1[v = target] - p_v) / temperature
    grad = log_p.exp().mul_(-grad_logprob[:, None])
    if grad_entropy.any():
        # d H / d logit = -p_v · (log p_v + H) / temperature
        grad -= log_p.exp() * (log_p + entropies[:, None]) * grad_entropy[:, None]
    grad.scatter_add_(1, targets[:, None], grad_logprob[:, None])
    return grad.div_(temperature).to(dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """float32 [chunk, V], a fresh tensor that the caller may overwrite."""
    return logits.to(torch.float32).div_(temperature)


def _plus(total: Tensor | None, part: Tensor, *, alone: bool) -> Tensor:
    """Sums over chunks are kept in float32; a single chunk is its own sum."""
    if alone:
        return part
    return part.float() if total is None else total.add_(part)


def _chunks(weight_VE: Tensor, *tensors_M: Tensor) -> zip[tuple[Tensor, ...]]:
    """Views of the same rows of each."""
    itemsize = weight_VE.dtype.itemsize if weight_VE.is_cuda else 4
    rows = max(1, CHUNK_BYTES["cuda" if weight_VE.is_cuda else "cpu"] // (itemsize * len(weight_VE)))
    return zip(*(tensor.split(rows) for tensor in tensors_M), strict=True)
