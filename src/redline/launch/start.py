"""From a recipe, or from a run that goes on, to training: what `redline train` and `redline.train` share.

    Config ──new_run──────► CheckedRun ──train──► run folder, summary
    folder ──continued_run──►

Importing this file loads no torch: a mistake in a recipe is said before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.config import Config, Resolved, load_recipe, read_recorded, refuse_without_effect, resolve
from redline.config.changes import changes
from redline.errors import ConfigError
from redline.launch.checked_run import CheckedRun
from redline.launch.ranks import DIVISION, is_restart, leading, run_to_take_up
from redline.telemetry import RunFolder

Tell = Callable[[str], None]


def train(run: CheckedRun, *, from_scratch: bool = False, began_ns: int | None = None) -> dict[str, Any]:
    """Train to the last step or to an interrupt, and return what `redline train --json` prints. `from_scratch` sets aside what
    the folder of a run that goes on holds, and begins at step 0. `began_ns` is when the ledger begins, on the clock of the
    spans; by default with the process."""
    from redline.launch.workers import ray_ranks

    if ray_ranks.is_driver(run.resolved.config):
        return ray_ranks.train_on_ray(run, from_scratch=from_scratch)
    from redline.launch.run import train as train_in

    wanted = run.resolved.config.run
    with leading():
        folder = run.folder or ray_ranks.made_folder() or RunFolder.create(wanted.folder, wanted.name, given=run.given)
        return train_in(run, folder, from_scratch=from_scratch and not is_restart(), began_ns=began_ns)


def new_run(config: Config) -> CheckedRun:
    """Check a recipe. Raises `RedlineError` for whatever would end the run later; leaves nothing on the disk. Where a launcher
    has started its processes again, the run that they were at goes on."""
    if taken_up := run_to_take_up(config.run):
        return _checked(resolve(read_recorded(taken_up.config, [])), taken_up, config.run.folder)
    resolved = resolve(config)
    refuse_without_effect(resolved.config)
    return _checked(resolved, None, config.run.folder)


def continued_run(path: Path, overrides: Sequence[str], tell: Tell) -> CheckedRun:
    """Check the run that `path` names, to continue it as it began. `tell` hears what a person may want to know."""
    folder, config = run_to_continue(path, overrides, tell)
    return _checked(resolve(config), folder, config.run.folder)


def run_to_continue(path: Path, overrides: Sequence[str], tell: Tell) -> tuple[RunFolder, Config]:
    """Return the run folder that `path` is, or the newest one made from the recipe that it is, with the run's own config."""
    if path.name == "config.json":  # of a run: as a recipe it would stand for the newest run of that name
        path = path.parent
    recipe = load_recipe(path, overrides) if path.is_file() else None
    folder = RunFolder.newest(recipe.run.folder, recipe.run.name, tell=tell) if recipe else RunFolder.open(path)
    allowed = (
        "run.steps=",
        "placement.",
        *(f"trainer.{key}=" for key in DIVISION),
        *(("run.name=", "run.folder=") if recipe else ()),
    )
    foreign = [override for override in overrides if not override.startswith(allowed)]
    if foreign:
        raise ConfigError(
            f"--resume continues a run as it was configured; it cannot take {', '.join(foreign)}",
            "leave the override out (run.steps=N may be given, to train longer, and what divides the work among ranks, such as"
            " trainer.sharding), or start a new run",
        )
    config = read_recorded(folder.config, overrides)
    if recipe and (changed := changes(recipe, config)):
        tell(f"{folder.path.name} goes on as it began; {path} says otherwise: {'; '.join(changed)}")
    return folder, config


def _checked(resolved: Resolved, folder: RunFolder | None, given: Path) -> CheckedRun:
    from redline.launch.preflight import check

    checked = check(resolved.config, folder.path if folder else None)
    resolved = replace(resolved, warnings=(*resolved.warnings, *checked.notes))
    return CheckedRun(resolved, checked.placement, checked.tasks, folder, given)
