"""The step that a saved model is of: written beside its weights, and compared with the newest checkpoint of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path

_RECORD = "redline.json"
_CHECKPOINT = re.compile(r"step-(\d{6,})")


def record_step(model: Path, step: int) -> None:
    """Write into the folder of a model, or of an adapter, how many steps it was trained."""
    (model / _RECORD).write_text(json.dumps({"step": step}) + "\n")


def is_of_newest_checkpoint(model: Path) -> bool:
    """Whether a model in the folder of its run is what the run has come to: a run that was resumed keeps the model of its first
    end until it ends again. Without checkpoints it is. A model of an earlier version does not say its step and is told by its
    time."""
    newest = next(iter(checkpoints_in(model.parent / "checkpoints")), None)
    if newest is None:
        return True
    step = _recorded_step(model)
    if step is None:
        return model.stat().st_mtime_ns >= newest.stat().st_mtime_ns
    return step == step_of(newest)


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints, newest first. Sorted by number: as text, step-1000000 comes before step-999990."""
    there = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in there if _CHECKPOINT.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The number of steps taken before a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def _recorded_step(model: Path) -> int | None:
    try:
        found = json.loads((model / _RECORD).read_text())
    except (OSError, ValueError):
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None
