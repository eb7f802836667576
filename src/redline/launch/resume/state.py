"""Stages and logs as they were at the newest checkpoint."""

from __future__ import annotations

from redline.config import Config
from redline.launch.resume.began_with import refuse_another_base
from redline.launch.stages import Stages
from redline.rollouts.lengths import MAX_GROUPS
from redline.telemetry import RunFolder, span
from redline.watch.checkpoints import Checkpoints
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


def load(config: Config, folder: RunFolder, stages: Stages, checkpoints: Checkpoints) -> None:
    """Bring trainer and buffer back to the newest checkpoint. Raises `RedlineError` where the run cannot go on."""
    try:
        with span("run.resume"):
            refuse_another_base(config, folder, stages.model.folder)
            checkpoints.load_newest()
            stages.buffer.resume(stages.trainer.version)
            stages.rollouts.remember(stages.store.lengths_before(stages.trainer.version, MAX_GROUPS))
    except BaseException:
        stages.close()
        raise


def go_on(outputs: Outputs, stages: Stages, watch: RunWatch) -> None:
    """Take the logs back to the checkpoint that was loaded."""
    watch.resume()
    if watch.rows.num_groups_counted is not None:
        watch.take_over(stages.rollouts.take_over(stages.buffer.not_counted(watch.rows.num_groups_counted)))
    outputs.progress.note(f"continuing after step {stages.trainer.version}")
