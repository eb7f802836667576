"""Rows of a matrix by index, where several may be the same one."""

from __future__ import annotations

from torch import Tensor

from redline.kernels.available import kernels_serve


def selected_rows(x_TE: Tensor, index_M: Tensor) -> Tensor:
    """x[index]. What reaches a row is summed in the same order every time, on a GPU with triton too."""
    if kernels_serve(x_TE):
        from redline.kernels.training import select_rows

        return select_rows(x_TE, index_M)
    return x_TE.index_select(0, index_M)
