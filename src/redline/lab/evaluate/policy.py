"""Which weights `redline eval MODEL` means. Loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.config import read_recorded, recipe_values
from redline.config.paths import is_run_folder, model_of_run, run_of_checkpoint
from redline.config.trained_step import checkpoints_in
from redline.errors import ConfigError
from redline.telemetry import RunFolder


@dataclass(slots=True, frozen=True)
class Policy:
    """A model to evaluate."""

    name: str
    """As a table has it: what was given, or the checkpoint that is meant by it."""
    path: str
    """What a recipe that asks it has as `model.path`; of a checkpoint, the model that its run began with."""
    run: RunFolder | None = None
    """The run that trained it."""
    checkpoint: Path | None = None
    """Its weights, where they are those of a checkpoint."""

    def run_values(self) -> dict[str, Any]:
        """The recipe of the run that trained it; empty where none did."""
        return recipe_values(self.run.config) if self.run else {}


def find_policy(given: str) -> Policy:
    """Return what a run folder, a checkpoint of one, or anything that a recipe takes as `model.path` stands for. Of a run it is
    the model that it ended with; until it has ended, its newest checkpoint. Whether any other path leads to a model is found
    out when the recipe is resolved."""
    path = Path(given).expanduser()
    if run := run_of_checkpoint(path):
        return _of_checkpoint(given, run, path)
    if is_run_folder(path):
        try:
            model_of_run(path)
        except ConfigError:
            newest = next(iter(checkpoints_in(path / "checkpoints")), None)
            if newest is None:
                raise
            return _of_checkpoint(str(newest), path, newest)
        return Policy(given, given, RunFolder.open(path))
    above = path.parent
    return Policy(given, given, RunFolder.open(above) if os.path.isdir(path) and is_run_folder(above) else None)


def _of_checkpoint(name: str, folder: Path, checkpoint: Path) -> Policy:
    run = RunFolder.open(folder)
    return Policy(name, read_recorded(run.config).model.path, run, checkpoint)
