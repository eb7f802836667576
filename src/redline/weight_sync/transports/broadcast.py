"""Trainer and engines anywhere: one broadcast of every bucket, in a process group of their own (NCCL or gloo).

    trainer    pack bucket 0 ─► broadcast 0 ─► gather and pack 1 ─► broadcast 1 ─► …      rank 0
    engines    load 0, sum it ─► load 1, sum it ─► …                                       ranks 1, 2, …

The group is apart from the trainer's own. It is formed at the first bucket, after every engine was told its rank. Where an
engine joins or is lost, whenever that is, the trainer leaves the group, and the next update forms one of those that are there.
NCCL where every member has a GPU of its own, else gloo, through host memory where weights are on a GPU. The group meets at a
store that listens at `Sending.host` alone: loopback, or where engines are on other machines the trainer's address on the way
there. Members of gloo talk over the interface of the same way; NCCL chooses one itself (NCCL_SOCKET_IFNAME). None of them knows
a token: use it on networks that you trust.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from redline.addresses import address_towards, is_loopback
from redline.errors import ConfigError, WeightSyncError, WireError
from redline.types import WeightSet
from redline.weight_sync.asked import Sending
from redline.weight_sync.buckets import Range
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.sender import BucketTransport, Update
from redline.weight_sync.transports.cuda_ipc import gpu_id
from redline.weight_sync.verify import Probe
from redline.wire import Connection

NUM_SLOTS = 2
BUCKET_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
"""By device."""


class Broadcast(BucketTransport):
    """For engines in other processes, on this machine or on others. Implements `Transport`."""

    def __init__(self, channels: Sequence[Connection], tensors: Mapping[str, Tensor], sending: Sending | None = None) -> None:
        """`tensors` are the trainer's: those that every update will have."""
        super().__init__(channels, tensors, self._make_outlet, sending or Sending(), BUCKET_BYTES)
        self._engines.after_loss = lambda channel, error: self._group.leave()

    def _make_outlet(self, bucket_bytes: int, device: torch.device, sending: Sending) -> GroupOutlet:
        self._group = GroupOutlet(bucket_bytes, device, sending)
        return self._group

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Broadcast the tensors of the plan. Where an engine is lost and the others may go on, they begin again without it.
        Where none is left, nothing moves."""
        while self.channels:
            if not self._group.is_open:
                self._open(self.channels)
                continue  # it may have found that all are lost
            try:
                with self._noticing_losses():
                    return super().move(plan, weights)
            except _MemberLost:
                self._leave()
        self._update = Update(plan.version, plan.names, self._layout(plan.names))
        return 0

    def revert(self, version: int) -> None:
        """Bring every engine that has adopted `version` and can be reached back to the one it had before, whole."""
        self._group.leave()  # whoever waits in a broadcast hears that it will not come
        super().revert(version)

    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        """Bring one engine to these weights in a group with it alone. The next update forms one of all."""
        try:
            super().catch_up(channel, weights, probe)
        finally:
            self._group.leave()

    def _open(self, channels: Sequence[Connection]) -> None:
        """Form a group with these engines; without one that is lost meanwhile, where the others may go on."""
        while channels:
            try:
                with self._noticing_losses():
                    gpus = [self._gpu_of(channel) for channel in channels] if self._device.type == "cuda" else []
                    self._group.prepare(channels, gpus)
                    super()._open(channels)
                return
            except _MemberLost:
                self._leave()
                channels = [channel for channel in channels if channel in self.channels]

    def _gpu_of(self, channel: Connection) -> str:
        self._engines.send(channel, "device", {})
        reply = self._engines.receive(channel, "device")
        return str(reply.fields["gpu"]) if reply is not None else ""

    @contextmanager
    def _noticing_losses(self) -> Iterator[None]:
        """Raise `_MemberLost` as soon as an engine is lost: nobody of its group gets anything any more."""

        def leave(channel: Connection, error: WireError) -> None:
            self._group.leave()
            raise _MemberLost

        before, self._engines.after_loss = self._engines.after_loss, leave
        try:
            yield
        finally:
            self._engines.after_loss = before

    def _leave(self) -> None:
        """Take the answers of the engines that are left, whose broadcast failed with that of the lost one."""
        self._group.leave()
        for channel in list(self.channels):
            with suppress(WireError):
                self._engines.drain(channel)


class _MemberLost(Exception):  # noqa: N818  no error: the others begin again
    """An engine of the group is gone, and those that are left may go on."""


class GroupOutlet:
    """The trainer's end: rank 0. Implements `sender.Outlet`."""

    link = "broadcast"
    takes_parts = True

    def __init__(self, bucket_bytes: int, device: torch.device, sending: Sending) -> None:
        self._timeout_s, self._host = sending.timeout_s / 2, sending.host
        self.slots: Sequence[Tensor] = [torch.zeros(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._port, self._store = _listening_store(sending.host, sending.timeout_s)
        self._members: list[Connection] = []
        self._place: dict[str, Any] = {}
        self._group: Group | None = None
        self._under_way: dict[int, list[dist.Work]] = {}
        self._failure = ""
        self.is_open = False
        """Whether every member was told of the present group."""

    def prepare(self, channels: Sequence[Connection], gpus: Sequence[str]) -> None:
        """Begin a new group of these members, and of nobody else. `gpus` are theirs, where the trainer's weights are on one."""
        self.leave()
        self._members = list(channels)
        device = self.slots[0].device
        every = [gpu_id(device), *gpus] if device.type == "cuda" else []
        apart = bool(every) and all(every) and len(set(every)) == len(every)
        self._place = {
            "host": self._host,
            "port": self._port,
            "group": secrets.token_hex(8),
            "size": 1 + len(channels),
            "backend": "nccl" if apart and dist.is_nccl_available() else "gloo",
            "timeout_s": self._timeout_s,
        }
        self.is_open = True

    def describe(self, channel: Connection) -> dict[str, Any]:
        return self._place | {"rank": 1 + self._members.index(channel)}

    def join(self, channels: Sequence[Connection]) -> None:
        """The group is formed at the first bucket, when all have answered."""

    def offer(self, slot: int, ranges: Sequence[Range]) -> None:
        """Begin to broadcast a bucket. What fails is raised by `reclaim`, after the engines have said who failed."""
        try:
            if self._group is None:
                self._group = Group(self._place | {"rank": 0}, self._store, self.slots[slot].device)
            self._under_way[slot] = self._group.begin(self.slots[slot], ranges, slot)
        except (RuntimeError, ValueError) as error:
            self._failure = str(error).partition("\n")[0]

    def reclaim(self, slot: int) -> None:
        try:
            for work in self._under_way.pop(slot, []):
                work.wait()
        except RuntimeError as error:
            self._failure = str(error).partition("\n")[0]
        if self._failure:
            raise WeightSyncError(f"a broadcast of the weights failed: {self._failure}", "look at what the engines say")

    def leave(self) -> None:
        """Leave the group: whoever waits in it hears of it."""
        group, self._group, self.is_open, self._failure = self._group, None, False, ""
        self._under_way.clear()
        if group is not None:
            group.close()

    def close(self) -> None:
        self.leave()
        self.slots = []


class GroupInlet:
    """An engine's end: one of the ranks above 0. Implements `inlets.Inlet`."""

    def __init__(self, how: Mapping[str, Any], device: torch.device) -> None:
        timeout = timedelta(seconds=float(how["timeout_s"]))
        host, port = str(how["host"]), int(how["port"])
        try:
            self._store = dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            why = f"the engine cannot reach the trainer at {host}:{port}: {str(error).partition(chr(10))[0]}"
            raise WeightSyncError(why, "look whether a firewall lies between their machines") from None
        self._how, self._device = dict(how), device
        self._group: Group | None = None

    def load(self, slot: int, into: Tensor, ranges: Sequence[Range]) -> None:
        try:
            if self._group is None:
                self._group = Group(self._how, self._store, self._device)
            self._group.receive(into, ranges)
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(f"a broadcast of the weights failed: {str(error).partition(chr(10))[0]}") from None

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class Group:
    """A process group that knows nothing of any other in this process. Broadcasts from rank 0 alone."""

    def __init__(self, place: Mapping[str, Any], store: dist.Store, device: torch.device) -> None:
        """Blocks until every member is there, or raises RuntimeError when the time is up."""
        make: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}
        inner = dist.PrefixStore(str(place["group"]), store)
        timeout = timedelta(seconds=float(place["timeout_s"]))
        self._backend = make[place["backend"]](inner, int(place["rank"]), int(place["size"]), timeout, str(place["host"]))
        self._on_host = device.type == "cuda" and place["backend"] == "gloo"
        self._host_memory: dict[int, Tensor] = {}

    def begin(self, bucket: Tensor, ranges: Sequence[Range], slot: int) -> list[dist.Work]:
        """Begin to send ranges of a bucket; it must not change until all of the work is done."""
        parts = [bucket[begin:end] for begin, end in ranges]
        if self._on_host:
            staged = self._staged(bucket, slot)
            parts = [staged[begin:end].copy_(part) for (begin, end), part in zip(ranges, parts, strict=True)]
        return [self._broadcast(part) for part in parts]

    def receive(self, into: Tensor, ranges: Sequence[Range]) -> None:
        """Fill ranges of a run of bytes with the next bucket's. Blocks until they are there."""
        target = self._staged(into, 0) if self._on_host else into
        for work in [self._broadcast(target[begin:end]) for begin, end in ranges]:
            work.wait()
        if self._on_host:
            for begin, end in ranges:
                into[begin:end].copy_(target[begin:end])

    def close(self) -> None:
        self._host_memory.clear()
        self._backend.abort()
        self._backend = None

    def _staged(self, bucket: Tensor, slot: int) -> Tensor:
        """Host memory for a bucket that is on a device, pinned so that copies are fast."""
        if slot not in self._host_memory or self._host_memory[slot].numel() < bucket.numel():
            self._host_memory[slot] = torch.empty(bucket.numel(), dtype=torch.uint8, pin_memory=True)
        return self._host_memory[slot][: bucket.numel()]

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work: dist.Work = self._backend.broadcast([tensor], options)
        return work


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host))]
    options._timeout, options._threads = timeout, 2
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta, host: str) -> dist.ProcessGroupNCCL:
    # Where a member is lost, end the communicator and not the process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _listening_store(host: str, timeout_s: float) -> tuple[int, dist.Store]:
    """A store that listens at this address alone; by itself torch's would listen on every network."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}: {error.strerror or error}", "it must be an address of this machine"
        ) from None
    port = int(listening.getsockname()[1])
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())
    return port, store


def _own_address(host: str) -> str:
    """The address of this machine that `host` would see."""
    if is_loopback(host):
        return host
    return address_towards(f"[{host}]:0")
