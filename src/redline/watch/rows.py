"""The row of metrics that every step leaves in `metrics.jsonl`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redline.engine.stats import metrics_between
from redline.telemetry import MetricsLog
from redline.telemetry.delays import Delays
from redline.telemetry.files.failure import steps_logged
from redline.telemetry.ledger import by_section
from redline.telemetry.summary.attempts import attempt_metrics
from redline.telemetry.summary.failed_attempts import FailureTally
from redline.telemetry.summary.phases import TRAINER_PARTS, EngineParts, part_seconds
from redline.telemetry.summary.timeline import ROLLOUTS_PREFIX, by_phase, step_phases
from redline.types import StepReport, TrainBatch, Trajectory, TrajectoryGroup, WeightUpdate
from redline.watch.outputs import Outputs
from redline.watch.part_names import PartNames
from redline.watch.watched import Watched

NUM_GROUPS_SHOWN = 2
"""Groups, with all their attempts, for listeners that want to see some of what was sampled."""


@dataclass(slots=True, frozen=True)
class FinishedStep:
    """One step of the loop, as its row tells of it."""

    groups: Sequence[TrajectoryGroup]
    """Groups that arrived during the step; some are trained on later. None where a batch was ready before it."""
    batch: TrainBatch
    report: StepReport
    update: WeightUpdate
    span_ns: Mapping[str, int]
    """Span → nanoseconds that belong to it alone; the sum is the step's wall time."""
    taken_over_tokens: int = 0
    """How many of the tokens in `groups` an earlier process sampled."""

    @property
    def attempts(self) -> list[list[Trajectory]]:
        """The sequences of each attempt that arrived."""
        return [attempt for group in self.groups for attempt in group.attempts]


class StepRows:
    """Collects the groups of a step and writes its row: to the file, to the listeners and to the console."""

    def __init__(
        self, outputs: Outputs, stages: Watched, peak_flops: float | None = None, delays: Delays | None = None
    ) -> None:
        """`peak_flops` is what the trainer's devices can do in a second; without it a row has no MFU. Steps that `delays` made
        longer say so."""
        self._outputs = outputs
        self._delays = delays
        self._began_s = time.time()
        self._stages = stages
        self._peak_flops = peak_flops
        self._log = MetricsLog(outputs.folder.metrics)
        self._stats_before = stages.engine_stats()
        self._engine_parts = EngineParts(outputs.recorder)
        self._groups: list[TrajectoryGroup] = []
        self._num_taken_over = 0
        """The first of these groups: an earlier process made them."""
        self._part_names = PartNames()
        self._reward = math.nan
        """The mean of the groups that arrived last."""
        self.failures = FailureTally()
        """All attempts that this process has made, evaluations apart."""
        self.num_groups_counted: int | None = 0
        """Groups in the rows up to the checkpoint that the run was resumed from; None where some of these rows are missing."""

    def collect(self, group: TrajectoryGroup) -> None:
        self._groups.append(group)

    def take_over(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Count groups of an earlier process that no row has counted. The engine's speed leaves them out."""
        self._groups += groups
        self._num_taken_over = len(self._groups)

    def write(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> FailureTally:
        """Write the step's row. Returns how the attempts went that this process has made for it."""
        step = FinishedStep(self._groups, batch, report, update, self._outputs.recorder.step_mark(), self._taken_over_tokens())
        made_here = failures_of(self._groups[self._num_taken_over :])
        metrics = step_metrics(step, self._peak_flops)
        metrics |= metrics_between(self._stats_before, self._stages.engine_stats())
        metrics |= self._engine_parts.mark()
        metrics |= _speed_beside(metrics)
        metrics |= self._stages.buffer_metrics()
        metrics |= self._stages.worker_metrics()
        metrics["run/began_s"] = self._began_s
        self._tell(step, metrics, made_here)
        self.failures.add(own[0] for group in self._groups[self._num_taken_over :] for own in group.attempts)
        self._groups, self._num_taken_over = [], 0
        return made_here

    def _taken_over_tokens(self) -> int:
        taken_over = self._groups[: self._num_taken_over]
        return sum(t.num_completion_tokens for group in taken_over for t in group.trajectories)

    def _tell(self, step: FinishedStep, metrics: Mapping[str, float], made_here: FailureTally) -> None:
        outputs, version = self._outputs, step.update.version
        differing = self._part_names.news(step.groups)
        for sentence in (*self._stages.news(), *([differing] if differing else [])):
            outputs.progress.note(sentence)
        delayed = self._delays.mark() if self._delays else {}
        outputs.listeners.step(self._log.append(version, {**metrics, **_reason(step.groups), **delayed}))
        if step.groups:
            if not math.isnan(metrics["rollouts/reward_mean"]):
                self._reward = metrics["rollouts/reward_mean"]
            if outputs.listeners.want_trajectories:
                outputs.listeners.trajectories({"step": version, "samples": sampled(step.groups)})
        speed, seconds = metrics["engine/tokens_per_s"], metrics["run/step_s"]
        phases, reused = step_phases(metrics), self._num_taken_over
        outputs.progress.step(version, self._reward, speed, seconds, phases, made_here.share, reused)

    def mark(self) -> None:
        """Begin a step here: time and tokens up to now belong to no step."""
        self._outputs.recorder.step_mark()
        self._engine_parts.mark()
        self._stats_before = self._stages.engine_stats()

    def rewind(self, version: int, aside: Path | None) -> None:
        """Cut the rows after `version`, whose steps are taken again; into the folder `aside`, where there is one."""
        self._log.rewind(version, aside)
        logged = steps_logged(self._outputs.folder)
        if logged < version:
            self._outputs.progress.note(
                f"metrics.jsonl ends at step {logged}: the rows of the steps up to {version} are missing"
            )
            self.num_groups_counted = None
        else:
            self.num_groups_counted = MetricsLog.total(self._outputs.folder.metrics, "rollouts/groups")

    def flush(self) -> None:
        """Block until the disk has every row."""
        self._log.flush_to_disk()

    def close(self) -> None:
        self._log.close()


def failures_of(groups: Iterable[TrajectoryGroup]) -> FailureTally:
    """How the attempts in these groups went."""
    tally = FailureTally()
    tally.add(own[0] for group in groups for own in group.attempts)
    return tally


def _reason(groups: Iterable[TrajectoryGroup]) -> dict[str, str | None]:
    """Why most of a step's failures failed, or None. Groups of an earlier process count: a resumed run writes the same row as
    one that was never killed."""
    return {"rollouts/failure_reason": failures_of(groups).line}


def _speed_beside(metrics: Mapping[str, float]) -> dict[str, float]:
    """The speed of an engine that runs beside the trainer: what it sampled during the step, over its own time. The groups that
    arrived hold tokens of earlier steps too."""
    seconds, tokens = metrics.get(f"{ROLLOUTS_PREFIX}generation_s"), metrics.get("engine/generated_tokens")
    return {} if seconds is None or tokens is None else {"engine/tokens_per_s": tokens / max(1e-9, seconds)}


def step_metrics(step: FinishedStep, peak_flops: float | None = None) -> dict[str, float]:
    """The metrics of one step that follow from what the loop saw of it."""
    sections = {section: ns / 1e9 for section, ns in by_section(step.span_ns).items()}
    phases = {phase: ns / 1e9 for phase, ns in by_phase(step.span_ns).items()}
    new_tokens = sum(t.num_completion_tokens for group in step.groups for t in group.trajectories)
    sampled_here = new_tokens - step.taken_over_tokens
    generation_s = phases.get("generation", sum(phases.values()))
    # Where all was sampled by an earlier process there is no speed, and 0 would be a lie.
    has_speed = sampled_here or not step.taken_over_tokens
    batch = step.batch
    return {
        **attempt_metrics(step.groups),
        "engine/new_tokens": new_tokens,
        "engine/tokens_per_s": sampled_here / max(1e-9, generation_s) if has_speed else math.nan,
        "buffer/policy_lag_steps": batch.lag,
        "buffer/policy_lag_p50_steps": median(batch.lags) if batch.lags else batch.lag,
        "buffer/policy_lag_max_steps": max(batch.lags, default=batch.lag),
        **_trainer_metrics(step, sections.get("trainer", 0.0), peak_flops),
        "weight_sync/bytes_moved": step.update.bytes_moved,
        **{f"weight_sync/{part}_s": seconds for part, seconds in step.update.seconds.items()},
        "weight_sync/total_s": phases.get("weight_sync", 0.0) + phases.get("wait_for_engine", 0.0),
        "run/step_s": sum(sections.values()),
        "run/samples_per_s": batch.num_attempts_sampled / max(1e-9, sum(sections.values())),
        "run/time_s": time.time(),
        **{f"time/{section}_s": seconds for section, seconds in sections.items()},
        **{f"timeline/{phase}_s": seconds for phase, seconds in phases.items()},
    }


def _trainer_metrics(step: FinishedStep, seconds: float, peak_flops: float | None) -> dict[str, float]:
    """`seconds` is what the trainer's spans took."""
    report, flops_per_s = step.report, step.report.flops / max(1e-9, seconds)
    return {
        "trainer/loss": report.loss,
        "trainer/grad_norm": report.grad_norm,
        "trainer/learning_rate": report.learning_rate,
        "trainer/entropy": report.entropy,
        "trainer/clip_fraction": report.clip_fraction,
        "trainer/mismatch_kl": report.mismatch_kl,
        "trainer/max_ratio": report.max_ratio,
        "trainer/tokens": report.num_tokens,
        "trainer/trained_tokens": report.num_trained_tokens,
        "trainer/tokens_per_s": report.num_tokens / max(1e-9, seconds),
        "trainer/micro_batches": report.num_micro_batches,
        "trainer/imbalance": report.imbalance,
        "trainer/padding_tokens": report.num_padding_tokens,
        "trainer/skipped": report.skipped,
        "trainer/flops_per_s": flops_per_s,
        **({"trainer/mfu": flops_per_s / peak_flops} if peak_flops and report.flops else {}),
        **part_seconds("trainer", TRAINER_PARTS, step.span_ns),
        **{f"trainer/{name}": value for name, value in report.extra.items()},
    }


def sampled(groups: Sequence[TrajectoryGroup]) -> list[dict[str, Any]]:
    """The sequences of the attempts of the first groups, for people to read."""
    return [
        {
            "task": group.task_id,
            "attempt": index,
            "role": attempt.role,
            "version": attempt.versions.newest,
            "answer": attempt.text,
            "reward": attempt.reward,
            "finish_reason": str(attempt.finish_reason),
            "tokens": attempt.num_completion_tokens,
        }
        for group in groups[:NUM_GROUPS_SHOWN]
        for index, sequences in enumerate(group.attempts)
        for attempt in sequences
    ]
