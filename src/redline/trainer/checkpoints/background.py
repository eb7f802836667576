"""Checkpoints written behind the training.

    training   step │ copy to host │ step │ step │ …
    writer                         │ write, digest, flush, rename │

The state is copied into host memory that is kept for the next time, and a thread takes it to the disk from there. There is one
copy, so a checkpoint waits for the one before it. A write that failed is raised by the next call. A process that ends in any
way but a kill finishes the write first.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from redline.errors import RedlineError, RunFolderError, in_words
from redline.telemetry import idle_as, span
from redline.trainer.checkpoints.folder import Checkpoint, publish, scratch_of, write_file
from redline.trainer.checkpoints.parts import WholeCheckpoint
from redline.trainer.optimizer.offload import host_tensors

NO_ROOM: dict[type[Exception], str] = {OSError: "on the disk", SafetensorError: "on the disk", MemoryError: "in host memory"}
"""What a user can do something about, and where."""


class CheckpointWriter:
    """Takes a state at once, and writes it in its own time."""

    def __init__(self, checkpoint: WholeCheckpoint | None = None) -> None:
        """`checkpoint` says what of each is this process's; by default everything."""
        self._whole = checkpoint or WholeCheckpoint()
        # The interpreter waits for the pool's thread when it exits.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: Future[None] | None = None
        self._host: dict[str, Tensor] = {}

    def save(self, folder: Path, version: int, state: Mapping[str, Tensor], data: Mapping[str, Any] | None = None) -> None:
        """Copy the state and return; `folder` appears when everything is on the disk. A folder that is there stays as it is.
        Where several processes write, blocks until all have called it."""
        self.flush()
        if not self._whole.begin(folder):
            return
        copied = self._copy({name: tensor for name, tensor in state.items() if self._is_written(tensor)})
        checkpoint = Checkpoint(version, self._host, dict(data or {}))
        self._pending = self._thread.submit(_write, self._whole, folder, checkpoint, copied)

    def _is_written(self, tensor: Tensor) -> bool:
        """Whether this process writes the tensor. The first of several writes what is not divided; none writes parts without
        a row."""
        return tensor.numel() > 0 and (tensor.dim() > 0 or self._whole.part == 0)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk. Does not block; any thread may ask."""
        pending = self._pending
        return pending is not None and not pending.done()

    def flush(self) -> None:
        """Wait until the last checkpoint is on the disk; raise what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Flush, and let go of the host memory."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self._host = {}

    def _copy(self, state: Mapping[str, Tensor]) -> torch.cuda.Event | None:
        """Into host memory; on CUDA behind what the device was given to do, and before what it will be given. The event says
        when."""
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
        device = next((tensor.device for tensor in state.values() if tensor.is_cuda), torch.device("cpu"))
        if {name: (tensor.dtype, tensor.shape) for name, tensor in self._host.items()} != shapes:
            self._host = host_tensors(shapes, device)
        for name, tensor in state.items():
            self._host[name].copy_(tensor, non_blocking=True)
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _write(whole: WholeCheckpoint, folder: Path, checkpoint: Checkpoint, copied: torch.cuda.Event | None) -> None:
    idle_as("wait.for_checkpoints")
    try:
        if copied is not None:
            copied.synchronize()
        with span("run.write_checkpoint", version=checkpoint.version):
            whole.prepare(folder)
            digest = write_file(scratch_of(folder) / whole.file, checkpoint.tensors)
            if files := whole.finish(folder, digest):
                publish(folder, checkpoint, files)
    except RedlineError:
        raise  # another process could not write its part, or is lost
    except Exception as error:  # of whatever kind: the process that waits for this part must hear of it
        raise_here = whole.fail(folder, str(error) or in_words(error))
        if raise_here:
            shutil.rmtree(scratch_of(folder), ignore_errors=True)
        place = next((place for kind, place in NO_ROOM.items() if isinstance(error, kind)), None)
        if place is None:
            raise  # a fault of ours, which keeps its traceback
        if raise_here:
            raise RunFolderError(
                f"{folder}: the checkpoint could not be written: {str(error) or in_words(error)}",
                f"make room {place}, then resume from the one before",
            ) from error
