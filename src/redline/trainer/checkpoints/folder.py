"""Trainer checkpoints: a folder that appears in one rename, or not at all, and knows its own digest.

step-000040/
  trainer.safetensors   master weights, Adam's moments
  state.json            {"format", "sha256": of "content", "content": {"version", "data", "random", "files": {name: sha256}}}

Ranks that divide the weights write a file each, `trainer-1-of-4.safetensors` and so on: a tensor is its rows of the first file,
then those of the second (`tensors.py`). The schedule is a function of the version and needs no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from redline.errors import DamagedCheckpointError, RunFolderError
from redline.models.files.modes import give_usual_mode
from redline.trainer.checkpoints.random_state import random_state
from redline.trainer.checkpoints.tensors import SavedTensors

ONE_FILE, SEVERAL_FILES = 2, 3
"""Formats; this version reads both. One that knows only the first would otherwise take the second for damaged."""
STATE = "state.json"
READERS = 4
"""Files whose digests are computed at once."""


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


# ── written ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write everything beside `folder`, flush it to the disk, then rename. A kill at any moment leaves the old state.

    A folder that is there already is this step's, and whole: nothing is written over it."""
    if folder.exists():
        return
    make_scratch(folder)
    name = file_name(0, 1)
    publish(folder, checkpoint, {name: write_file(scratch_of(folder) / name, checkpoint.tensors)})


def scratch_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def make_scratch(folder: Path) -> None:
    """Make it anew, empty."""
    shutil.rmtree(scratch_of(folder), ignore_errors=True)
    scratch_of(folder).mkdir(parents=True)


def file_name(part: int, parts: int) -> str:
    """The file of one part of the tensors, counted from 0."""
    return "trainer.safetensors" if parts == 1 else f"trainer-{part + 1}-of-{parts}.safetensors"


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a file and flush it to the disk. Returns its digest."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    give_usual_mode(path)
    digest = _file_digest(path)
    _flush(path)
    return digest


def publish(folder: Path, checkpoint: Checkpoint, files: Mapping[str, str]) -> None:
    """Make a checkpoint of the `files` (name → digest) that were written beside `folder`: the last of them, and the rename."""
    scratch = scratch_of(folder)
    content = {
        "version": checkpoint.version,
        "data": dict(checkpoint.data),
        "random": dict(checkpoint.random),
        "files": dict(files),
    }
    number = ONE_FILE if len(files) == 1 else SEVERAL_FILES
    document = {"format": number, "sha256": _content_digest(content), "content": content}
    (scratch / STATE).write_text(json.dumps(document))
    _flush(scratch / STATE)
    _flush(scratch)
    scratch.rename(folder)
    _flush(folder.parent)


# ── read ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_checkpoint(folder: Path) -> Checkpoint:
    """What `save_checkpoint` wrote, every bit of it; tensors are read when they are asked for. Raises `DamagedCheckpointError`
    where a file is missing or is not what was written, and a plain `RunFolderError` where the files cannot be read at the
    moment: then nothing is known to be wrong with them."""
    verified_content(folder)
    return open_checkpoint(folder)


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose files another rank has verified."""
    with _explained(folder):
        content = _read_content(folder)
        tensors = SavedTensors([folder / name for name in content["files"]])
        return Checkpoint(content["version"], tensors, content["data"], content["random"])


def verified_content(folder: Path) -> dict[str, Any]:
    """Read every file of a checkpoint and return what its state file says. Raises what `load_checkpoint` raises."""
    with _explained(folder), ThreadPoolExecutor(READERS, "digests") as readers:
        content = _read_content(folder)
        found = readers.map(_file_digest, [folder / name for name in content["files"]])
        for (name, digest), now in zip(content["files"].items(), found, strict=True):
            if now != digest:
                raise _damaged(folder, f"{name} has changed since it was written")
        return content


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(folder, f"{Path(error.filename or file_name(0, 1)).name} is missing") from error
    except (OSError, SafetensorError) as error:  # the digest was right, if it came so far
        raise RunFolderError(
            f"{folder}: the checkpoint cannot be read at the moment: {error}",
            "nothing was changed: remove the cause (memory, disk, permissions), then continue with --resume",
        ) from error


def _read_content(folder: Path) -> dict[str, Any]:
    data = (folder / STATE).read_bytes()
    try:
        document = json.loads(data)
        if document["format"] not in (ONE_FILE, SEVERAL_FILES):
            raise RunFolderError(
                f"{folder}: checkpoint format {document['format']}, this version reads {ONE_FILE} and {SEVERAL_FILES}",
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
