"""The activation of a gated MLP, and parts of a layer that the backward pass makes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from redline.kernels.available import kernels_serve
from redline.kernels.cpu import training as cpu


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, of the two side by side."""
    if kernels_serve(gate_up):
        from redline.kernels import decoder_steps as kernels
        from redline.kernels import training as training_kernels

        return (training_kernels if torch.is_grad_enabled() else kernels).silu_mul(gate_up)
    if cpu.serves(gate_up, gate_up.shape[-1] // 2):
        return cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def again_in_backward(part: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    """The same function, but where gradients are wanted nothing inside is kept for the backward pass."""
    if not (wanted and torch.is_grad_enabled()):
        return part
    return partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
