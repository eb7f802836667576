"""How Adam's two moments are kept between steps: as they are, or in 8 bits with one scale per block.

A moment spans many orders of magnitude within a block, so 8 bits are spent on its logarithm. With x = |value| / largest of the
block, level k of L stands for

    x_k = exp(-(L - k) · step),  k = 1 … L,  step = OCTAVES · log 2 / L;  level 0 is zero

Rounding to the nearest level would freeze the second moment: it changes by a thousandth per step, levels lie 9 % apart. So a
value between two levels takes the upper one with the probability that makes the mean exact. The draws come from a generator
seeded by the number of the update: they repeat when a run is resumed.

The second moment is rounded up to level 1 rather than down to zero: it divides, and too small an update is the safe mistake.

This is for any device, and takes dozens of passes over float32 copies. On a CUDA device `kernels/adamw.py` does the same in one
pass over the codes; its draws come from a generator of its own, so a run repeats itself on the kind of device it began on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from redline.kernels.flat_state import BLOCK, FIRST_LEVELS, FIRST_OCTAVES, SECOND_LEVELS, SECOND_OCTAVES

Moments = tuple[Tensor, Tensor]
"""float32 exp_avg and exp_avg_sq of a stretch."""
Kept = Mapping[str, tuple[torch.dtype, int]]
"""What a codec keeps of the moments: flat tensors, name → dtype and elements per entry."""


class Float32Codec:
    """The moments themselves: they are updated where they lie."""

    kept: ClassVar[Kept] = {"exp_avg": (torch.float32, 1), "exp_avg_sq": (torch.float32, 1)}

    def decode(self, kept: Mapping[str, Tensor]) -> Moments:
        return kept["exp_avg"], kept["exp_avg_sq"]

    def encode(self, moments: Moments, kept: Mapping[str, Tensor], skip: Tensor, seed: int) -> None:
        pass


class Int8Codec:
    """Logarithmic levels: sign and 127 for the first moment, 255 for the second."""

    kept: ClassVar[Kept] = {
        "exp_avg": (torch.int8, 1),
        "exp_avg_scale": (torch.float32, BLOCK),
        "exp_avg_sq": (torch.uint8, 1),
        "exp_avg_sq_scale": (torch.float32, BLOCK),
    }

    def decode(self, kept: Mapping[str, Tensor]) -> Moments:
        first = _decode(kept["exp_avg"], kept["exp_avg_scale"], FIRST_LEVELS, FIRST_OCTAVES)
        second = _decode(kept["exp_avg_sq"], kept["exp_avg_sq_scale"], SECOND_LEVELS, SECOND_OCTAVES)
        return first, second

    def encode(self, moments: Moments, kept: Mapping[str, Tensor], skip: Tensor, seed: int) -> None:
        """Overwrite `kept`, unless the scalar `skip` is 1."""
        generator = torch.Generator(skip.device).manual_seed(seed)
        first, first_scale = _encode(moments[0], FIRST_LEVELS, FIRST_OCTAVES, generator)
        second, second_scale = _encode(moments[1], SECOND_LEVELS, SECOND_OCTAVES, generator)
        second = _rounded_up(second, moments[1])
        fresh = {"exp_avg": first, "exp_avg_scale": first_scale, "exp_avg_sq": second, "exp_avg_sq_scale": second_scale}
        for name, tensor in kept.items():
            if name in fresh:
                tensor.copy_(torch.where(skip.bool(), tensor, fresh[name].to(tensor.dtype)))


Codec = Float32Codec | Int8Codec
CODECS: dict[str, type[Codec]] = {"float32": Float32Codec, "int8": Int8Codec}


def bytes_per_moments(states: str) -> float:
    """Bytes that both moments of one parameter take, its share of the blocks' scales included, with these
    `trainer.optimizer_states`."""
    return sum(dtype.itemsize / elements for dtype, elements in CODECS[states].kept.values())


# ── a part of one moment, cut anywhere ─────────────────────────────────────────────────────────────────────────────────

SPREAD = {"exp_avg": (FIRST_LEVELS, FIRST_OCTAVES), "exp_avg_sq": (SECOND_LEVELS, SECOND_OCTAVES)}


def decode_moment(kind: str, codes_N: Tensor, scales: Tensor, first: int) -> Tensor:
    """float32 of codes that begin at element `first` of a flat tensor whose blocks have these scales."""
    begin, padded = first % BLOCK, torch.zeros(-(-(first % BLOCK + len(codes_N)) // BLOCK) * BLOCK, dtype=codes_N.dtype)
    padded[begin : begin + len(codes_N)] = codes_N
    blocks = slice(first // BLOCK, first // BLOCK + len(padded) // BLOCK)
    return _decode(padded, scales[blocks], *SPREAD[kind])[begin : begin + len(codes_N)]


def encode_moment(kind: str, values_N: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The codes of float32 values whose first begins a block, and the scales of their blocks."""
    padded = torch.zeros(-(-len(values_N) // BLOCK) * BLOCK)
    padded[: len(values_N)] = values_N
    codes, scales = _encode(padded, *SPREAD[kind], torch.Generator().manual_seed(seed))
    if kind == "exp_avg_sq":
        codes = _rounded_up(codes, padded)
    return codes[: len(values_N)].to(Int8Codec.kept[kind][0]), scales


def _rounded_up(codes_N: Tensor, values_N: Tensor) -> Tensor:
    """The second moment's levels: none is zero unless the value is."""
    return torch.where(values_N > 0, codes_N.clamp(min=1), codes_N)


def _decode(codes_N: Tensor, scales: Tensor, levels: int, octaves: int) -> Tensor:
    step = octaves * math.log(2) / levels
    level_N = codes_N.float()
    size_N = level_N.abs().sub_(levels).mul_(step).exp_()
    return size_N.mul_(level_N.sign_()).view(-1, BLOCK).mul_(scales[:, None]).view(-1)


def _encode(values_N: Tensor, levels: int, octaves: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """float32 signed levels, and the largest absolute value of each block."""
    step = octaves * math.log(2) / levels
    blocks = values_N.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    # Where the block is all zero the quotient is NaN, and so is the level, until the last line.
    size_N = (blocks / scales[:, None]).abs_().view(-1)
    below_N = size_N.log().div_(step).add_(levels).floor_().clamp_(min=0)
    at_below_N = below_N.sub(levels).mul_(step).exp_().masked_fill_(below_N == 0, 0)
    at_above_N = (below_N - (levels - 1)).mul_(step).exp_()
    up_N = size_N.sub_(at_below_N).div_(at_above_N.sub_(at_below_N))
    below_N += torch.rand(up_N.shape, generator=generator, device=up_N.device) < up_N
    return below_N.clamp_(max=levels).nan_to_num_().mul_(values_N.sign()), scales
