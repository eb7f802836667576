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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import DamagedCheckpointError, RunFolderError
from redline.models.files.modes import give_usual_mode
from redline.trainer.checkpoints.random_state import random_state

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
    """What `save_checkpoint` wrote, every bit of it. Raises `DamagedCheckpointError` where a file is missing or is not what was
    written, and a plain `RunFolderError` where the files cannot be read at the moment: then nothing is known to be wrong with
    them."""
    content = verified_content(folder)
    with _explained(folder):
        return Checkpoint(content["version"], load_file(folder / TENSORS), content["data"], content["random"])


def verified_content(folder: Path) -> dict[str, Any]:
    """Read every file of a checkpoint and return what its state file says. Raises what `load_checkpoint` raises."""
    with _explained(folder):
        content = _read_content(folder)
        for name, digest in content["files"].items():
            if _file_digest(folder / name) != digest:
                raise _damaged(folder, f"{name} has changed since it was written")
        return content


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(folder, f"{Path(error.filename or TENSORS).name} is missing") from error
    except (OSError, SafetensorError) as error:  # the digest was right, if it came so far
        raise RunFolderError(
            f"{folder}: the checkpoint cannot be read at the moment: {error}",
            "nothing was changed: remove the cause (memory, disk, permissions), then continue with --resume",
        ) from error


def _read_content(folder: Path) -> dict[str, Any]:
    data = (folder / STATE).read_bytes()
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise RunFolderError(
                f"{folder}: checkpoint format {document['format']}, this version reads {FORMAT}",
                "finish the run with the version of redline that began it",
            )
        content: dict[str, Any] = document["content"]
        if _content_digest(content) == document["sha256"]:
            return content
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{STATE}: {error!r}") from error
    raise _damaged(folder, f"{STATE} has changed since it was written")


def _damaged(folder: Path, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder}: damaged checkpoint: {reason}", "continue from another checkpoint")


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
