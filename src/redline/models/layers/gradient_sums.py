"""Gradients that never pass through autograd: added to a float32 sum where they are made.

A weight's gradient of one micro-batch is a product over its tokens. Autograd would round it to the compute dtype, write it,
read it again and add it; cuBLAS adds it in float32 as it goes. The optimizer, which keeps the sum, hangs it on the parameter;
who makes the gradient asks for it here, and hands the gradient to autograd where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.models.layers import products

_ATTRIBUTE = "gradient_sum"


class GradientSum:
    """The gradient of one parameter, summed over the micro-batches of a step."""

    def __init__(self, place: Callable[[], tuple[Tensor, bool]]) -> None:
        """`place` gives the sum, and whether this is its first gradient: until then it may hold anything."""
        self.place = place

    def add(self, gradient: Tensor) -> None:
        total, is_first = self.place()
        if is_first:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def add_product(self, left_TX: Tensor, right_TE: Tensor) -> None:
        """leftᵀ @ right."""
        total, is_first = self.place()
        if total.is_cuda:
            products.gradient_(total, left_TX, right_TE, is_first=is_first)
        else:  # no product of another dtype than its factors
            product = left_TX.T @ right_TE
            total.copy_(product) if is_first else total.add_(product)

    def add_rows(self, rows_T: Tensor, gradient_TE: Tensor) -> None:
        """Each to its row; rows that occur twice get both, in an order that is always the same."""
        total, is_first = self.place()
        if is_first:
            total.zero_()
        total.index_put_((rows_T,), gradient_TE.to(total.dtype), accumulate=True)


def keep_sum(parameter: Tensor, place: Callable[[], tuple[Tensor, bool]]) -> Callable[[], None]:
    """Sum the parameter's gradients there from now on. The result ends that, unless somebody else keeps them by then."""
    mine = GradientSum(place)
    setattr(parameter, _ATTRIBUTE, mine)

    def end() -> None:
        if sum_of(parameter) is mine:
            delattr(parameter, _ATTRIBUTE)

    return end


def sum_of(parameter: Tensor) -> GradientSum | None:
    return getattr(parameter, _ATTRIBUTE, None)


def product_gradient(weight: Tensor, left_TX: Tensor, right_TE: Tensor) -> Tensor | None:
    """leftᵀ @ right to the weight's sum, or to the caller for autograd."""
    if (kept := sum_of(weight)) is None:
        return left_TX.T @ right_TE
    kept.add_product(left_TX, right_TE)
    return None


def sum_gradients(weights: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor | None]:
    """For weights with a single dimension, [X], and float32 parts of their gradients, [P, X]: the sums of the parts to the
    weights' sums, all in one launch, or where one has none, in the weights' dtype to the caller."""
    kept = [sum_of(weight) for weight in weights]
    if None in kept:
        return [part.sum(dim=0).to(weight.dtype) for weight, part in zip(weights, parts, strict=True)]
    from redline.kernels.training import add_parts_

    add_parts_([(*own.place(), part) for own, part in zip(kept, parts, strict=True) if own is not None])
    return [None] * len(parts)


def embedding(tokens_T: Tensor, weight_VE: Tensor) -> Tensor:
    """`F.embedding`. Its gradient has a row for each token; autograd's has one for each entry of the vocabulary."""
    if sum_of(weight_VE) is None:
        return F.embedding(tokens_T, weight_VE)
    return _Embedding.apply(tokens_T, weight_VE)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_VE: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.sum = sum_of(weight_VE)
        return F.embedding(tokens_T, weight_VE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.sum.add_rows(*ctx.saved_tensors, grads[0])
        return None, None
