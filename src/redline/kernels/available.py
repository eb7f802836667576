"""Whether our kernels serve: the one place that asks for triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether triton is installed. Says nothing of a device."""
    return find_spec("triton") is not None


def kernels_serve(tensor: Tensor) -> bool:
    """Whether the Triton kernels may work on this tensor: it lies on a CUDA device and triton is installed."""
    return tensor.is_cuda and has_triton()
