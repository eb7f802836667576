"""How the optimizer's state lies in flat tensors, for the code that lays it out and for the kernel that updates it.

A moment in 8 bits is a level of a logarithmic scale; `trainer/optimizer/quantized_states.py` has the formula. The numbers of
levels and octaves stand here because a state written by one of the two must be read by the other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK = 256
"""Elements; every parameter begins on a multiple of it, and each block of an 8-bit moment has one scale."""
FIRST_LEVELS, FIRST_OCTAVES = 127, 16
"""Levels of the first moment in 8 bits, beside its sign."""
SECOND_LEVELS, SECOND_OCTAVES = 255, 32
"""Levels of the second moment, which has no sign; a square spans twice the octaves of its root."""


@dataclass(slots=True, frozen=True)
class Piece:
    """The part of one parameter that lies in a stretch."""

    name: str
    start: int
    """First element, in the flattened parameter."""
    length: int
    at: int
    """Where that element lies in the stretch."""

    def of_parameter(self, tensor: Tensor) -> Tensor:
        """These elements of a tensor shaped like the parameter."""
        return tensor.view(-1)[self.start : self.start + self.length]

    def of_stretch(self, flat: Tensor) -> Tensor:
        """These elements of a tensor that holds the stretch."""
        return flat[self.at : self.at + self.length]


@dataclass(slots=True, frozen=True)
class Stretch:
    """Elements that the optimizer updates at once. It may cut a large parameter in two."""

    start: int
    """First element, in the flat tensor."""
    length: int
    decayed: bool
    """Weight decay is for matrices only."""
    pieces: tuple[Piece, ...]


@dataclass(slots=True, frozen=True)
class Update:
    """The numbers of one update, the same for every stretch."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    taken: Tensor
    """Updates so far, this one included."""
    clip: Tensor
    """What the gradients are divided by."""
    skip: Tensor
    """Not 0 where nothing may change."""
    seed: int
    """For the rounding of moments in 8 bits; differs from update to update."""
