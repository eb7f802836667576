"""How long things took: percentiles of what arrived during a step, for its row of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from redline.types import TrajectoryGroup

PERCENTILES = (50, 90, 99)


def percentiles_of(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """`name_p50_s`, `name_p90_s`, `name_p99_s`; NaN where there is nothing, which a row of metrics has as null."""
    values = np.array([value for value in seconds if math.isfinite(value)])
    found = np.percentile(values, PERCENTILES) if len(values) else [math.nan] * len(PERCENTILES)
    return {f"{name}_p{rank}_s": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}


def latency_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Percentiles of how long groups took that arrived in a step, their attempts, and the engine's part of these."""
    attempts = [t.turns for group in groups for t in group.trajectories if t.turns]
    turns = [turn for attempt in attempts for turn in attempt]
    return {
        **percentiles_of("rollouts/latency", (group.latency_s for group in groups)),
        **percentiles_of("rollouts/attempt_latency", (sum(turn.total_s for turn in attempt) for attempt in attempts)),
        **percentiles_of("engine/queue", (turn.queue_s for turn in turns)),
        **percentiles_of("engine/first_token", (turn.first_token_s for turn in turns if turn.num_tokens)),
        **percentiles_of("engine/inter_token", (t.decode_s / (t.num_tokens - 1) for t in turns if t.num_tokens > 1)),
    }
