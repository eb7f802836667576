"""One AdamW step over all parameters in one pass: gradient, master and moments read once, and the weights written with them.

    bytes per parameter     read   gradient 4, master 4, moments 8        written   master 4, moments 8, weight 2

The state is flat, the weights are separate tensors, so a table says for each program which elements are its own and where the
weights of them are. This module needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.trainer.flat_layout import Stretch

ELEMENTS = 2048
"""Of one program."""


class AdamWKernel:
    """For parameters that stay where they are."""

    def __init__(self, stretches: Sequence[Stretch], parameters: Mapping[str, Tensor], weight_decay: float) -> None:
        rows = [
            (stretch.start + piece.at + first, parameters[piece.name].data_ptr(), piece.start + first, piece.length - first)
            for stretch in stretches
            for piece in stretch.pieces
            for first in range(0, piece.length, ELEMENTS)
        ]
        decays = [
            weight_decay if stretch.decayed else 0.0
            for stretch in stretches
            for piece in stretch.pieces
            for _ in range(0, piece.length, ELEMENTS)
        ]
        weight = next(iter(parameters.values()))
        table = np.array(rows, np.int64)
        table[:, 3] = table[:, 3].clip(max=ELEMENTS)
        self._table = torch.from_numpy(table).to(weight.device)
        self._decays = torch.tensor(decays, dtype=torch.float32, device=weight.device)
        self._like = weight

    def step(
        self,
        state: Mapping[str, Tensor],
        gradients: Tensor,
        taken: Tensor,
        clip: Tensor,
        skip: Tensor,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`taken` counts this step; nothing changes where `skip` is not 0."""
        corrections = torch.stack([1 - beta ** taken.double() for beta in betas])
        _adamw[(len(self._table),)](
            self._table, self._decays, self._like, state["master"], state["exp_avg"], state["exp_avg_sq"], gradients,
            clip, skip, corrections.float(), learning_rate, *betas, eps, N=ELEMENTS, num_warps=8,
        )  # fmt: skip


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, decays, like, masters, firsts, seconds, gradients, clip, skip, corrections,
    learning_rate, beta1, beta2, eps, N: tl.constexpr,
):  # fmt: skip
    """m ← β₁m + (1-β₁)g,  v ← β₂v + (1-β₂)g²,  w ← w - lr · (λw + (m / c₁) / (√(v / c₂) + ε))."""
    if tl.load(skip) != 0:
        return
    program = tl.program_id(0).to(tl.int64)
    start, where = tl.load(table + 4 * program), tl.load(table + 4 * program + 1)
    begin, length = tl.load(table + 4 * program + 2), tl.load(table + 4 * program + 3)
    own = tl.arange(0, N)
    at, inside = start + own, own < length
    gradient = tl.load(gradients + at, mask=inside) / tl.load(clip)
    first = tl.load(firsts + at, mask=inside)
    first += (1 - beta1) * (gradient - first)
    second = tl.load(seconds + at, mask=inside)
    second = beta2 * second + (1 - beta2) * gradient * gradient
    master = tl.load(masters + at, mask=inside)
    master -= learning_rate * tl.load(decays + program) * master
    root = tl.sqrt(second) / tl.sqrt(tl.load(corrections + 1))
    master -= learning_rate / tl.load(corrections) * first / (root + eps)
    tl.store(firsts + at, first, mask=inside)
    tl.store(seconds + at, second, mask=inside)
    tl.store(masters + at, master, mask=inside)
    weights = where.to(tl.pointer_type(like.dtype.element_ty))
    tl.store(weights + begin + own, master.to(like.dtype.element_ty), mask=inside)
