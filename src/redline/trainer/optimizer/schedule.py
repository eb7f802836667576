"""The learning rate of every step: linear warm-up, then constant, or a fall along a line or half a cosine.

A pure function of the step's number, so that a resumed run needs nothing but its version."""

from __future__ import annotations

import math

from redline.config.sections.trainer import ScheduleConfig, TrainerConfig
from redline.errors import ConfigError


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The learning rate of step `step`, counted from 0.

    rate · (step + 1) / warmup_steps while warming up, then rate · (floor + (1 - floor) · fall(x)), where x is the fraction of
    `decay_steps` behind us, fall(x) = 1 - x or (1 + cos πx) / 2, and floor is `min_ratio`."""
    schedule = config.schedule
    rising = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
    return config.learning_rate * rising * _falling(schedule, max(0, step - schedule.warmup_steps))


def _falling(schedule: ScheduleConfig, steps: int) -> float:
    if schedule.kind == "constant":
        return 1.0
    if schedule.decay_steps is None:  # a run has its own number of steps, what is measured without one has none
        raise ConfigError(
            f"trainer.schedule.kind = {schedule.kind!r}: over how many steps?", "set trainer.schedule.decay_steps"
        )
    done = min(1.0, steps / schedule.decay_steps)
    if schedule.kind == "linear":
        fall = 1 - done
    elif schedule.kind == "cosine":
        fall = (1 + math.cos(math.pi * done)) / 2
    else:
        raise AssertionError(schedule.kind)
    return schedule.min_ratio + (1 - schedule.min_ratio) * fall
