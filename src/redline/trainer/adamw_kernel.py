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

from redline.trainer.flat_layout import BLOCK, Piece, Stretch

ELEMENTS = 1024
"""Of one program."""


class AdamWKernel:
    def __init__(self, stretches: Sequence[Stretch], parameters: Mapping[str, Tensor], weight_decay: float) -> None:
        """Every parameter has to begin on a block of the flat tensors."""
        self._stretches, self._parameters, self._weight_decay = stretches, parameters, weight_decay
        self._addresses: list[int] = []

    def _locate(self) -> None:
        """Parameters stay where they are unless somebody frees them for a while, as an engine that sleeps does."""
        addresses = [parameter.data_ptr() for parameter in self._parameters.values()]
        if addresses == self._addresses:
            return
        pieces = [(stretch, piece) for stretch in self._stretches for piece in stretch.pieces]
        tables = [_rows(stretch, piece, self._parameters[piece.name], self._weight_decay) for stretch, piece in pieces]
        self._weight = next(iter(self._parameters.values()))
        self._table = torch.from_numpy(np.concatenate([table for table, _ in tables])).to(self._weight.device)
        self._decays = torch.from_numpy(np.concatenate([decays for _, decays in tables])).to(self._weight.device)
        self._addresses = addresses

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
        self._locate()
        corrections = torch.stack([1 - beta ** taken.double() for beta in betas]).float()
        _adamw[(len(self._table),)](
            self._table, self._decays, self._weight, state["master"], state["exp_avg"], state["exp_avg_sq"], gradients,
            clip, skip, corrections, learning_rate, *betas, eps, N=ELEMENTS, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def _rows(stretch: Stretch, piece: Piece, weight: Tensor, weight_decay: float) -> tuple[np.ndarray, np.ndarray]:
    """int64[programs, 3]: the first block of the state, the address of the first weight, how many; and float32 decays."""
    first = np.arange(0, piece.length, ELEMENTS)
    assert (stretch.start + piece.at) % BLOCK == 0
    blocks = (stretch.start + piece.at + first) // BLOCK
    addresses = weight.data_ptr() + (piece.start + first) * weight.itemsize
    table = np.stack([blocks, addresses, np.minimum(piece.length - first, ELEMENTS)], axis=1)
    return table.astype(np.int64), np.full(len(first), weight_decay if stretch.decayed else 0.0, np.float32)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    table, decays, like, masters, firsts, seconds, gradients, clip, skip, corrections,
    learning_rate, beta1, beta2, eps, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m ← β₁m + (1-β₁)g,  v ← β₂v + (1-β₂)g²,  w ← w - lr · (λw + (m / c₁) / (√(v / c₂) + ε))."""
    if tl.load(skip) != 0:
        return
    program = tl.program_id(0).to(tl.int64)
    start, length = tl.load(table + 3 * program) * BLOCK, tl.load(table + 3 * program + 2)
    weights = tl.load(table + 3 * program + 1).to(tl.pointer_type(like.dtype.element_ty))
    own = tl.arange(0, N)
    # The state's blocks are filled up, so it may be read in whole vectors; the weights end where they end.
    at, inside = start + own, own < (length + 15) // 16 * 16
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
    if length == N:
        tl.store(tl.multiple_of(weights, 16) + own, master.to(like.dtype.element_ty))
    else:
        tl.store(weights + own, master.to(like.dtype.element_ty), mask=own < length)
