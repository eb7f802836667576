"""The trainer's end of a transport that copies: tensors are packed into buckets, and every engine is asked to load them.

    trainer     gather ─► pack bucket 0 ─► pack bucket 1 ─► wait for 0 ─► pack bucket 2 (where 0 was) ─► …
    engines                                load 0, sum it    load 1, sum it …

Two buckets are enough that one side packs while the other loads. Every answer has a time limit; an engine that does not keep it
is named. `on_lost` decides what a lost engine means: by default an error; a pool of engines goes on without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from redline.errors import PeerError, WeightSyncError, WireClosed, WireError, WireTimeout
from redline.telemetry import span
from redline.types import WeightSet
from redline.weight_sync.buckets import Form, Layout, aligned, copy_all, form_of, lay_out, slots, views
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.verify import Probe, checksum
from redline.wire import Connection, Frame, peer_error

TIMEOUT_S = 120.0
PARTS = ("gather", "serialise", "transfer", "load", "verify", "resume")
"""What an update is made of, by the names of its spans. Packing is `serialise`; `load` and `verify` are those of the slowest
engine, and lie within the trainer's `transfer`."""


@dataclass(slots=True, frozen=True)
class Sending:
    """How to send."""

    timeout_s: float = TIMEOUT_S
    """How long an engine may take for one answer."""
    bucket_bytes: int | None = None
    """The size of a bucket; None takes the transport's own for the device."""
    on_lost: Callable[[Connection, WireError], None] | None = None
    """Told of an engine that went away or did not answer; the others go on. None raises."""
    host: str = "127.0.0.1"
    """Where engines reach the trainer, if the link needs more than the connections."""


class Outlet(Protocol):
    """The trainer's end of a link to all engines."""

    @property
    def link(self) -> str:
        """Its name, by which an engine opens the other end."""
        ...

    @property
    def is_group(self) -> bool:
        """Whether the engines have to open their ends together: one that joins or leaves makes all of them do it again."""
        ...

    @property
    def slots(self) -> Sequence[Tensor]:
        """The buckets to pack into."""
        ...

    def describe(self, channel: Connection) -> dict[str, Any]:
        """Return what an engine needs to open its end, as JSON."""
        ...

    def join(self, channels: Sequence[Connection]) -> None:
        """Called when all of them were told how to open their end, before they have answered."""
        ...

    def offer(self, slot: int, nbytes: int) -> None:
        """Called when a bucket is packed and the engines were told of it."""
        ...

    def reclaim(self, slot: int) -> None:
        """Called when every engine has the bucket."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Update:
    """What the update under way has done so far."""

    version: int
    names: tuple[str, ...]
    layout: Layout
    sums: list[int] = field(default_factory=list)
    """The checksum of each bucket, as it was packed."""
    found: dict[Connection, list[int]] = field(default_factory=dict)
    """The checksums that each engine found."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class BucketTransport:
    """Brings tensors to any number of engines by buckets. Implements `Transport`."""

    shares_storage = False

    def __init__(
        self,
        channels: Sequence[Connection],
        tensors: Mapping[str, Tensor],
        make_outlet: Callable[[int, torch.device, Sending], Outlet],
        sending: Sending,
        bucket_bytes: Mapping[str, int],
    ) -> None:
        self.channels = list(channels)
        self._forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
        self._sending = sending
        self._device = next(iter(tensors.values())).device
        whole = aligned(sum(aligned(form.nbytes) for form in self._forms.values()))
        self._bucket_bytes = min(aligned(sending.bucket_bytes or bucket_bytes[self._device.type]), whole)
        self._outlet = make_outlet(self._bucket_bytes, self._device, sending)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._waiting: dict[Connection, deque[str]] = {channel: deque() for channel in self.channels}
        """What each engine was asked and has not answered."""
        self._update: Update | None = None
        self.parts: dict[str, float] = {}
        """Seconds of each part of the last update."""
        self.pause_s = 0.0
        """How long the engine that took longest stood still for it."""
        self._open(self.channels)

    # ── the port ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Bring the tensors of the plan into every engine's shadow. Blocks until all are there; returns the bytes sent."""
        self._check_names(weights)
        layout = self._layout(plan.names)
        self._update = update = Update(plan.version, plan.names, layout)
        self._ask_all("begin", {"names": list(plan.names)})
        gathered = _Gathered(weights.tensors, self._forms, update.parts)
        for index in range(len(layout.buckets)):
            slot = index % len(self._outlet.slots)
            if index >= len(self._outlet.slots):
                self._take_loaded(slot)
            self._pack(index, slot, gathered)
            with _timed("transfer", update.parts):
                self._send_all("bucket", {"index": index, "slot": slot})
                self._outlet.offer(slot, layout.sizes[index])
        for index in range(max(0, len(layout.buckets) - len(self._outlet.slots)), len(layout.buckets)):
            self._take_loaded(index % len(self._outlet.slots))
        return layout.nbytes * max(1, len(self.channels))

    def verify(self, weights: WeightSet) -> None:
        """Raise WeightSyncError unless every engine found the sums of the buckets that were sent."""
        self._check_names(weights)
        update = self._update
        if update is None or update.version != weights.version:
            return  # every engine has this version already
        for channel in self.channels:
            found = update.found.get(channel, [])
            wrong = [index for index, total in enumerate(update.sums) if found[index : index + 1] != [total]]
            if wrong:
                names = update.layout.names(wrong[0])
                which = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
                why = f"{channel.name} has other bytes than were sent in {len(wrong)} of {len(update.sums)} buckets ({which})"
                raise WeightSyncError(why, "try again; where it happens again, look for faults of the memory")

    def adopt(self, probe: Probe | None = None) -> None:
        """Have every engine read what was moved, and block until each has proven it. Where one fails its error is raised when
        all have answered: it has its old version then, and `revert` brings the others back."""
        update = self._update
        assert update is not None, "move comes first"
        fields = {"version": update.version, "probe": probe.to_json() if probe is not None else None}
        with _timed("resume", update.parts):
            self._send_all("adopt", fields)
            replies = self._answers("adopt")
        self.pause_s = max((reply.fields["pause_s"] for reply in replies.values()), default=0.0)
        self.parts = dict(update.parts)

    def revert(self, version: int) -> None:
        """Bring every engine that has adopted `version` and can be reached back to the one it had before, whole."""
        self._update = None
        for channel in self.channels:
            with suppress(WireError):
                self._drain(channel)
                channel.ask("revert", {"version": version}, timeout_s=self._sending.timeout_s)

    @torch.no_grad()
    def catch_up(self, channel: Connection, weights: WeightSet) -> None:
        """Bring one engine that joins, or was started again, to these weights, and have it in every later update."""
        others = self.channels
        self._waiting[channel] = deque()
        try:
            self.channels = [channel]
            self._open([channel])
            self.move(TransferPlan(weights.version, tuple(weights.tensors)), weights)
            self.verify(weights)
            self.adopt()
            if not self.channels:
                raise WireClosed(f"{channel.name} was lost while it was brought to version {weights.version}")
        finally:
            self.channels = others
            self._update = None
        self.channels = [*others, channel]
        if self._outlet.is_group:
            self._open(self.channels)

    def close(self) -> None:
        """Let go of the link. The connections stay open."""
        for channel in self.channels:
            with suppress(WireError):
                self._drain(channel)
                channel.ask("close", timeout_s=self._sending.timeout_s)
        self._outlet.close()

    # ── buckets ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _layout(self, names: tuple[str, ...]) -> Layout:
        if names not in self._layouts:
            self._layouts = {names: lay_out([self._forms[name] for name in names], self._bucket_bytes)}
        return self._layouts[names]

    def _pack(self, index: int, slot: int, gathered: Mapping[str, Tensor]) -> None:
        update = self._update
        assert update is not None
        pieces, bucket = update.layout.buckets[index], self._outlet.slots[slot]
        values = views(pieces, gathered)
        with _timed("serialise", update.parts):
            copy_all(slots(pieces, bucket), values)
            update.sums.append(int(checksum(bucket[: update.layout.sizes[index]])))  # waits for the device

    def _take_loaded(self, slot: int) -> None:
        update = self._update
        assert update is not None
        with _timed("transfer", update.parts):
            replies = self._answers("bucket")
            self._outlet.reclaim(slot)
        for channel, reply in replies.items():
            update.found.setdefault(channel, []).append(int(reply.fields["checksum"]))
        for part in ("load", "verify"):
            update.parts[part] += max((reply.fields[f"{part}_s"] for reply in replies.values()), default=0.0)

    def _check_names(self, weights: WeightSet) -> None:
        other = weights.tensors.keys() ^ self._forms.keys()
        assert not other, f"other tensors than the engines were told of: {', '.join(sorted(other))}"

    # ── engines ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self, channels: Sequence[Connection]) -> None:
        forms = [form.to_json() for form in self._forms.values()]
        common = {"link": self._outlet.link, "forms": forms, "bucket_bytes": self._bucket_bytes}
        opening = [channel for channel in channels if self._send(channel, "open", common | self._outlet.describe(channel))]
        self._outlet.join(opening)
        for channel in opening:
            self._receive(channel, "open")

    def _ask_all(self, kind: str, fields: dict[str, Any]) -> dict[Connection, Frame]:
        self._send_all(kind, fields)
        return self._answers(kind)

    def _send_all(self, kind: str, fields: dict[str, Any]) -> None:
        for channel in list(self.channels):
            self._send(channel, kind, fields)

    def _send(self, channel: Connection, kind: str, fields: dict[str, Any]) -> bool:
        try:
            channel.send(kind, fields, timeout_s=self._sending.timeout_s)
        except WireError as error:
            self._lose(channel, error)
            return False
        self._waiting[channel].append(kind)
        return True

    def _answers(self, kind: str) -> dict[Connection, Frame]:
        """The answer of every engine to the oldest question of this kind. Blocks until each has answered or its time is up;
        what one answers with is raised when all have."""
        replies: dict[Connection, Frame] = {}
        failed: list[PeerError] = []
        for channel in list(self.channels):
            try:
                reply = self._receive(channel, kind)
            except PeerError as error:
                failed.append(error)
                continue
            if reply is not None:
                replies[channel] = reply
        if failed:
            raise failed[0]
        return replies

    def _receive(self, channel: Connection, kind: str) -> Frame | None:
        """The answer of one engine; None where it is lost."""
        assert self._waiting[channel][0] == kind
        try:
            reply = channel.receive(self._sending.timeout_s)
        except WireTimeout as error:
            channel.close()  # a late answer must not be taken for the next one
            why = f"{channel.name} did not answer {kind!r} of the weights within {self._sending.timeout_s:g} s"
            self._lose(channel, WireTimeout(why, error.hint))
            return None
        except WireError as error:
            self._lose(channel, error)
            return None
        self._waiting[channel].popleft()
        if reply.kind == "error":
            raise peer_error(channel.name, reply)
        return reply

    def _lose(self, channel: Connection, error: WireError) -> None:
        if self._sending.on_lost is None:
            raise error
        self.channels = [other for other in self.channels if other is not channel]
        self._waiting[channel].clear()
        self._sending.on_lost(channel, error)

    def _drain(self, channel: Connection) -> None:
        """Take the answers to what was asked before something failed."""
        while self._waiting[channel]:
            try:
                channel.receive(self._sending.timeout_s)
            except WireError:
                channel.close()
                self._waiting[channel].clear()
                raise WireClosed(f"the connection to {channel.name} was closed") from None
            self._waiting[channel].popleft()


class _Gathered(Mapping[str, Tensor]):
    """The trainer's tensors as they are asked for: of ranks that share them each is put together then. The last one is kept,
    since it may go on in the next bucket."""

    def __init__(self, tensors: Mapping[str, Tensor], forms: Mapping[str, Form], parts: dict[str, float]) -> None:
        self._tensors, self._forms, self._parts = tensors, forms, parts
        self._name: str | None = None
        self._last = torch.empty(0)

    def __getitem__(self, name: str) -> Tensor:
        if name != self._name:
            with _timed("gather", self._parts):
                self._last, self._name = self._tensors[name].contiguous(), name
            found = form_of(name, self._last)
            assert found == self._forms[name], f"the trainer has {found}, the engines were told of {self._forms[name]}"
        return self._last

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextmanager
def _timed(part: str, parts: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    with span(f"weight_sync.{part}"):
        yield
    parts[part] += time.perf_counter() - began
