"""A run that has nothing left to do is said to be finished, and its folder stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.config import Config
from redline.config.trained_step import is_of_newest_checkpoint, step_of
from redline.errors import ConfigError, DamagedCheckpointError
from redline.runs.status import is_closed
from redline.telemetry import MetricsLog, RunFolder
from redline.telemetry.summary.failed_attempts import reaches_target
from redline.trainer.checkpoints.folder import verified_content
from redline.watch.checkpoints import checkpoints


def nothing_to_do(config: Config, folder: RunFolder, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the summary of a run that has taken all its steps and left its model, after telling how to train longer; None
    where something is left to do. Raises `ConfigError` where more steps are taken than are asked for. Changes nothing."""
    newest = next(iter(checkpoints(folder)), None)
    if newest is None:
        return None
    taken, steps, shown = step_of(newest), config.run.steps, folder.shown
    if taken > steps:
        raise ConfigError(
            f"run.steps = {steps}: {shown} has taken {taken} steps already; nothing was changed",
            f"give more to train longer, such as run.steps={2 * taken}; run.steps={taken} ends the run where it is",
        )
    has_reached_target = _has_reached_target(config, folder)
    if (taken < steps and not has_reached_target) or not _has_ended(folder, newest):
        return None
    if has_reached_target:
        stop_at = config.rollouts.evaluation.stop_at
        tell(
            f"nothing to do: {shown} has reached rollouts.evaluation.stop_at = {stop_at:g}; to train its model further, start a"
            f" run with model.path={shown / folder.model.name}"
        )
    else:
        tell(
            f"nothing to do: {shown} has taken all {steps} steps; to train longer: redline train {shown} --resume"
            f" run.steps={2 * steps}"
        )
    return _summary(folder, taken)


def _has_reached_target(config: Config, folder: RunFolder) -> bool:
    stop_at = config.rollouts.evaluation.stop_at
    return folder.evaluations.exists() and any(reaches_target(row, stop_at) for row in MetricsLog.read(folder.evaluations))


def _has_ended(folder: RunFolder, newest: Path) -> bool:
    """Whether the last process came to its end: its files are closed, and the model is of the newest checkpoint, which is
    whole."""
    if folder.failure.exists() or not is_closed(folder) or not folder.model.is_dir():
        return False
    try:
        verified_content(newest)
    except DamagedCheckpointError:
        return False
    return is_of_newest_checkpoint(folder.model)


def _summary(folder: RunFolder, taken: int) -> dict[str, Any]:
    """What `redline train --json` prints, without what only a process that trained knows."""
    rows = list(MetricsLog.read(folder.evaluations)) if folder.evaluations.exists() else []
    found = {
        name: {str(row["step"]): row[key] for row in rows if "step" in row and row.get(key) is not None}
        for name, key in (("evaluation", "evaluation/reward_mean"), ("accuracy", "evaluation/accuracy"))
    }
    model = str(folder.shown / folder.model.name)
    return {"run": str(folder.shown), "steps": taken, "finished": True, "model": model, **found}
