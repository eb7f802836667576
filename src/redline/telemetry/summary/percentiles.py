"""How long things took: percentiles of what arrived during a step, for its row of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from redline.types import TrajectoryGroup

PERCENTILES = (50, 90, 99)
PHASES = {
    "environment": "rollouts/environment",
    "prompt": "rollouts/prompt",
    "queue": "engine/queue",
    "prefill": "engine/prefill",
    "decode": "engine/decode",
    "parse": "rollouts/parse",
    "score": "rollouts/score",
}
"""Phases of a turn in the order in which they pass, and the scoring of its attempt, with the metric of each."""


def percentiles_of(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """`name_p50_s`, `name_p90_s`, `name_p99_s`; NaN where there is nothing, which a row of metrics has as null."""
    values = np.array([value for value in seconds if math.isfinite(value)])
    found = np.percentile(values, PERCENTILES) if len(values) else [math.nan] * len(PERCENTILES)
    return {f"{name}_p{rank}_s": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}


def latency_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Percentiles of how long groups took that arrived in a step, their attempts, and the engine's part of these."""
    attempts = [[turn for t in own for turn in t.turns] for group in groups for own in group.attempts]
    turns = [turn for attempt in attempts for turn in attempt]
    return {
        **percentiles_of("rollouts/latency", (group.latency_s for group in groups)),
        **percentiles_of("rollouts/attempt_latency", (sum(t.total_s for t in attempt) for attempt in attempts if attempt)),
        **percentiles_of("engine/queue", (turn.queue_s for turn in turns)),
        **percentiles_of("engine/first_token", (turn.first_token_s for turn in turns if turn.num_tokens)),
        **percentiles_of("engine/inter_token", (t.decode_s / (t.num_tokens - 1) for t in turns if t.num_tokens > 1)),
    }


def phase_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Percentiles of each phase of the turns that arrived in a step, and of the scoring of their attempts. A phase that nothing
    measured is left out: attempts of a single turn build their prompts and score their replies together."""
    attempts = [own for group in groups for own in group.attempts]
    turns = [turn for own in attempts for t in own for turn in t.turns]
    phases = {
        "rollouts/environment": [turn.environment_s for turn in turns],
        "rollouts/prompt": [turn.prompt_s for turn in turns],
        "engine/prefill": [turn.prefill_s for turn in turns],
        "engine/decode": [turn.decode_s for turn in turns],
        "rollouts/parse": [turn.parse_s for turn in turns],
        "rollouts/score": [own[0].score_s for own in attempts],
    }
    measured = {name: seconds for name, seconds in phases.items() if any(value > 0 for value in seconds)}
    return {key: value for name, seconds in measured.items() for key, value in percentiles_of(name, seconds).items()}


def median_phases(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of each phase over the rows of a run: `{"decode": {"p50": …, "p90": …, "p99": …}, …}`, each the median of the
    steps that have it; what nothing measured is left out."""
    found: dict[str, dict[str, list[float]]] = {phase: {f"p{rank}": [] for rank in PERCENTILES} for phase in PHASES}
    for row in rows:
        for phase, name in PHASES.items():
            for rank, values in found[phase].items():
                value = row.get(f"{name}_{rank}_s")
                if isinstance(value, int | float):
                    values.append(value)
    known = {phase: {rank: median(values) for rank, values in ranks.items() if values} for phase, ranks in found.items()}
    return {phase: ranks for phase, ranks in known.items() if ranks}
