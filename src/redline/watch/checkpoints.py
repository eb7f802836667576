"""The checkpoints of a run folder: saved, pruned, and found again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from redline.config.schema import RunConfig
from redline.config.trained_step import checkpoints_in
from redline.errors import DamagedCheckpointError, RunFolderError
from redline.ports import Trainer
from redline.telemetry import RunFolder
from redline.telemetry.files.failure import steps_logged
from redline.telemetry.files.set_aside import make_aside

BEGIN_AGAIN = (
    "put back a copy of a checkpoint, or begin again at step 0 with --resume --from-scratch, which moves what is there into a"
    " folder set-aside-NNN"
)


class Checkpoints:
    """Saves the trainer into the run folder and keeps the newest `run.keep_checkpoints` of what it saved."""

    def __init__(self, run: RunConfig, folder: RunFolder, trainer: Trainer, tell: Callable[[str], None]) -> None:
        self._run = run
        self._folder = folder
        self._trainer = trainer
        self._tell = tell
        self._damaged: list[Path] | None = None
        """Newer than the checkpoint that was loaded; None before one was looked for."""
        self._saved: int | None = None
        """The version that was saved last."""

    def is_due(self, version: int) -> bool:
        return bool(self._run.checkpoint_every) and version % self._run.checkpoint_every == 0

    def has(self, version: int) -> bool:
        """Whether a checkpoint of this version was saved, or is being written."""
        return self._saved == version

    def save(self) -> None:
        """Save the trainer, then delete the oldest checkpoints. The trainer may go on writing in the background; a checkpoint
        does not count before all of it is on the disk."""
        self._trainer.save(self._folder.checkpoints / f"step-{self._trainer.version:06d}")
        self._saved = self._trainer.version
        self._prune()

    def finish(self) -> None:
        """Block until every checkpoint that was begun is on the disk."""
        self._trainer.flush()
        self._prune()

    def _prune(self) -> None:
        for old in checkpoints(self._folder)[self._run.keep_checkpoints :]:
            shutil.rmtree(old)

    def load_newest(self) -> None:
        """Load the newest checkpoint that is whole. Changes nothing in the folder, and raises where there are checkpoints and
        none is whole."""
        self._damaged = self._load_newest()

    def go_back(self) -> Path | None:
        """Set aside what is damaged and newer than the checkpoint that was loaded; loads the newest where none was. Returns the
        folder for what has to be set aside, or None."""
        if self._damaged is None:
            self.load_newest()
        aside = self._set_aside(self._damaged or ())
        for partial in self._folder.checkpoints.glob(".*.partial"):
            shutil.rmtree(partial)
        return aside

    def _load_newest(self) -> list[Path]:
        """Returns the damaged checkpoints that are newer than the one that was loaded. Without any checkpoint, loads none."""
        damaged = []
        for path in checkpoints(self._folder):
            try:
                self._trainer.load(path)
            except DamagedCheckpointError as error:
                self._tell(f"skipping a {error.message.removeprefix(f'{path}: ')} ({path.name})")
                damaged.append(path)
            else:
                return damaged
        self._refuse_if_lost(damaged)
        return []

    def _refuse_if_lost(self, damaged: Sequence[Path]) -> None:
        """Raise where no checkpoint is whole, or none is there though there should be one."""
        if damaged:
            names = ", ".join(path.name for path in damaged)
            raise RunFolderError(f"{self._folder.shown}: no checkpoint is whole ({names}); nothing was changed", BEGIN_AGAIN)
        every, logged = self._run.checkpoint_every, steps_logged(self._folder)
        if every and logged > 2 * every:  # the second is not begun before the first is on the disk
            raise RunFolderError(
                f"{self._folder.shown}: no checkpoint is there, though {logged} steps were logged and every {every} of them"
                " leave one; nothing was changed",
                BEGIN_AGAIN,
            )

    def _set_aside(self, damaged: Sequence[Path]) -> Path | None:
        """Make a folder for the damaged checkpoints and for the rows that are cut because of them, or because there is no
        checkpoint at all. Returns None where nothing has to be kept."""
        version, logged = self._trainer.version, steps_logged(self._folder)
        if not damaged and (version or not logged):
            return None
        aside = make_aside(self._folder)
        for path in damaged:  # out of the way, so that its step can be saved again
            path.rename(aside / path.name)
        lost = f"{max(0, logged - version)} steps after step {version} are lost and taken again"
        where = f"what there is of them is in {aside.name}"
        self._tell(f"using step-{version:06d} instead: {lost}, {where}" if damaged else f"no checkpoint: {lost}, {where}")
        return aside


def checkpoints(folder: RunFolder) -> list[Path]:
    """The complete checkpoints, newest first."""
    return checkpoints_in(folder.checkpoints)
