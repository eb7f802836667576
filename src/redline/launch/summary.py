"""What a run says at its end, to a person and as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redline.config import Config
from redline.launch.stages import Stages
from redline.telemetry import Progress, Recorder, RunFolder
from redline.telemetry.console.progress import sample_table
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.machine.samplers import read_samples
from redline.telemetry.summary.failed_attempts import WORTH_SAYING
from redline.telemetry.summary.learning import Learning
from redline.telemetry.summary.targets import summary_line, target_table, verdicts
from redline.watch.run_watch import RunWatch


def summary(
    config: Config, folder: RunFolder, stages: Stages, watch: RunWatch, recorder: Recorder, progress: Progress
) -> dict[str, Any]:
    """Show a person how it went, and give the same as data."""
    console, ledger = progress.console, recorder.ledger()
    finished = watch.is_complete
    if len(watch.evaluations.samples) > 1:
        first, last = min(watch.evaluations.samples), max(watch.evaluations.samples)
        console.print(sample_table(watch.evaluations.samples[first], watch.evaluations.samples[last]))
    console.print(ledger.render())
    judged = verdicts(MetricsLog.read(folder.metrics), read_samples(folder.samples), config)
    console.print(summary_line(judged))
    if missed := [verdict for verdict in judged if verdict.met is False]:
        console.print(target_table(missed))
    learning = Learning(MetricsLog.read(folder.metrics), config.rollouts.group_size)
    if watch.rows.failures.share > WORTH_SAYING:
        console.print(f"{watch.rows.failures.sentence()}; see redline show {folder.shown} --failures", soft_wrap=True)
    for line in _what_was_learned(config, folder, learning, finished):
        console.print(line, soft_wrap=True)
    if not finished:
        console.print(f"stopped after step {stages.trainer.version}; continue with: redline train {folder.shown} --resume")
    return {
        "run": str(folder.shown),
        "steps": stages.trainer.version,
        "finished": finished,
        "model": str(folder.shown / folder.model.name) if finished else None,
        "weights_changed": learning.moved_weights,
        "why_not": learning.why_not,
        "evaluation": {str(version): reward for version, reward in sorted(watch.evaluations.rewards.items())},
        "accuracy": {str(version): share for version, share in sorted(watch.evaluations.accuracies.items())},
        "attempts": watch.rows.failures.num_attempts,
        "failures": watch.rows.failures.num_failed,
        "failure_reason": str(watch.rows.failures.commonest) if watch.rows.failures.commonest else None,
        "targets": [asdict(verdict) for verdict in judged],
        "unaccounted_fraction": ledger.lanes["main"].unaccounted_fraction,
        "wall_s": ledger.lanes["main"].wall_ns / 1e9,
    }


def _what_was_learned(config: Config, folder: RunFolder, learning: Learning, finished: bool) -> Iterator[str]:
    """The last lines of a run: a model is called trained only where some step has moved its weights."""
    quiet, model = learning.steps_without_signal, folder.shown / folder.model.name
    if learning.why_not is not None:
        yield f"nothing was learned: {learning.why_not}"
        kept = "only decayed" if config.trainer.weight_decay else "are those that the run began with"
        if finished:
            yield f"the weights in {model} {kept}; `redline show {folder.shown}` has the attempts and their rewards"
        return
    if quiet >= config.telemetry.alerts.no_signal_steps and "not_learning" not in config.telemetry.alerts.off:
        yield f"nothing was learned in the last {quiet} steps: all attempts of every group scored alike"
    if finished:
        yield f"trained model: {model}"
