"""A mixture of experts in place of a layer's MLP: a router sends each token to some of them and adds up what they return.

    x ──► router ──► softmax over all experts ──► the likeliest C of each token, and their weights
    x ──► pairs (token, expert) sorted by expert ──► gate, up ──► silu ──► down ──► Σ weight · output of each token

Sampling on a GPU runs `kernels/experts`; here is everything else, with gradients. Gate and up of all experts are one parameter,
and so is down: the rows of one expert lie below those of the one before, as `stored.py` reads them.

Letters: X experts, C choices of a token, P = T · C pairs, I inner columns of an expert, K and N columns of a product's factors
and of its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.kernels.available import kernels_serve
from redline.models.layers.activation import again_in_backward, silu_mul
from redline.models.layers.routes import Routes
from redline.models.layers.routing_notes import RoutingNotes
from redline.models.layers.rows import selected_rows
from redline.models.spec import ExpertsSpec


class Experts(nn.Module):
    """Packed tokens [T, E] → [T, E]."""

    def __init__(self, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = nn.Parameter(torch.empty(spec.count, hidden_size))
        self.gate_up = nn.Parameter(torch.empty(spec.count * 2 * spec.intermediate_size, hidden_size))
        """[2 · experts · I, E]: the gate of each expert, and below it its up."""
        self.down = nn.Parameter(torch.empty(spec.count * hidden_size, spec.intermediate_size))
        self.notes: RoutingNotes | None = None
        """Where passes with gradients note what the router does; the trainer brings it."""

    def forward(self, x_TE: Tensor, *, light: bool = False, routes: Routes | None = None, layer: int = 0) -> Tensor:
        """`light`: the backward pass computes the activation again. `routes` are those of the pass, which knows this as
        `layer`; what was sampled matters where `notes` are."""
        logits_TX = F.linear(x_TE, self.router)
        sampled_TC = routes.sampled(layer) if routes is not None and self.notes is not None else None
        record = None if routes is None else partial(routes.record, layer)
        if not torch.is_grad_enabled() and _kernels_take(x_TE) and sampled_TC is None:
            from redline.kernels.experts import ExpertWeights, run_experts

            weights = ExpertWeights(self._of_each(self.gate_up), self._of_each(self.down))
            return run_experts(x_TE, logits_TX, weights, self.spec.per_token, normalized=self.spec.normalized, record=record)
        experts_TC, weights_TC = self._choose(logits_TX, sampled_TC)
        if record is not None:
            record(experts_TC)
        return self._mix(x_TE, experts_TC, weights_TC, light)

    def _of_each(self, weight: Tensor) -> Tensor:
        """[X, rows of an expert, columns]."""
        return weight.view(self.spec.count, -1, weight.shape[1])

    def _choose(self, logits_TX: Tensor, sampled_TC: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64[T, C], and their weights [T, C] in the compute dtype. `sampled_TC`: as
        `Routes.sampled`."""
        probability_TX = logits_TX.softmax(dim=-1, dtype=torch.float32)
        experts_TC = likeliest(logits_TX.detach(), probability_TX.detach(), self.spec.per_token)
        if self.notes is not None and sampled_TC is not None:
            experts_TC = self.notes.compare(experts_TC, sampled_TC)
        weights_TC = probability_TX.gather(1, experts_TC)
        if self.spec.normalized:
            weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
        if self.notes is not None and torch.is_grad_enabled():
            self.notes.add(probability_TX.detach(), experts_TC)
        return experts_TC, weights_TC.to(logits_TX.dtype)

    def _mix(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor, light: bool) -> Tensor:
        T, C = experts_TC.shape
        sorted_P, order_P = experts_TC.flatten().sort(stable=True)
        experts_X = torch.arange(self.spec.count, device=sorted_P.device)
        ends_X = torch.searchsorted(sorted_P, experts_X, right=True).int()
        gate_up_PI = grouped_product(selected_rows(x_TE, order_P // C), self._of_each(self.gate_up), ends_X)
        out_PE = again_in_backward(self._activated, light)(gate_up_PI, ends_X)
        place_P = torch.empty_like(order_P).index_copy_(0, order_P, torch.arange(len(order_P), device=order_P.device))
        out_TCE = selected_rows(out_PE, place_P).view(T, C, x_TE.shape[1])
        return torch.bmm(weights_TC[:, None], out_TCE).squeeze(1)

    def _activated(self, gate_up_PI: Tensor, ends_X: Tensor) -> Tensor:
        return grouped_product(silu_mul(gate_up_PI), self._of_each(self.down), ends_X)


def _kernels_take(x_TE: Tensor) -> bool:
    """Whether `kernels/experts` computes with tokens of this kind."""
    return kernels_serve(x_TE) and x_TE.dtype.itemsize == 2


def likeliest(logits_TX: Tensor, probability_TX: Tensor, count: int) -> Tensor:
    """int64[T, count]: the likeliest first; of two that are equal the lower one, for the engine and the trainer alike. In
    bfloat16, equal ones are not rare."""
    if _kernels_take(logits_TX):
        from redline.kernels.experts.routing import choose_experts

        return choose_experts(logits_TX.contiguous(), count, normalized=False).experts_TC.long()
    return probability_TX.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def grouped_product(x_PK: Tensor, weight_XNK: Tensor, ends_X: Tensor) -> Tensor:
    """x weightᵀ, [P, N]: rows up to `ends_X[0]` (int32) by the first weight, from there up to `ends_X[1]` by the second, and so
    on. A weight's gradient is zero where it has no rows."""
    return _GroupedProduct.apply(x_PK, weight_XNK, ends_X)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, weight_XNK: Tensor, ends_X: Tensor) -> Tensor:
        ctx.save_for_backward(x_PK, weight_XNK, ends_X)
        if _torch_groups(x_PK, weight_XNK):
            return torch._grouped_mm(x_PK, weight_XNK.transpose(1, 2), offs=ends_X)
        out_PN = x_PK.new_empty(len(x_PK), weight_XNK.shape[1])
        for expert, rows in _groups(ends_X):
            torch.mm(x_PK[rows], weight_XNK[expert].T, out=out_PN[rows])
        return out_PN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_PK, weight_XNK, ends_X = ctx.saved_tensors
        grad_PN = grads[0].contiguous()
        for_x, for_weight, _ = ctx.needs_input_grad
        if _torch_groups(x_PK, weight_XNK):
            grad_PK = torch._grouped_mm(grad_PN, weight_XNK, offs=ends_X) if for_x else None
            grad_XNK = _weight_gradients(grad_PN, x_PK, ends_X) if for_weight else None
            return grad_PK, grad_XNK, None
        grad_PK = torch.empty_like(x_PK) if for_x else None
        grad_XNK = torch.zeros_like(weight_XNK) if for_weight else None
        for expert, rows in _groups(ends_X):
            if grad_PK is not None:
                torch.mm(grad_PN[rows], weight_XNK[expert], out=grad_PK[rows])
            if grad_XNK is not None:
                torch.mm(grad_PN[rows].T, x_PK[rows], out=grad_XNK[expert])
        return grad_PK, grad_XNK, None


def _torch_groups(x_PK: Tensor, weight_XNK: Tensor) -> bool:
    """Whether torch multiplies all groups in one launch: in bfloat16, with columns that are multiples of 16 bytes. Otherwise
    the host must know how many rows each expert has, and waits for that."""
    return x_PK.is_cuda and x_PK.dtype == torch.bfloat16 and weight_XNK.shape[1] % 8 == 0 and weight_XNK.shape[2] % 8 == 0


def _weight_gradients(grad_PN: Tensor, x_PK: Tensor, ends_X: Tensor) -> Tensor:
    """[X, N, K] by torch, in one launch. The rows of an expert are whole columns of gradᵀ as it lies in memory: any number of
    them is aligned."""
    grad_XNK = torch._grouped_mm(grad_PN.T, x_PK, offs=ends_X)
    if not _zeroes_empty_groups(grad_XNK):
        rows_X = torch.diff(ends_X, prepend=ends_X.new_zeros(1))
        grad_XNK.masked_fill_((rows_X == 0)[:, None, None], 0.0)
    return grad_XNK


def _zeroes_empty_groups(gradient: Tensor) -> bool:
    """Whether torch writes zeros for experts without rows. On Hopper it does; on Blackwell it leaves there what the memory held
    (pytorch issue 172439)."""
    return torch.cuda.get_device_capability(gradient.device)[0] == 9


def _groups(ends_X: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows. Blocks until the device knows them."""
    begin = 0
    for expert, end in enumerate(ends_X.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end
