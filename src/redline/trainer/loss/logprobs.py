"""Log-probabilities of chosen tokens without holding more logits than there is room for.

For a vocabulary of 150k, the logits of a few thousand tokens weigh more than the model. Here they are made one chunk at a time.
Those of the first few chunks are kept for the backward pass, which turns them into their gradient in place; on a GPU most of
that is done by the forward pass already (`kernels/logprobs.py`). Those of the others it computes again. On a CPU the passes
over logits are C (`kernels/cpu/logprobs.py`), or without a compiler torch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from redline.kernels.available import kernels_serve
from redline.kernels.cpu import logprobs as cpu
from redline.models.layers import products
from redline.models.layers.gradient_sums import sum_of

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Logits of one chunk: in float32 on the CPU, in the compute dtype on a GPU, which wants larger products."""
KEPT_BYTES = {"cpu": 2**29, "cuda": 3 * 2**30}
"""Logits kept for the backward pass, in the compute dtype: each spares a product with the whole vocabulary."""


def selected_logprobs(
    hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """float32 log softmax(logits / temperature)[target], and the entropy of each distribution. The logits are hidden @ weightᵀ,
    with a `cap` cap · tanh(that / cap)."""
    if cap is None:
        return _SelectedLogprobs.apply(hidden_ME, weight_VE, targets_M, temperature, torch.is_grad_enabled())
    found = [
        checkpoint(
            _capped_logprobs, hidden, weight_VE, targets, temperature, cap, use_reentrant=False, preserve_rng_state=False
        )
        for hidden, targets in _chunks(weight_VE, 0, hidden_ME, targets_M)
    ]
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat([entropies for _, entropies in found])


def _capped_logprobs(
    hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float, cap: float
) -> tuple[Tensor, Tensor]:
    """One chunk, by autograd; the backward pass makes its logits again."""
    logits_MV = cap * torch.tanh((hidden_ME @ weight_VE.T).float() / cap)
    log_p_MV = (logits_MV / temperature).log_softmax(dim=-1)
    return log_p_MV.gather(1, targets_M[:, None]).squeeze(1), -(log_p_MV.exp() * log_p_MV).sum(dim=-1)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ME: Tensor, weight_VE: Tensor, targets_M: Tensor, temperature: float, has_backward: bool
    ) -> tuple[Tensor, Tensor]:
        """`has_backward`: whether gradients are recorded, which cannot be asked in here."""
        room = KEPT_BYTES[weight_VE.device.type] if has_backward and any(ctx.needs_input_grad) else 0
        found: list[tuple[Tensor | None, _Summary]] = []
        for hidden, targets in _chunks(weight_VE, room, hidden_ME, targets_M):
            logits = products.forward(hidden, weight_VE)
            room -= logits.nbytes
            keeps = room >= 0
            summary = _summarise(logits, targets, temperature, keeps=keeps)
            found.append((logits if keeps else None, summary))
        ctx.save_for_backward(hidden_ME, weight_VE, targets_M)
        ctx.temperature, ctx.chunks, ctx.sum = temperature, found, sum_of(weight_VE)
        ctx.set_materialize_grads(False)  # without a gradient of the entropies, nothing need be computed for them
        return torch.cat([summary.logprobs for _, summary in found]), torch.cat([summary.entropies for _, summary in found])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_ME, weight_VE, targets_M = ctx.saved_tensors
        grad_hidden_ME = torch.empty_like(hidden_ME)
        grad_weight_VE: Tensor | None = None
        grad_logprobs_M = (
            targets_M.new_zeros(targets_M.shape, dtype=torch.float32) if grads[0] is None else grads[0].contiguous()
        )
        of_entropies = () if grads[1] is None else (grads[1].contiguous(),)
        room = KEPT_BYTES[weight_VE.device.type]
        parts = _chunks(weight_VE, room, hidden_ME, grad_hidden_ME, targets_M, grad_logprobs_M, *of_entropies)
        chunks = ctx.chunks
        ctx.chunks = [(None, summary) for _, summary in chunks]  # logits are overwritten below
        for (hidden, grad_hidden, targets, grad, *of_entropy), (logits, summary) in zip(parts, chunks, strict=True):
            if logits is None:
                logits = products.forward(hidden, weight_VE)
                summary = _made_again(logits, targets, summary, ctx.temperature)
            grads_here = grad, of_entropy[0] if of_entropy else None
            outgoing, factors = _to_gradient(logits, targets, summary, grads_here, ctx.temperature)
            products.backward(outgoing, weight_VE, out=grad_hidden)
            if factors is not None:
                grad_hidden *= factors[:, None]
            if ctx.sum is not None:
                ctx.sum.add_product(outgoing, _times(hidden, factors))
            elif ctx.needs_input_grad[1]:
                product = outgoing.T @ _times(hidden, factors)
                grad_weight_VE = _plus(grad_weight_VE, product, alone=len(hidden) == len(hidden_ME))
        return grad_hidden_ME, None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype), None, None, None


class _Summary(NamedTuple):
    """What a chunk of logits gives; float32[M] each."""

    logprobs: Tensor
    entropies: Tensor
    others: tuple[Tensor, ...]
    """What the gradient has to know besides: the log of the normalizer, or of what has taken the logits' place on a GPU the sum
    and the logprob of the largest. Nothing where a GPU's logits are not kept."""


def _summarise(logits: Tensor, targets: Tensor, temperature: float, *, keeps: bool) -> _Summary:
    """Logits that are not kept may be overwritten; those that are become whatever `_to_gradient` wants."""
    if kernels_serve(logits):
        from redline.kernels.logprobs import summarise, to_slopes_

        if keeps:
            logprobs, entropies, *others = to_slopes_(logits, targets, temperature)
            return _Summary(logprobs, entropies, tuple(others))
        return _Summary(*summarise(logits, targets, temperature), ())
    if cpu.serves(logits.device, logits.dtype):
        logprobs, entropies, normalizers = cpu.summarise(logits, targets, temperature)
        return _Summary(logprobs, entropies, (normalizers,))
    scaled = _scaled(logits, temperature, overwrite=not keeps)
    normalizer = torch.logsumexp(scaled, dim=-1)
    logprob = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    # H = -Σ p·log p. The difference of log Z and Σ p·logit, which are both as large as the logits, would lose its last digits.
    log_p = scaled.sub_(normalizer[:, None])
    return _Summary(logprob, -torch.exp(log_p).mul_(log_p).sum(dim=-1), (normalizer,))


def _made_again(logits: Tensor, targets: Tensor, summary: _Summary, temperature: float) -> _Summary:
    """Logits that were not kept become what they would be if they had been; the summary is that of what is there now."""
    return _summarise(logits, targets, temperature, keeps=True) if kernels_serve(logits) else summary


def _to_gradient(
    logits: Tensor, targets: Tensor, summary: _Summary, grads: tuple[Tensor, Tensor | None], temperature: float
) -> tuple[Tensor, Tensor | None]:
    """What reaches the logits, in their place; or that divided by a factor for each row, [M], which the caller has to multiply
    whatever he makes of it by."""
    (grad_logprob, grad_entropy), dtype = grads, logits.dtype
    if kernels_serve(logits):
        from redline.kernels.logprobs import to_gradient_

        sums, tops = summary.others
        if grad_entropy is None:
            return logits, -grad_logprob / (temperature * sums)
        to_gradient_(
            logits, targets, (summary.logprobs, summary.entropies, sums, tops), grad_logprob, grad_entropy, temperature
        )
        return logits, None
    (normalizers,) = summary.others
    if cpu.serves(logits.device, dtype):
        found = summary.logprobs, summary.entropies, normalizers
        cpu.to_gradient_(logits, targets, found, grad_logprob, grad_entropy, temperature)
        return logits, None
    log_p = _scaled(logits, temperature, overwrite=True).sub_(normalizers[:, None])
    # d logprob / d logit = (1[v = target] - p_v) / temperature
    grad = log_p.exp().mul_(-grad_logprob[:, None])
    if grad_entropy is not None:
        # d H / d logit = -p_v · (log p_v + H) / temperature
        grad -= log_p.exp() * (log_p + summary.entropies[:, None]) * grad_entropy[:, None]
    grad.scatter_add_(1, targets[:, None], grad_logprob[:, None])
    return grad.div_(temperature).to(dtype), None


def _scaled(logits: Tensor, temperature: float, *, overwrite: bool) -> Tensor:
    """float32 [chunk, V], which the caller may overwrite; where the logits must stay, it is a copy."""
    return logits.to(torch.float32, copy=not overwrite).div_(temperature)


def _times(hidden: Tensor, factors: Tensor | None) -> Tensor:
    """Each row by its factor, if it has one; in the dtype of the rows."""
    return hidden if factors is None else torch.mul(hidden, factors[:, None], out=torch.empty_like(hidden))


def _plus(total: Tensor | None, part: Tensor, *, alone: bool) -> Tensor:
    """Sums over chunks are kept in float32; a single chunk is its own sum."""
    if alone:
        return part
    return part.float() if total is None else total.add_(part)


def chunk_rows(num_rows: int, vocab_size: int, dtype: torch.dtype, device: str, room: int = 0) -> int:
    """Rows of a chunk. Chunks are few and even, so that no product is small. On a GPU, logits that are all kept are one chunk:
    each chunk has to read and write the gradient of the whole head."""
    itemsize = dtype.itemsize if device == "cuda" else 4
    if device == "cuda" and num_rows * itemsize * vocab_size <= room:
        return max(1, num_rows)
    most = max(1, CHUNK_BYTES[device] // (itemsize * vocab_size))
    num_chunks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_chunks))


def _chunks(weight_VE: Tensor, room: int, *tensors_M: Tensor) -> zip[tuple[Tensor, ...]]:
    """Views of the same rows of each; `room` is for the logits that are kept."""
    device = "cuda" if weight_VE.is_cuda else "cpu"
    rows = chunk_rows(len(tensors_M[0]), len(weight_VE), weight_VE.dtype, device, room)
    return zip(*(tensor.split(rows) for tensor in tensors_M), strict=True)
