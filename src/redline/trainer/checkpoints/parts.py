"""Who writes a checkpoint: one process all of it, or each of several its part, and the first makes a checkpoint of the parts.

every process   write own file, flush ──► finish(digest)
the first       make the folder beside ──► … ──► finish: waits for all digests ──► state.json, rename
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from redline.trainer.checkpoints.folder import file_name, make_scratch


class WholeCheckpoint:
    """One process writes everything."""

    part, parts = 0, 1

    @property
    def file(self) -> str:
        """The name of this process's file."""
        return file_name(self.part, self.parts)

    def begin(self, folder: Path) -> bool:
        """Called before the state is copied. Returns whether there is something to write: not where the folder is there."""
        return not folder.exists()

    def prepare(self, folder: Path) -> None:
        """Called by the thread that writes, before it does."""
        make_scratch(folder)

    def finish(self, folder: Path, digest: str) -> Mapping[str, str] | None:
        """This process's file is on the disk. Returns every file with its digest to the process that has to publish them, once
        all are there; None to the others."""
        return {self.file: digest}

    def fail(self, folder: Path, why: str) -> bool:
        """This process's file could not be written. Returns whether its own caller has to be told: else another's will be."""
        return True
