"""Sums of gradients, kept by a test."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.models.layers.gradient_sums import keep_sum


class Kept:
    """A sum that holds rubbish until its first gradient."""

    def __init__(self, parameter: Tensor) -> None:
        self.total = torch.full(parameter.shape, torch.nan)
        self.num_gradients = 0
        self.end = keep_sum(parameter, self.place)

    def place(self) -> tuple[Tensor, bool]:
        self.num_gradients += 1
        return self.total, self.num_gradients == 1
