"""Stages and logs as they were at the newest checkpoint."""

from __future__ import annotations

import numpy as np

from redline.config import Config
from redline.engine import NativeEngine
from redline.engine.native.speculation.texts import MAX_TOKENS
from redline.launch.resume.began_with import refuse_another_base
from redline.launch.stages import Stages
from redline.rollouts.lengths import MAX_GROUPS
from redline.telemetry import RunFolder, span
from redline.watch.checkpoints import Checkpoints
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch

MAX_REMEMBERED = 1024
"""Groups, the newest, whose attempts an engine guesses from after a resume."""


def load(config: Config, folder: RunFolder, stages: Stages, checkpoints: Checkpoints) -> None:
    """Bring trainer and buffer back to the newest checkpoint. Raises `RedlineError` where the run cannot go on."""
    try:
        with span("run.resume"):
            refuse_another_base(config, folder, stages.model.folder)
            checkpoints.load_newest()
            stages.buffer.resume(stages.trainer.version)
            _remember_texts(config, stages)
    except BaseException:
        stages.close()
        raise


def go_on(outputs: Outputs, stages: Stages, watch: RunWatch) -> None:
    """Take the logs back to the checkpoint that was loaded."""
    watch.resume()
    counted, version = watch.rows.num_groups_counted, stages.trainer.version
    late = [] if counted is None else stages.buffer.not_counted(counted)
    # Beside the trainer some of these were sampled before the checkpoint, too. Nothing is expected of a group from itself.
    stages.rollouts.remember(stages.store.lengths_before(version, MAX_GROUPS, {group.index for group in late}))
    watch.take_over(stages.rollouts.take_over(late))
    outputs.progress.note(f"continuing after step {stages.trainer.version}")


def _remember_texts(config: Config, stages: Stages) -> None:
    """An engine that guesses tokens, and lives in this process, has what the run sampled before."""
    if config.engine.speculation == "off" or not isinstance(stages.engine, NativeEngine):
        return
    texts, num_tokens = list[tuple[str, np.ndarray]](), 0
    for group in stages.store.groups_before(stages.trainer.version, MAX_REMEMBERED):
        texts += [(group.task_id, trajectory.token_ids) for trajectory in reversed(group.trajectories)]
        num_tokens += sum(len(trajectory.token_ids) for trajectory in group.trajectories)
        if num_tokens >= MAX_TOKENS:  # the engine would forget older ones at once
            break
    for task, token_ids in reversed(texts):
        stages.engine.remember(task, token_ids)
