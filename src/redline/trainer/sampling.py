"""What the trainer has to know of the rollouts that make its batches."""

from __future__ import annotations

from dataclasses import dataclass

from redline.config.sections.rollouts import AdvantageEstimator


@dataclass(slots=True, frozen=True)
class Sampling:
    """Keys of the recipe's section `rollouts`, which says what each means."""

    temperature: float = 1.0
    advantages: AdvantageEstimator = "group"
    max_new_tokens: int = 1
