"""The yardstick of `redline perf`: a fixed piece of work that shares the machine's fate with ours, and none of our code.

Products, a softmax and plain Python in about the proportions of a step of a small model. Seconds of ours over seconds of this,
measured in turn, is a number that survives a busy neighbour and a slower clock. Changing a line here changes every
baseline: count `VERSION` up.
"""

from __future__ import annotations

import torch

VERSION = 1
HIDDEN, INTERMEDIATE, ROWS = 384, 1536, 256
BLOCKS = 48
CALLS = 20_000
"""Calls that write to and read from a dictionary."""


class Reference:
    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((ROWS, HIDDEN), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))
        self._rows, self._up, self._down = (torch.randn(shape, generator=generator).to(device) / 32 for shape in shapes)

    @torch.no_grad()
    def run(self) -> float:
        rows = self._rows
        for _ in range(BLOCKS):
            rows = rows + torch.nn.functional.silu(rows @ self._up) @ self._down
            rows = rows + torch.softmax(rows @ rows.T, dim=-1) @ rows
            rows = rows / rows.square().mean(dim=-1, keepdim=True).add(1e-6).sqrt()
        counts: dict[int, int] = {}
        for number in range(CALLS):
            counts[number % 97] = counts.get(number % 97, 0) + 1
        return float(rows.sum()) + len(counts)
