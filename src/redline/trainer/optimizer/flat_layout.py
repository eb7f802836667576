"""Where each parameter lies when all of them are laid end to end: one flat tensor for the gradients, one per Adam moment.

    flat      │ embed ·· │ layers.0.qkv.weight ·· │ … │ norm ·· │        ·· rounds up to a whole block
    stretch   └──────── 0 ────────┴──── 1 ────┘       └── 2 ──┘        matrices first; a stretch is decayed as a whole

A stretch is what the optimizer works on at once, and may cut a large parameter in two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from redline.kernels.flat_state import BLOCK, Piece, Stretch


class FlatLayout:
    """Offsets of named tensors in a flat one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        ordered = sorted(tensors, key=lambda name: tensors[name].dim() <= 1)  # stable: matrices first
        self._shapes = {name: tensors[name].shape for name in ordered}
        self._starts: dict[str, int] = {}
        self.num_elements = 0
        """Blocks filled up; a multiple of `BLOCK`."""
        self._num_decayed = 0
        for name in ordered:
            self._starts[name] = self.num_elements
            self.num_elements += _whole_blocks(self._shapes[name].numel())
            if len(self._shapes[name]) > 1:
                self._num_decayed = self.num_elements

    def view(self, flat: Tensor, name: str) -> Tensor:
        """One parameter's part of `flat`: in its shape where there is an entry per element, else its blocks' entries."""
        start, shape = self._starts[name], self._shapes[name]
        if len(flat) == self.num_elements:
            return flat[start : start + shape.numel()].view(shape)
        return flat[start // BLOCK : (start + _whole_blocks(shape.numel())) // BLOCK]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: self.view(flat, name) for name in self._shapes}

    def stretches(self, most: int | None = None) -> list[Stretch]:
        """All elements in order, at most `most` at a time (a multiple of `BLOCK`); by default as few stretches as can be."""
        found = []
        for start, end in ((0, self._num_decayed), (self._num_decayed, self.num_elements)):
            for first in range(start, end, most or max(1, end - start)):
                last = min(end, first + (most or end))
                found.append(Stretch(first, last - first, end <= self._num_decayed, tuple(self._pieces(first, last))))
        return found

    def _pieces(self, first: int, last: int) -> Iterator[Piece]:
        for name, start in self._starts.items():
            begin, end = max(first, start), min(last, start + self._shapes[name].numel())
            if begin < end:
                yield Piece(name, begin - start, end - begin, begin - first)


def part(flat: Tensor, stretch: Stretch, num_elements: int) -> Tensor:
    """The entries of a stretch in a flat tensor that has one per element, or one per block."""
    per_entry = num_elements // len(flat)
    return flat[stretch.start // per_entry : (stretch.start + stretch.length) // per_entry]


def flat_zeros(layout: FlatLayout, device: torch.device) -> Tensor:
    return torch.zeros(layout.num_elements, dtype=torch.float32, device=device)


def _whole_blocks(elements: int) -> int:
    return -(-elements // BLOCK) * BLOCK
