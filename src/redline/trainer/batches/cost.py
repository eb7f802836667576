"""What a run of tokens costs, so that work can be divided evenly and a prompt shared only where that pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.models.sizes.memory import idle_parameters
from redline.models.spec import ModelShape


@dataclass(slots=True, frozen=True)
class CostModel:
    """Time in units of one token through the matrices of the network."""

    per_pair: float = 1e-4
    """One token that attends to one other, in all layers. The default is that of a network of half a billion parameters."""
    per_segment: float = 2.0
    """One attempt that attends to a shared prompt: its keys are gathered once more. On the CPU that was within a token of
    nothing; a little more keeps prompts of a few tokens plain."""

    @classmethod
    def of(cls, shape: ModelShape, num_parameters: int) -> CostModel:
        """Products with P parameters take 2 · P operations per token, attention 4 · H · D per pair and layer. Experts that a
        token does not go to take none."""
        active = num_parameters - idle_parameters(shape)
        return cls(per_pair=2 * shape.num_layers * shape.num_heads * shape.head_dim / active)

    def run(self, own: np.ndarray, before: np.ndarray) -> np.ndarray:
        """The cost of `own` tokens that continue `before` others: own + per_pair · (own · before + own · (own + 1) / 2).

        Runs add up: `run(p, 0) + run(q, p) == run(p + q, 0)`.
        """
        return own + self.per_pair * own * (before + (own + 1) / 2)

    def sharing_pays(self, prompt: np.ndarray, attempts: np.ndarray) -> np.ndarray:
        """bool: whether one prompt for all attempts saves more than it costs to let them all attend to it."""
        return (attempts - 1) * self.run(prompt, np.zeros_like(prompt)) > attempts * self.per_segment
