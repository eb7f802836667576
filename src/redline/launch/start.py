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

from redline.config import Config, Resolved, read_recorded, refuse_without_effect, resolve
from redline.launch.checked_run import CheckedRun
from redline.launch.ranks import has_begun, leading, run_to_take_up
from redline.launch.resume.which_run import run_to_continue
from redline.telemetry import RunFolder


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
        return train_in(run, folder, from_scratch=from_scratch and not has_begun(run.folder), began_ns=began_ns)


def new_run(config: Config) -> CheckedRun:
    """Check a recipe. Raises `RedlineError` for whatever would end the run later; leaves nothing on the disk. Where a launcher
    has started its processes again, the run that they were at goes on."""
    if taken_up := run_to_take_up(config.run):
        return _checked(resolve(read_recorded(taken_up.config, [])), taken_up, config.run.folder)
    resolved = resolve(config)
    refuse_without_effect(resolved.config)
    return _checked(resolved, None, config.run.folder)


def continued_run(path: Path, overrides: Sequence[str], tell: Callable[[str], None]) -> CheckedRun:
    """Check the run that `path` names, to continue it as it began. `tell` hears what a person may want to know."""
    folder, config = run_to_continue(path, overrides, tell)
    return _checked(resolve(config), folder, config.run.folder)


def _checked(resolved: Resolved, folder: RunFolder | None, given: Path) -> CheckedRun:
    from redline.launch.preflight import check

    checked = check(resolved.config, folder.path if folder else None)
    resolved = replace(resolved, warnings=(*resolved.warnings, *checked.notes))
    return CheckedRun(resolved, checked.placement, checked.tasks, folder, given)
