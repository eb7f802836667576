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

from redline.errors import RunFolderError
from redline.telemetry import idle_as, span
from redline.trainer.checkpoints.folder import Checkpoint, save_checkpoint
from redline.trainer.optimizer.offload import host_tensors


class CheckpointWriter:
    """Takes a state at once, and writes it in its own time."""

    def __init__(self) -> None:
        # The interpreter waits for the pool's thread when it exits.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: Future[None] | None = None
        self._host: dict[str, Tensor] = {}

    def save(self, folder: Path, version: int, state: Mapping[str, Tensor], data: Mapping[str, Any] | None = None) -> None:
        """Copy the state and return; `folder` appears when everything is on the disk. A folder that is there stays as it is."""
        self.flush()
        if folder.exists():
            return
        copied = self._copy(state)
        self._pending = self._thread.submit(_write, folder, Checkpoint(version, self._host, dict(data or {})), copied)

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


def _write(folder: Path, checkpoint: Checkpoint, copied: torch.cuda.Event | None) -> None:
    idle_as("wait.for_checkpoints")
    if copied is not None:
        copied.synchronize()
    try:
        with span("run.write_checkpoint", version=checkpoint.version):
            save_checkpoint(folder, checkpoint)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder.with_name(f".{folder.name}.partial"), ignore_errors=True)
        raise RunFolderError(
            f"{folder}: the checkpoint could not be written: {error}", "make room on the disk, then resume from the one before"
        ) from error
