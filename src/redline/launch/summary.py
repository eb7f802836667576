"""What a run says at its end, to a person and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from redline.config import Config
from redline.launch.budgets import budget_remark
from redline.telemetry import RunFolder
from redline.telemetry.console.end_of_run import EndOfRun, end_of_run
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.machine.samplers import read_samples
from redline.telemetry.summary.failed_attempts import WORTH_SAYING
from redline.telemetry.summary.held_out import HeldOut
from redline.telemetry.summary.learning import Learning
from redline.telemetry.summary.percentiles import median_phases
from redline.telemetry.summary.targets import verdicts
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch

KINDS_SHOWN = 10
"""Kinds of failures, the most frequent."""


def summary(config: Config, outputs: Outputs, watch: RunWatch, version: int, context: int) -> dict[str, Any]:
    """Show a person how a run of `version` steps went, and return the same as data. `context`: tokens of the longest sequence
    that its engine takes."""
    folder, ledger, finished = outputs.folder, outputs.recorder.ledger(), watch.is_complete
    judged = verdicts(MetricsLog.read(folder.metrics), read_samples(folder.samples), config)
    learning = Learning(MetricsLog.read(folder.metrics), config.rollouts.group_size)
    held_out = HeldOut.read(MetricsLog.read(folder.evaluations))
    first, last = min(watch.evaluations.samples, default=0), max(watch.evaluations.samples, default=0)
    end = EndOfRun(
        run=str(folder.shown),
        steps=version,
        finished=finished,
        held_out=held_out,
        samples=(watch.evaluations.samples[first], watch.evaluations.samples[last]) if first < last else None,
        remarks=list(_remarks(config, folder, watch, learning, context)),
        model=str(folder.shown / folder.model.name) if finished and learning.why_not is None else None,
        targets=judged,
        ledger=ledger,
    )
    for part in end_of_run(end):
        outputs.progress.console.print(part, soft_wrap=isinstance(part, Text))
    return {
        "run": str(folder.shown),
        "steps": version,
        "finished": finished,
        "model": str(folder.shown / folder.model.name) if finished else None,
        "weights_changed": learning.moved_weights,
        "why_not": learning.why_not,
        "evaluation": {str(version): reward for version, reward in sorted(watch.evaluations.rewards.items())},
        "accuracy": {str(version): share for version, share in sorted(watch.evaluations.accuracies.items())},
        "held_out": held_out.as_json() if held_out else None,
        "attempts": watch.rows.failures.num_attempts,
        "failures": watch.rows.failures.num_failed,
        "turn_seconds": median_phases(MetricsLog.read(folder.metrics)),
        "failures_by_kind": [{"failure": str(one), "attempts": count} for one, count in watch.rows.failures.kinds(KINDS_SHOWN)],
        "failure_reason": watch.rows.failures.line,
        "targets": [asdict(verdict) for verdict in judged],
        "unaccounted_fraction": ledger.lanes["main"].unaccounted_fraction,
        "wall_s": ledger.lanes["main"].wall_ns / 1e9,
    }


def _remarks(config: Config, folder: RunFolder, watch: RunWatch, learning: Learning, context: int) -> Iterator[str]:
    """What went wrong: attempts that failed, and steps or a whole run that moved no weights."""
    quiet, model = learning.steps_without_signal, folder.shown / folder.model.name
    patience = config.telemetry.alerts.not_learning
    if watch.rows.failures.share > WORTH_SAYING:
        yield f"{watch.rows.failures.sentence()}; see redline show {folder.shown} --failures"
    if learning.why_not is not None:
        yield f"nothing was learned: {learning.why_not}"
        if learning.is_cut_short:
            yield budget_remark(config.rollouts, context, learning)
        kept = "only decayed" if config.trainer.weight_decay else "are those that the run began with"
        if watch.is_complete:
            yield f"the weights in {model} {kept}; `redline show {folder.shown}` has the attempts and their rewards"
    elif patience is not None and quiet >= patience:
        yield f"nothing was learned in the last {quiet} steps: all attempts of every group scored alike"
