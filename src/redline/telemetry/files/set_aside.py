"""`set-aside-001/`: what a run goes back behind is moved here, never deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

from redline.telemetry.files.run_folder import RunFolder

_STAYS = ("config.json", ".lock")
"""What a folder needs to be a run, and to be written by one process."""


def make_aside(folder: RunFolder) -> Path:
    """Make the next free `set-aside-NNN` in the run folder, and return it."""
    number = 1
    while (path := folder.path / f"set-aside-{number:03d}").exists():
        number += 1
    path.mkdir()
    return path


def set_everything_aside(folder: RunFolder) -> Path:
    """Move all that a run has left to a folder inside its own, which is returned: the run can begin again at step 0."""
    aside = make_aside(folder)
    shutil.copyfile(folder.config, aside / folder.config.name)
    for path in sorted(folder.path.iterdir()):
        if path.name not in _STAYS and not path.name.startswith("set-aside-"):
            path.rename(aside / path.name)
    folder.trajectories.mkdir()
    folder.checkpoints.mkdir()
    return aside
