"""Triton kernels launched without a second look at their arguments.

Triton examines every argument of every launch to find the compiled kernel that suits it, which takes the host longer than most
kernels of a small micro-batch take the device. Here the first launch of a kind goes through Triton, and those after it straight
to what it compiled. Launches are of one kind if their device, the dtypes of their tensors and their constants are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; Triton compiles another kernel for a tensor that does not begin on a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""By kind, with the kernel: a kind has the kernel's id, which stays its own while it is held. Triton's hash takes longer."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | None],
    sizes: tuple[float, ...],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """`kernel[grid](*tensors, *sizes, *constants)`. The kernel must be marked not to be specialized for the sizes, which may
    differ from launch to launch; `options` are Triton's, such as num_warps."""
    assert tensors[0] is not None
    device = tensors[0].get_device()
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    addresses = 0
    for pointer in pointers:
        addresses |= pointer or 0
    kind = (id(kernel), device, constants, *dtypes, *options.values())
    found, _ = _compiled.get(kind, (None, None))
    if found is not None and addresses % ALIGNMENT == 0:
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Numbers for pointers: of a tensor, Triton would ask the driver whether the device can read it.
        found.run(x, y, z, stream, found.function, found.packed_metadata, None, None, None, *pointers, *sizes, *constants)
        return
    found = kernel[grid](*tensors, *sizes, *constants, **options)
    if hasattr(found, "packed_metadata") and addresses % ALIGNMENT == 0:  # the interpreter compiles nothing
        _compiled[kind] = found, kernel


def blocks(size: int, block: int) -> int:
    """How many hold `size`. `triton.cdiv` and `triton.next_power_of_2` are for kernels, and slow outside of one."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least that holds `size`."""
    return 1 << max(0, size - 1).bit_length()
