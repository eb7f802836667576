"""The checkpoints of a run folder."""

from __future__ import annotations

import re
from pathlib import Path

from redline.telemetry import RunFolder

_CHECKPOINT = re.compile(r"step-(\d{6,})")


BEGIN_AGAIN = (
    "put back a copy of a checkpoint, or begin again at step 0 with --resume --from-scratch, which moves what is there into a"
    " folder set-aside-NNN"
)


def checkpoints(folder: RunFolder) -> list[Path]:
    """Complete ones, newest first. By number: as text, step-1000000 comes before step-999990."""
    there = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    found = {int(match[1]): path for path in there if (match := _CHECKPOINT.fullmatch(path.name))}
    return [found[step] for step in sorted(found, reverse=True)]
