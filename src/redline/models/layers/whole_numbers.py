"""Products of a training step in whole numbers (`trainer.quantization`), with gradients: a linear layer's, and the head's.

Weights, gradients and everything between the products are in float32; `kernels/cpu/quantized_training.py` does the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from redline.kernels.cpu.quantized_training import TrainingProducts, training_products


def _products() -> TrainingProducts:
    products = training_products("int16")
    assert products is not None, "whoever makes the network asks first"
    return products


def forward(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weightᵀ."""
    return _products().forward(x_TK, weight_NK)


def backward(grad_TN: Tensor, weight_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """grad @ weight, into `out` if there is one."""
    return _products().backward(grad_TN, weight_NK, out)


def gradient(grad_TN: Tensor, x_TK: Tensor) -> Tensor:
    """gradᵀ @ x."""
    return _products().gradient(grad_TN, x_TK)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` of tokens."""
    return _Linear.apply(x_TI, weight_OI, bias_O)


class WholeNumberLinear(nn.Linear):
    """A linear layer by such products, with the parameters of another."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source.in_features, source.out_features, bias=source.bias is not None, device="meta")
        self.weight, self.bias = source.weight, source.bias
        self.multiply = linear

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return _products().forward(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if torch.is_grad_enabled():  # for `create_graph`, which would take what C computes for constants
            raise RuntimeError("products in whole numbers have no second derivatives: leave out create_graph")
        (grad_TO,), (x_TI, weight_OI), wanted = grads, ctx.saved_tensors, ctx.needs_input_grad
        grad_TO = grad_TO.contiguous()  # once, for both products
        return (
            backward(grad_TO, weight_OI) if wanted[0] else None,
            gradient(grad_TO, x_TI) if wanted[1] else None,
            grad_TO.sum(dim=0) if wanted[2] else None,
        )
