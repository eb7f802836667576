"""Products of a decode step of some rows, cut along K: too many rows for `few_rows`, and too few to occupy the device.

The parts are one batched product in float32, and who takes the result adds them up (`decoder_steps.add_rms_norm`): cuBLAS alone
would cut the same products, and then launch a kernel of its own to add.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 384
"""Of K, in a part."""
MOST_ROWS = 256
"""Beyond these, rows occupy the device by themselves."""


def parts_of(rows: int, columns: int, inner: int) -> int:
    """Into how many a product by a weight [columns, inner] is cut, as measured on an H200 for the shapes of models from 135
    million to 14 billion parameters: the fewer columns and the more K, the more. 1 where that takes no longer."""
    if rows > MOST_ROWS:
        return 1
    if columns <= 2048:
        wanted = 4 if columns <= 1024 or inner >= 4 * columns else 2
    else:
        wanted = 2 if inner >= 2 * columns or rows <= 40 else 1
    return next(parts for parts in (4, 2, 1) if parts == 1 or (parts <= wanted and _cuts(inner, parts)))


def _cuts(inner: int, parts: int) -> bool:
    return inner % (8 * parts) == 0 and inner // parts >= LEAST


def product_in_parts(x_BK: Tensor, weight_NK: Tensor, parts: int) -> Tensor:
    """float32 [parts, B, N], whose sum is x · weightᵀ."""
    (B, K), N = x_BK.shape, len(weight_NK)
    x_PBK = x_BK.view(B, parts, K // parts).transpose(0, 1)
    weight_PKN = weight_NK.view(N, parts, K // parts).permute(1, 2, 0)
    if x_BK.dtype is torch.float32:
        return torch.bmm(x_PBK, weight_PKN)
    return torch.bmm(x_PBK, weight_PKN, out_dtype=torch.float32)
