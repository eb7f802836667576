"""Rows of a matrix by index, where several may be the same one."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None


def selected_rows(x_TE: Tensor, index_M: Tensor) -> Tensor:
    """x[index]. What reaches a row is summed in the same order every time, on a GPU with triton too."""
    if x_TE.is_cuda and _HAS_TRITON:
        from redline.kernels.training import select_rows

        return select_rows(x_TE, index_M)
    return x_TE.index_select(0, index_M)
