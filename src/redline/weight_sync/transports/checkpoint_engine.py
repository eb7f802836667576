"""Weights through a folder that trainer and engines share: a version is written once, and every engine reads it by itself.

    trainer    write the version (`version_folder.py`) ─► ask every engine to load it ─► adopt ─► the version is current
    engine     read shards ─► compare the digest of every tensor ─► sum the buckets of its shadow

An engine that comes late, or was started again, needs nothing but the folder: what is current there is what the others sample
from. Tensors whose bytes did not change since the version that the engines have are neither written nor read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.types import WeightSet
from redline.weight_sync.asked import Sending
from redline.weight_sync.buckets import Form, Layout, Range, copy_all, lay_out, slots, views
from redline.weight_sync.parts import timed
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.sender import BucketTransport
from redline.weight_sync.tensor_bytes import DTYPES
from redline.weight_sync.verify import Probe
from redline.weight_sync.version_folder import Manifest, StoredTensors, VersionFolder, reading
from redline.wire import Connection

NUM_SLOTS = 2
BUCKET_BYTES = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}
"""By device: what is summed at once. Shards have a size of their own."""


class CheckpointEngine(BucketTransport):
    """For engines that see the trainer's folder, on one machine or over a shared file system. Implements `Transport`."""

    def __init__(
        self, channels: Sequence[Connection], tensors: Mapping[str, Tensor], folder: Path, sending: Sending | None = None
    ) -> None:
        """`tensors` are the trainer's: those that every update will have."""
        self._folder = VersionFolder(folder)
        self._there: Manifest | None = None
        """What the engines sample from; None before the first update."""
        self._before: Manifest | None = None
        """What they sampled from before that."""
        self._written: Manifest | None = None
        """The version under way."""
        super().__init__(channels, tensors, self._make_outlet, sending or Sending(), BUCKET_BYTES)

    def _make_outlet(self, bucket_bytes: int, device: torch.device, sending: Sending) -> FolderOutlet:
        self._reads = FolderOutlet(self._folder.path, bucket_bytes, device)
        return self._reads

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Write the version, and have every engine read what it lacks of it. Returns the bytes that were written."""
        self._check_names(weights)
        writing: dict[str, float] = {}
        if self._there is not None and self._there.version == plan.version:  # for an engine that joins
            changed, bytes_written = plan.names, 0
        else:
            with timed("serialise", writing):
                self._written = self._folder.write(plan.version, weights.tensors)
            changed, bytes_written = self._changed(self._written, plan.names), self._written.bytes_written
        self._reads.begin(plan.version, changed)
        self._open(self.channels)
        super().move(TransferPlan(plan.version, changed), weights)
        assert self._update is not None
        self._update.parts["serialise"] += writing.get("serialise", 0.0)
        return bytes_written

    def _changed(self, written: Manifest, names: Sequence[str]) -> tuple[str, ...]:
        there = {} if self._there is None else {name: stored.sha256 for name, stored in self._there.tensors.items()}
        return tuple(name for name in names if written.tensors[name].sha256 != there.get(name))

    def adopt(self, probe: Probe | None = None) -> None:
        """Have every engine read the version, and make it the one that others join at."""
        super().adopt(probe)
        assert self._written is not None, "move comes first"
        self._folder.make_current(self._written.version)
        if self._written is not self._there:
            self._before, self._there = self._there, self._written

    def revert(self, version: int) -> None:
        """Bring every engine that has adopted `version` back to the one it had before, and others join at that one."""
        super().revert(version)
        if self._there is not None and self._there.version == version and self._before is not None:
            self._folder.make_current(self._before.version)
            self._there = self._before
        self._written = self._there

    def close(self) -> None:
        """Let go of the folder; the versions stay."""
        super().close()
        self._folder.close()


class FolderOutlet:
    """The trainer's end: it says which version to read. Buckets are packed to be summed. Implements `sender.Outlet`."""

    link = "checkpoint_engine"
    takes_parts = False

    def __init__(self, folder: Path, bucket_bytes: int, device: torch.device) -> None:
        self._folder, self._bucket_bytes = folder, bucket_bytes
        self.slots: Sequence[Tensor] = [torch.zeros(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self.version: int | None = None
        self.names: tuple[str, ...] = ()
        """The tensors of that version that the engines lack."""

    def begin(self, version: int, names: tuple[str, ...]) -> None:
        """Engines that open their end from now on read these tensors of a version."""
        self.version, self.names = version, names
        for slot in range(len(self.slots)):
            self.reclaim(slot)

    def describe(self, channel: Connection) -> dict[str, Any]:
        return {
            "folder": str(self._folder.absolute()),
            "version": self.version,
            "names": list(self.names),
            "bucket_size": self._bucket_bytes,
        }

    def join(self, channels: Sequence[Connection]) -> None:
        pass

    def offer(self, slot: int, ranges: Sequence[Range]) -> None:
        pass

    def reclaim(self, slot: int) -> None:
        """The gaps between pieces are part of the sum, and nothing fills them."""
        self.slots[slot].zero_()

    def close(self) -> None:
        self.slots = []


class FolderInlet:
    """An engine's end: reads the buckets of a version out of its shards, in their order. Implements `inlets.Inlet`."""

    def __init__(self, how: Mapping[str, Any], device: torch.device) -> None:
        self._reading = ExitStack()
        self._layout, self._next = Layout(()), 0
        self._tensors: Mapping[str, Tensor] = {}
        if how["version"] is None:
            return
        folder, names = Path(how["folder"]), list(how["names"])
        manifest = self._reading.enter_context(reading(folder, int(how["version"])))
        self._tensors = StoredTensors(folder, manifest, names)
        self._layout = lay_out([_form(manifest, name) for name in names], int(how["bucket_size"]))

    def load(self, slot: int, into: Tensor, ranges: Sequence[Range]) -> None:
        pieces = self._layout.buckets[self._next]
        self._next += 1
        into.zero_()
        if into.device.type == "cpu":
            copy_all(slots(pieces, into), views(pieces, self._tensors))
            return
        for there, value in zip(slots(pieces, into), views(pieces, self._tensors), strict=True):
            there.copy_(value)

    def close(self) -> None:
        self._tensors = {}
        self._reading.close()


def _form(manifest: Manifest, name: str) -> Form:
    stored = manifest.tensors[name]
    [dtype] = [dtype for dtype, spelled in DTYPES.items() if spelled == stored.dtype]
    return Form(name, dtype, tuple(stored.shape))
