"""Trainer and engines on one machine: two staging buckets that all of them have mapped.

On a GPU the buckets are device memory, exported once by CUDA's handles, so that an engine copies from device to device; on a
CPU they are shared memory that has no name, so that no crash leaves it behind. While engines copy one bucket, the trainer packs
the other. Handles travel as JSON; nothing is unpickled.
"""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from redline.errors import WeightSyncError
from redline.weight_sync.asked import Sending
from redline.weight_sync.buckets import Range, copy_all
from redline.weight_sync.sender import BucketTransport
from redline.wire import Connection

NUM_SLOTS = 2
BUCKET_BYTES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
"""By device. A bucket of a GPU takes it 0.3 ms, about as long as an answer from another process; one of a CPU stays near its
caches."""


class CudaIpc(BucketTransport):
    """For engines in other processes of the trainer's machine, on its GPU or on its CPUs. Implements `Transport`."""

    def __init__(self, channels: Sequence[Connection], tensors: Mapping[str, Tensor], sending: Sending | None = None) -> None:
        """`tensors` are the trainer's: those that every update will have."""
        super().__init__(channels, tensors, StagedOutlet, sending or Sending(), BUCKET_BYTES)


class StagedOutlet:
    """The trainer's end: the two buckets. Implements `sender.Outlet`."""

    link = "cuda_ipc"
    takes_parts = True

    def __init__(self, bucket_bytes: int, device: torch.device, sending: Sending) -> None:
        self._device = device
        self._files: list[int] = []
        if device.type == "cuda":
            self.slots = [torch.zeros(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        else:
            self._files = [_anonymous_file(bucket_bytes) for _ in range(NUM_SLOTS)]
            self.slots = [_mapped(file, bucket_bytes) for file in self._files]

    def describe(self, channel: Connection) -> dict[str, Any]:
        """Return what opens the buckets in another process. Each process gets handles of its own: torch counts their users."""
        if self._device.type == "cuda":
            return {"gpu": gpu_id(self._device), "handles": [_exported(slot) for slot in self.slots]}
        return {"process": os.getpid(), "files": self._files}

    def join(self, channels: Sequence[Connection]) -> None:
        """The other side has mapped the buckets when it has answered."""

    def offer(self, slot: int, ranges: Sequence[Range]) -> None:
        """The bytes are there."""

    def reclaim(self, slot: int) -> None:
        """Every engine has copied the bucket: it said so."""

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
        self.slots = []


class StagedInlet:
    """An engine's end: the trainer's buckets, mapped here. Implements `inlets.Inlet`."""

    def __init__(self, how: Mapping[str, Any], device: torch.device) -> None:
        if ("handles" in how) != (device.type == "cuda"):
            raise WeightSyncError("trainer and engine are on devices of another kind", "choose another placement.transport")
        if device.type == "cuda":
            index = _index_of(str(how["gpu"]))
            self._slots = [_imported(handle, index) for handle in how["handles"]]
        else:
            self._slots = [_opened(int(how["process"]), int(file)) for file in how["files"]]

    def load(self, slot: int, into: Tensor, ranges: Sequence[Range]) -> None:
        staged = self._slots[slot]
        copy_all([into[begin:end] for begin, end in ranges], [staged[begin:end] for begin, end in ranges])

    def close(self) -> None:
        self._slots = []


# ── shared memory ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _anonymous_file(nbytes: int) -> int:
    """A file in memory that has no name: it is gone when the last process that has it open ends."""
    if not hasattr(os, "memfd_create"):
        raise WeightSyncError("shared memory without a name needs Linux", "set placement.transport=broadcast")
    file = os.memfd_create("redline-weights", os.MFD_CLOEXEC)
    os.ftruncate(file, nbytes)
    return file


def _opened(process: int, file: int) -> Tensor:
    """Map memory of another process of this user."""
    path = f"/proc/{process}/fd/{file}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        why = f"cannot open the trainer's shared memory ({path}): {error.strerror}"
        raise WeightSyncError(why, "run both as one user, in one container, or set placement.transport=broadcast") from None
    try:
        return _mapped(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


# ── device memory ──────────────────────────────────────────────────────────────────────────────────────────────────────


def gpu_id(device: torch.device) -> str:
    """What a GPU is called in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _index_of(gpu: str) -> int:
    """The number that a GPU has in this process, which may see others than the trainer's does."""
    seen = [gpu_id(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if gpu not in seen:
        raise WeightSyncError(f"the engine does not see the trainer's GPU {gpu}", "set placement.transport=broadcast")
    return seen.index(gpu)


def _exported(slot: Tensor) -> list[Any]:
    """torch's own handle of device memory, its bytes as base64: device, handle, size, offset, and the same of a counter of its
    users and of an event."""
    return [
        {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in slot.untyped_storage()._share_cuda_()
    ]


def _imported(handle: list[Any], index: int) -> Tensor:
    torch.cuda.init()
    parts = [base64.b64decode(part["base64"]) if isinstance(part, dict) else part for part in handle]
    storage = torch.UntypedStorage._new_shared_cuda(index, *parts[1:])
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
