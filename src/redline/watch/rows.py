"""The row of metrics that a step leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from redline.telemetry.ledger import by_section
from redline.telemetry.summary.failed_attempts import FailureTally
from redline.telemetry.summary.percentiles import latency_metrics
from redline.telemetry.summary.phases import TRAINER_PARTS, part_seconds
from redline.telemetry.summary.timeline import ROLLOUTS_PREFIX, by_phase
from redline.types import FinishReason, StepReport, TrainBatch, TrajectoryGroup, WeightUpdate

NUM_GROUPS_SHOWN = 2
"""With all their attempts, to listeners that want to see some of what was sampled."""


def failures_of(groups: Iterable[TrajectoryGroup]) -> FailureTally:
    tally = FailureTally()
    tally.add(t for group in groups for t in group.trajectories)
    return tally


def reason_of(groups: Iterable[TrajectoryGroup]) -> dict[str, str | None]:
    """Why most of a step's failures failed, for its row; None where none did. Whichever process made them: the row of a resumed
    run is that of one that was never killed."""
    failure = failures_of(groups).commonest
    return {"rollouts/failure_reason": None if failure is None else str(failure)}


def speed_beside(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of an engine that runs beside the trainer: what it sampled during the step, over its own time. The groups that arrived
    were sampled before as well."""
    seconds, tokens = metrics.get(f"{ROLLOUTS_PREFIX}generation_s"), metrics.get("engine/generated_tokens")
    return {} if seconds is None or tokens is None else {"engine/tokens_per_s": tokens / max(1e-9, seconds)}


def step_metrics(
    groups: Sequence[TrajectoryGroup],
    batch: TrainBatch,
    report: StepReport,
    update: WeightUpdate,
    span_ns: dict[str, int],
    peak_flops: float | None = None,
    taken_over_tokens: int = 0,
) -> dict[str, float]:
    """The row of one step. `groups` arrived during it, and may be trained on later; `span_ns` holds the exclusive time of each
    span, and the sum is the step's wall time."""
    attempts = [t for group in groups for t in group.trajectories]
    new_tokens = sum(t.num_completion_tokens for t in attempts)
    sections = {section: ns / 1e9 for section, ns in by_section(span_ns).items()}
    phases = {phase: ns / 1e9 for phase, ns in by_phase(span_ns).items()}
    flops_per_s = report.flops / max(1e-9, sections.get("trainer", 0.0))
    parts = sorted({name for t in attempts for name in t.reward_parts})
    return {
        "rollouts/reward_mean": _mean([t.reward for t in attempts]),
        **{f"rollouts/reward_{part}_mean": _mean([t.reward_parts.get(part, 0.0) for t in attempts]) for part in parts},
        "rollouts/reward_std": _std([t.reward for t in attempts if t.failure is None]),
        "rollouts/groups": len(groups),
        "rollouts/groups_with_signal": sum(group.has_signal for group in groups),
        "rollouts/failures": sum(t.failure is not None for t in attempts),
        "rollouts/stopped_fraction": _mean([t.finish_reason == FinishReason.STOP for t in attempts]),
        "rollouts/completion_tokens_mean": _mean([t.num_completion_tokens for t in attempts]),
        **latency_metrics(groups),
        "engine/new_tokens": new_tokens,
        "engine/tokens_per_s": (new_tokens - taken_over_tokens) / max(1e-9, phases.get("generation", sum(phases.values()))),
        "buffer/policy_lag_steps": batch.lag,
        "buffer/policy_lag_p50_steps": median(batch.lags) if batch.lags else batch.lag,
        "buffer/policy_lag_max_steps": max(batch.lags, default=batch.lag),
        "trainer/loss": report.loss,
        "trainer/grad_norm": report.grad_norm,
        "trainer/learning_rate": report.learning_rate,
        "trainer/entropy": report.entropy,
        "trainer/clip_fraction": report.clip_fraction,
        "trainer/mismatch_kl": report.mismatch_kl,
        "trainer/max_ratio": report.max_ratio,
        "trainer/tokens": report.num_tokens,
        "trainer/trained_tokens": report.num_trained_tokens,
        "trainer/tokens_per_s": report.num_tokens / max(1e-9, sections.get("trainer", 0.0)),
        "trainer/micro_batches": report.num_micro_batches,
        "trainer/imbalance": report.imbalance,
        "trainer/padding_tokens": report.num_padding_tokens,
        "trainer/skipped": report.skipped,
        "trainer/flops_per_s": flops_per_s,
        **({"trainer/mfu": flops_per_s / peak_flops} if peak_flops else {}),
        **part_seconds("trainer", TRAINER_PARTS, span_ns),
        **{f"trainer/{name}": value for name, value in report.extra.items()},
        "weight_sync/bytes_moved": update.bytes_moved,
        "weight_sync/total_s": phases.get("weight_sync", 0.0) + phases.get("wait_for_engine", 0.0),
        "run/step_s": sum(sections.values()),
        "run/samples_per_s": batch.num_sequences_sampled / max(1e-9, sum(sections.values())),
        "run/time_s": time.time(),
        **{f"time/{section}_s": seconds for section, seconds in sections.items()},
        **{f"timeline/{phase}_s": seconds for phase, seconds in phases.items()},
    }


def sampled(groups: Sequence[TrajectoryGroup]) -> list[dict[str, Any]]:
    """The attempts of the first groups, for people to read."""
    return [
        {
            "task": group.task_id,
            "version": attempt.versions.newest,
            "answer": attempt.text,
            "reward": attempt.reward,
            "finish_reason": str(attempt.finish_reason),
            "tokens": attempt.num_completion_tokens,
        }
        for group in groups[:NUM_GROUPS_SHOWN]
        for attempt in group.trajectories
    ]


def _std(values: Sequence[float]) -> float:
    """Exactly 0 where all are equal; NaN where there are none."""
    return (float(np.std(values)) if len(set(values)) > 1 else 0.0) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    """NaN where there are none, which a row of metrics has as null."""
    return sum(values) / len(values) if values else math.nan
