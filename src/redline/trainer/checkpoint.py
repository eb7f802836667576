"""Trainer checkpoints: safetensors and JSON in a folder that appears in one rename, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import DamagedCheckpointError, RunFolderError

FORMAT = 1


def write_checkpoint(folder: Path, version: int, state: Mapping[str, Tensor]) -> None:
    """Write everything beside `folder`, flush it to the disk, then rename. A kill at any moment leaves the old state.

    A folder that is there already is this step's, and whole: nothing is written over it."""
    if folder.exists():
        return
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, scratch / "trainer.safetensors")
    (scratch / "state.json").write_text(json.dumps({"format": FORMAT, "version": version}))
    for path in scratch.iterdir():
        _flush(path)
    scratch.rename(folder)
    _flush(folder.parent)


def read_checkpoint(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """The version and the state by name."""
    try:
        state = json.loads((folder / "state.json").read_text())
        written, version = state["format"], state["version"]
        tensors = load_file(folder / "trainer.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        hint = "delete the folder; the one before it will be used"
        raise DamagedCheckpointError(f"{folder}: unreadable checkpoint: {error!r}", hint) from error
    if written != FORMAT:
        raise RunFolderError(
            f"{folder}: checkpoint format {written}, this version reads {FORMAT}", "use the version that wrote it"
        )
    return version, tensors


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
