"""What several rules ask: attempts and rows, with every engine and every step of lag counted; cores; what is no cost."""

from __future__ import annotations

import os

import numpy as np

from redline.lab.doctor.facts import Facts

BOOKKEEPING_S = 0.02
"""Seconds a step that tasks, rows of logs and batches take in any run, on any machine."""


def is_bookkeeping(seconds: np.ndarray) -> bool:
    """Whether the seconds of each step are no more than any run takes for its books."""
    return float(seconds.mean()) < BOOKKEEPING_S


def attempts_at_once(facts: Facts) -> int:
    """Attempts that may be under way at once: those of a batch, and with a lag of as many later ones."""
    attempts = facts.setting("rollouts.groups_per_step", 0) * facts.setting("rollouts.group_size", 0)
    return int(attempts * (1 + facts.setting("buffer.max_lag", 0)))


def num_engines(facts: Facts) -> int:
    """Engines that share these attempts."""
    return max(1, int(facts.setting("placement.engines", 0)))


def rows_of_an_engine(facts: Facts) -> float:
    """Sequences that one engine could decode at once."""
    own = attempts_at_once(facts) / num_engines(facts)
    return float(max(1.0, min(facts.setting("engine.max_num_seqs", 256), own)))


def usable_cores(facts: Facts) -> int:
    """Cores of the machine that the run may use."""
    return (facts.environment.get("cpu") or {}).get("usable_cores") or os.cpu_count() or 1
