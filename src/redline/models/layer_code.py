"""What runs a decoder layer of a training step. The decoder asks before it runs one; planners of memory and time ask with the
same facts, with or without a network at hand."""

from __future__ import annotations

from typing import Literal

import torch

from redline.kernels.cpu.training import LANES
from redline.models.spec import DecoderSpec, ModelShape

Checkpointing = Literal["none", "light", "selective", "full"]
"""What the backward pass computes again. `light`: the MLPs' activations, `selective`: the MLPs, `full`: all layers, each from
its inputs."""
LayerCode = Literal["fused", "kernels", "compiled", "eager"]
"""`fused`: forward and backward by hand (`layers/fused.py`). `kernels`: autograd around `kernels/training.py`. `compiled`:
autograd around the C of `kernels/cpu/training.py`. `eager`: autograd around torch's own operations."""


def layer_code(
    shape: ModelShape,
    dtype: torch.dtype,
    checkpointing: Checkpointing,
    *,
    kernels: bool,
    whole: bool,
    compiled: bool = False,
) -> LayerCode:
    """The code that runs a layer of this shape with gradients.

    `kernels`: the Triton kernels serve on the device (`kernels/available.py`). `whole`: every projection is a plain linear that
    this process has to itself, without an adapter. Layers by hand know half precision, no norm on heads, no bias but that of
    the queries, keys and values, no experts, and cannot compute an MLP again. `compiled`: there is the C for a CPU, in this
    dtype."""
    if not isinstance(shape, DecoderSpec):
        return "eager"
    if not kernels:
        has_rows = all(columns % LANES == 0 for columns in (shape.hidden_size, *shape.inner_sizes))
        return "compiled" if compiled and has_rows else "eager"
    by_hand = whole and checkpointing != "selective" and dtype.itemsize == 2
    has_more = shape.qk_norm or shape.o_bias or shape.mlp_bias or shape.experts is not None
    return "fused" if by_hand and not has_more else "kernels"
