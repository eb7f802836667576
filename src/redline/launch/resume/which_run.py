"""The run that `--resume` continues, with the recipe that it began with. Importing this file loads no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from redline.config import Config, load_recipe, read_recorded
from redline.config.changes import changes
from redline.errors import ConfigError
from redline.launch.ranks import DIVISION
from redline.telemetry import RunFolder


def run_to_continue(path: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> tuple[RunFolder, Config]:
    """Return the run folder that `path` is, or the newest one made from the recipe that it is, with the run's own config."""
    if path.name == "config.json":  # of a run: as a recipe it would stand for the newest run of that name
        path = path.parent
    recipe = load_recipe(path, overrides) if path.is_file() else None
    folder = RunFolder.newest(recipe.run.folder, recipe.run.name, tell=tell) if recipe else RunFolder.open(path)
    allowed = (
        "run.steps=",
        "placement.",
        "engine.tensor_parallel_size=",
        *(f"trainer.{key}=" for key in DIVISION),
        *(("run.name=", "run.folder=") if recipe else ()),
    )
    foreign = [override for override in overrides if not override.startswith(allowed)]
    if foreign:
        begun = path if recipe else folder.shown / folder.config.name
        new = shlex.join(["redline", "train", str(begun), f"model.path={folder.shown}", *foreign])
        raise ConfigError(
            f"--resume continues a run as it was configured; it cannot take {', '.join(foreign)}",
            "leave the override out (run.steps=N may be given, to train longer, and what divides the work among processes and"
            " micro-batches, such as placement, engine.tensor_parallel_size and trainer.sharding), or begin a new run from"
            f" these weights: {new}",
        )
    config = read_recorded(folder.config, overrides)
    if recipe and (changed := changes(recipe, config)):
        tell(f"{folder.path.name} goes on as it began; {path} says otherwise: {'; '.join(changed)}")
    return folder, config
