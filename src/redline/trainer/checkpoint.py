"""Trainer checkpoints: a folder that appears in one rename, or not at all, and knows its own digest.

step-000040/
  trainer.safetensors   master weights, Adam's moments
  state.json            {"format": 2, "sha256": of "content", "content": {"version", "data", "random", "files": {name: sha256}}}

The schedule is a function of the version and needs no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import DamagedCheckpointError, RunFolderError
from redline.models.file_modes import give_usual_mode
from redline.trainer.random_state import random_state

FORMAT = 2
TENSORS = "trainer.safetensors"
STATE = "state.json"


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """Everything needed to continue."""

    version: int
    """Optimizer steps taken."""
    tensors: Mapping[str, Tensor]
    """The optimizer's state by name."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Where the data stands: whatever the caller needs to go on, as JSON."""
    random: Mapping[str, Any] = field(default_factory=random_state)
    """The generators of the process (`random_state.py`)."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write everything beside `folder`, flush it to the disk, then rename. A kill at any moment leaves the old state.

    A folder that is there already is this step's, and whole: nothing is written over it."""
    if folder.exists():
        return
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, scratch / TENSORS)
    give_usual_mode(scratch / TENSORS)
    content = {
        "version": checkpoint.version,
        "data": dict(checkpoint.data),
        "random": dict(checkpoint.random),
        "files": {TENSORS: _file_digest(scratch / TENSORS)},
    }
    document = {"format": FORMAT, "sha256": _content_digest(content), "content": content}
    (scratch / STATE).write_text(json.dumps(document))
    for path in (scratch / TENSORS, scratch / STATE, scratch):
        _flush(path)
    scratch.rename(folder)
    _flush(folder.parent)


def load_checkpoint(folder: Path) -> Checkpoint:
    """What `save_checkpoint` wrote, every bit of it, or an error."""
    try:
        document = json.loads((folder / STATE).read_text())
        if document["format"] != FORMAT:
            raise RunFolderError(
                f"{folder}: checkpoint format {document['format']}, this version reads {FORMAT}",
                "finish the run with the version of redline that began it",
            )
        content = document["content"]
        if _content_digest(content) != document["sha256"]:
            raise _damaged(folder, f"{STATE} has changed since it was written")
        for name, digest in content["files"].items():
            if _file_digest(folder / name) != digest:
                raise _damaged(folder, f"{name} has changed since it was written")
        tensors = load_file(folder / TENSORS)
        return Checkpoint(content["version"], tensors, content["data"], content["random"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _damaged(folder, repr(error)) from error


def _damaged(folder: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{folder}: unreadable checkpoint: {reason}", "delete the folder; the one before it will be used"
    )


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
