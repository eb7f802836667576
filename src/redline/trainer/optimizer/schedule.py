"""The learning rate of every step: linear warm-up, then constant, or a fall along a line or half a cosine.

A pure function of the step's number, so that a resumed run needs nothing but its version."""

from __future__ import annotations

import math

from redline.config.sections.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The learning rate of step `step`, counted from 0.

    rate · (step + 1) / warmup_steps while warming up, then rate · (floor + (1 - floor) · fall(x)), where x is the fraction of
    `decay_steps` behind us, fall(x) = 1 - x or (1 + cos πx) / 2, and floor is `min_lr_ratio`."""
    rising = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return config.learning_rate * rising * _falling(config, max(0, step - config.warmup_steps))


def _falling(config: TrainerConfig, steps: int) -> float:
    if config.lr_scheduler_type == "constant" or not config.decay_steps:
        return 1.0
    done = min(1.0, steps / config.decay_steps)
    if config.lr_scheduler_type == "linear":
        fall = 1 - done
    elif config.lr_scheduler_type == "cosine":
        fall = (1 + math.cos(math.pi * done)) / 2
    else:
        raise AssertionError(config.lr_scheduler_type)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall
