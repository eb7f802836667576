"""One AdamW step over a stretch in one pass: gradient, master and moments read once, and the weights written with them.

    bytes per parameter     read   gradient 4, master 4, moments 8 or 2        written   master 4, moments 8 or 2, weight 2

The state is flat, the weights are separate tensors, so a table says for each program which elements are its own and where the
weights of them are. Where there are no masters the weights are float32, and are read as well. Moments in 8 bits are those of
`trainer/optimizer/quantized_states.py`; they are rounded by numbers drawn from the number of the update and the place of the
element, whichever program makes them. This module needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from redline.kernels import flat_state
from redline.kernels.flat_state import BLOCK, Piece, Stretch, Update
from redline.kernels.launches import launch

ELEMENTS = 1024
"""Elements of one program."""
FIRST_LEVELS, FIRST_OCTAVES = tl.constexpr(flat_state.FIRST_LEVELS), tl.constexpr(flat_state.FIRST_OCTAVES)
SECOND_LEVELS, SECOND_OCTAVES = tl.constexpr(flat_state.SECOND_LEVELS), tl.constexpr(flat_state.SECOND_OCTAVES)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
"""The smallest scale of a block that is not all zero: below it, an inverse is infinite."""


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
        self._weight = next(iter(self._parameters.values()))
        self._tables = {stretch.start: _table(stretch, self._parameters) for stretch in self._stretches}
        self._addresses = addresses

    def step(self, visited: Iterable[tuple[Stretch, Mapping[str, Tensor]]], gradients: Tensor, update: Update) -> None:
        """Updates stretches with their state; `gradients` is flat."""
        self._locate()
        corrections = torch.stack([1 - beta ** update.taken.double() for beta in update.betas]).float()
        for stretch, state in visited:
            table, names = self._tables[stretch.start], ("master", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
            slope = gradients[stretch.start : stretch.start + stretch.length]
            tensors = (
                *(table, self._weight, slope, update.clip, update.skip, corrections),
                *(state.get(name) for name in names),
            )
            decay = self._weight_decay if stretch.decayed else 0.0
            sizes = (update.learning_rate, decay, *update.betas, update.eps, update.seed, stretch.start // BLOCK)
            launch(_adamw, (len(table),), tensors, sizes, (ELEMENTS, BLOCK), num_warps=4)


def _table(stretch: Stretch, parameters: Mapping[str, Tensor]) -> Tensor:
    rows = np.concatenate([_rows(piece, parameters[piece.name]) for piece in stretch.pieces])
    return torch.from_numpy(rows).to(parameters[stretch.pieces[0].name].device)


def _rows(piece: Piece, weight: Tensor) -> np.ndarray:
    """int64[programs, 3]: the first block of the stretch's state, the address of the first weight, and how many."""
    assert piece.at % BLOCK == 0
    first = np.arange(0, piece.length, ELEMENTS)
    addresses = weight.data_ptr() + (piece.start + first) * weight.itemsize
    rows = np.stack([(piece.at + first) // BLOCK, addresses, np.minimum(piece.length - first, ELEMENTS)], axis=1)
    return rows.astype(np.int64)


@triton.jit(
    do_not_specialize=["learning_rate", "decay", "beta1", "beta2", "eps", "seed", "first_block"],
    do_not_specialize_on_alignment=["first_scales", "second_scales"],
)
def _adamw(  # type: ignore[no-untyped-def]
    table, like, gradients, clip, skip, corrections, masters, firsts, first_scales, seconds, second_scales,
    learning_rate, decay, beta1, beta2, eps, seed, first_block, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m ← β₁m + (1-β₁)g,  v ← β₂v + (1-β₂)g²,  w ← w - lr · (λw + (m / c₁) / (√(v / c₂) + ε))."""
    if tl.load(skip) != 0:
        return
    program = tl.program_id(0).to(tl.int64)
    block, length = tl.load(table + 3 * program), tl.load(table + 3 * program + 2)
    address = tl.load(table + 3 * program + 1)
    weights = address.to(tl.pointer_type(like.dtype.element_ty))
    whole = (length == N) & (address % 16 == 0)
    own = tl.arange(0, N)
    # The state's blocks are filled up, so it may be read in whole vectors; the weights end where they end.
    at, inside = block * BLOCK + own, own < (length + 15) // 16 * 16
    gradient = tl.load(gradients + at, mask=inside, other=0.0) * (1 / tl.load(clip))
    first = _moment(firsts, first_scales, at, block, inside, length, FIRST_LEVELS, FIRST_OCTAVES, N, BLOCK)
    first += (1 - beta1) * (gradient - first)
    second = _moment(seconds, second_scales, at, block, inside, length, SECOND_LEVELS, SECOND_OCTAVES, N, BLOCK)
    second = beta2 * second + (1 - beta2) * gradient * gradient
    if masters is not None:
        master = tl.load(masters + at, mask=inside)
    elif whole:
        master = tl.load(tl.multiple_of(weights, 16) + own)
    else:
        master = tl.load(weights + own, mask=own < length)
    master -= learning_rate * decay * master
    root = tl.sqrt(second) * (1 / tl.sqrt(tl.load(corrections + 1)))
    master -= learning_rate / tl.load(corrections) * first / (root + eps)
    if first_scales is None:
        tl.store(firsts + at, first, mask=inside)
        tl.store(seconds + at, second, mask=inside)
    else:
        random = _random(seed, (first_block + block) * BLOCK, N)
        level = _level(first, random, first_scales, block, length, FIRST_LEVELS, FIRST_OCTAVES, N, BLOCK)
        tl.store(firsts + at, tl.where(first < 0, -level, level).to(tl.int8), mask=inside)
        # Halves exchanged, the bits that decide are others.
        random = (random >> 16) | (random << 16)
        level = _level(second, random, second_scales, block, length, SECOND_LEVELS, SECOND_OCTAVES, N, BLOCK)
        tl.store(seconds + at, tl.where(second > 0, tl.maximum(level, 1), 0).to(tl.uint8), mask=inside)
    if masters is not None:
        tl.store(masters + at, master, mask=inside)
    if whole:
        tl.store(tl.multiple_of(weights, 16) + own, master.to(like.dtype.element_ty))
    else:
        tl.store(weights + own, master.to(like.dtype.element_ty), mask=own < length)


@triton.jit
def _moment(  # type: ignore[no-untyped-def]
    codes, scales, at, block, inside, length,
    LEVELS: tl.constexpr, OCTAVES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32, of what is kept."""
    if scales is None:
        moment = tl.load(codes + at, mask=inside, other=0.0)
    else:
        code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
        blocks = tl.arange(0, N // BLOCK)
        scale = tl.load(scales + block + blocks, mask=blocks * BLOCK < length, other=0.0)
        scale = tl.reshape(tl.broadcast_to(scale[:, None], [N // BLOCK, BLOCK]), [N])
        size = tl.exp2((tl.abs(code) - LEVELS) * (OCTAVES / LEVELS)) * scale
        moment = tl.where(code == 0, 0.0, tl.where(code < 0, -size, size))
    return moment


@triton.jit
def _random(seed, start, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint32, 32 random bits for each element from `start` on; one call of the generator serves four."""
    a, b, c, d = tl.randint4x(seed, start // 4 + tl.arange(0, N // 4))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N])


@triton.jit
def _level(  # type: ignore[no-untyped-def]
    values, random, scales, block, length,
    LEVELS: tl.constexpr, OCTAVES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The levels of the absolute values, rounded at random; writes the scales."""
    STEP: tl.constexpr = OCTAVES / LEVELS
    values = tl.abs(values)
    peak = tl.max(tl.reshape(values, [N // BLOCK, BLOCK]), axis=1)
    scale = tl.where(peak > 0, tl.maximum(peak, SMALLEST_SCALE), 0.0)
    blocks = tl.arange(0, N // BLOCK)
    tl.store(scales + block + blocks, scale, mask=blocks * BLOCK < length)
    inverse = 1 / tl.where(peak > 0, scale, 1.0)
    size = values * tl.reshape(tl.broadcast_to(inverse[:, None], [N // BLOCK, BLOCK]), [N])
    below = tl.maximum(tl.floor(_log2(size) * (1 / STEP) + LEVELS), 0.0)
    # A level lies 2^STEP times as high as the one below it, but below level 1 is zero. The odds are in units of 2^-24.
    over = size * tl.exp2((below - LEVELS) * -STEP)
    up = tl.where(below == 0, over * (2.0**-STEP * 2**24), (over - 1) * (2**24 / (2.0**STEP - 1)))
    return tl.minimum(below + ((random >> 8).to(tl.float32) < up).to(tl.float32), LEVELS)


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    """In one instruction, less exact than tl.log2. A value so close to a level that it is put on the wrong side of it gets the
    level itself, which is off by the error: 5e-6 of the value."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)
