"""A machine as one has it: it slows down as it goes, other people's work comes in bursts, and no two processes are alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from redline.lab.evidence.experiment import Experiment, Metric, Pair, Phase, Round, Wish, run

STEP = Metric("step_s")


@dataclass
class NoisyMachine:
    random: np.random.Generator
    effect: float = 0.0
    """B takes this share longer than A."""
    spread: float = 0.05
    """Of a round, as a logarithm; Student's t with two degrees of freedom, which has no variance."""
    process: float = 0.01
    """What a process is faster or slower by than the next, for its whole life."""
    drift: float = 0.002
    """What the machine slows down by from one measurement to the next."""
    bursts: float = 0.05
    """How often a measurement takes a multiple."""
    first_pays: float = 0.0
    """What whoever runs first takes longer."""
    rounds: int = 4
    _measured: int = field(default=0, init=False)

    def measure(self, phase: Phase, number: int) -> Pair:
        own = self.random.normal(0, self.process, 2)
        own[1] += math.log1p(self.effect) if phase == "A/B" else 0.0
        logs = own + self.spread * self.random.standard_t(2, (self.rounds, 2))
        logs += np.where(self.random.random((self.rounds, 2)) < self.bursts, self.random.pareto(1.5, (self.rounds, 2)), 0)
        a_first = self.random.random(self.rounds) < 0.5
        place = np.where(a_first[:, None], [0, 1], [1, 0])
        time = self._measured + 2 * np.arange(self.rounds)[:, None] + place
        logs += self.drift * time + self.first_pays * (place == 0)
        self._measured += 2 * self.rounds
        seconds = np.exp(np.clip(logs, -50, 50))
        return Pair(
            [
                Round({STEP.name: a}, {STEP.name: b}, bool(first))
                for (a, b), first in zip(seconds.tolist(), a_first, strict=True)
            ]
        )

    def experiment(self, effect: float = 0.05, max_pairs: int = 400) -> Experiment:
        """Asked for `effect`, with as many pairs as it takes."""
        return run(STEP, Wish(effect=effect, max_pairs=max_pairs), self.measure, clock=lambda: 0.0)
