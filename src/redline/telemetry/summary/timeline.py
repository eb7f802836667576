"""The timeline: time by what it was spent on, for people who know reinforcement learning but not our span names.

generation   training   weight_sync   data   environment   reward   wait_for_X (one per X)   other   unaccounted

Each span belongs to one phase, so the phases of a lane sum to its wall time as its spans do. A span that is not in the table,
such as one in a user's own code, is `other`.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from redline.telemetry.ledger import UNACCOUNTED

PHASES = ("generation", "training", "weight_sync", "data", "environment", "reward", "other", UNACCOUNTED)
"""All but the waits, whose names say for whom."""
PREFIX = "timeline/"
"""Prefix of a step's phases in `metrics.jsonl`, as in `timeline/generation_s`. The main lane's sum to the step's time."""
ROLLOUTS_LANE = "rollouts"
"""Where they run beside the trainer: the thread that steps the engine."""
ROLLOUTS_PREFIX = "timeline_rollouts/"
"""Prefix of the phases of that lane over the same time."""
LANES = {ROLLOUTS_LANE: ROLLOUTS_PREFIX, "environments": "timeline_environments/"}
"""Lanes beside the loop's whose phases are in the row of a step, with their prefixes."""
_SPANS = {
    "engine.push_weights": "weight_sync",
    "engine.update_weights": "weight_sync",
    "rollouts.environment": "environment",
    "rollouts.reward": "reward",
    "rollouts.reward_model": "reward",
    "rollouts.setup": "other",
    "trainer.setup": "other",
    UNACCOUNTED: UNACCOUNTED,
}
"""Spans that are not what the rest of their section is."""
_SECTIONS = {
    "engine": "generation",
    "trainer": "training",
    "weight_sync": "weight_sync",
    "buffer": "data",
    "rollouts": "data",
    "environment": "environment",
    "reward": "reward",
}


def phase_of(span: str) -> str:
    """`engine.decode` → `generation`; `wait.for_rollouts` → `wait_for_rollouts`."""
    section, _, part = span.partition(".")
    if section == "wait":
        return f"wait_{part}" if part else "wait"
    return _SPANS.get(span) or _SECTIONS.get(section, "other")


def by_phase(rows: Mapping[str, int]) -> dict[str, int]:
    """ns per phase, of exclusive ns per span."""
    phases: defaultdict[str, int] = defaultdict(int)
    for span, ns in rows.items():
        phases[phase_of(span)] += ns
    return dict(phases)


def step_phases(row: Mapping[str, object]) -> dict[str, float]:
    """Seconds per phase, from a row of `metrics.jsonl`; from its sections where it was written before there were phases."""
    own = dict(_seconds(row, PREFIX))
    if own:
        return own
    phases: defaultdict[str, float] = defaultdict(float)
    for section, value in _seconds(row, "time/"):
        phases[phase_of(section)] += value
    return dict(phases)


def rollouts_phases(row: Mapping[str, object]) -> dict[str, float]:
    """Seconds per phase in the lane of the rollouts; none where they have no lane of their own."""
    return dict(_seconds(row, ROLLOUTS_PREFIX))


def _seconds(row: Mapping[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    for key, name in _named(tuple(row), prefix):
        value = row[key]
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, value


@functools.lru_cache(maxsize=64)
def _named(keys: tuple[str, ...], prefix: str) -> list[tuple[str, str]]:
    """Keys of a row under a prefix, each with what it is the time of. Rows of a run have the same keys, most of them."""
    found = [key for key in keys if key.startswith(prefix) and key.endswith("_s")]
    return [(key, key.removeprefix(prefix).removesuffix("_s")) for key in found]


# ── in words ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_words(phase: str) -> str:
    """`wait_for_rollouts` → `waiting for rollouts`; `weight_sync` → `weight sync`."""
    name = phase.replace("_", " ")
    return "waiting" + name.removeprefix("wait") if phase.startswith("wait") else name


def bottleneck(phases: Mapping[str, float]) -> tuple[str, float] | None:
    """The phase that took the largest part of some time, and its share; None where no time has passed."""
    total = sum(phases.values())
    if total <= 0:
        return None
    largest = max(phases, key=lambda phase: phases[phase])
    return largest, phases[largest] / total
