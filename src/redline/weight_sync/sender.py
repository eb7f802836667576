"""The trainer's end of a transport that copies: tensors are packed into buckets, and every engine is asked to load them.

    trainer     gather ─► pack bucket 0 ─► pack bucket 1 ─► wait for 0 ─► pack bucket 2 (where 0 was) ─► …
    engines                                load 0, sum it    load 1, sum it …

Two buckets are enough that one side packs while the other loads. Every bucket is summed in blocks as it is packed; blocks whose
sum is that of the version which all engines have did not change, and do not travel. Where the engines' version is not known for
certain (the first one, after a revert, an engine that joins), everything does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redline.errors import WeightSyncError
from redline.types import WeightSet
from redline.weight_sync.asked import AskedEngines, Sending
from redline.weight_sync.buckets import Layout, Range, aligned, copy_all, form_of, lay_out, slots, views, within
from redline.weight_sync.changes import changed_ranges, sum_of
from redline.weight_sync.gathered import Gathered
from redline.weight_sync.parts import PARTS, timed
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.verify import Probe, block_sums
from redline.wire import Connection

OWN_PARTS = tuple(part for part in PARTS if part != "convert")
"""Parts that every update by buckets has; tensors that do not lie as they travel have `convert` too."""


class Outlet(Protocol):
    """The trainer's end of a link to all engines."""

    @property
    def link(self) -> str:
        """Its name, by which an engine opens the other end."""
        ...

    @property
    def takes_parts(self) -> bool:
        """Whether part of a bucket can travel."""
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

    def offer(self, slot: int, ranges: Sequence[Range]) -> None:
        """Called when a bucket is packed and the engines were told of it."""
        ...

    def reclaim(self, slot: int) -> None:
        """Called when every engine has the bucket."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, frozen=True)
class Known:
    """The bytes of a version that all engines have, as far as they are told apart from others."""

    version: int
    names: tuple[str, ...]
    blocks: list[NDArray[np.int64]]
    """The sums of each bucket's blocks."""


@dataclass(slots=True)
class Update:
    """What the update under way has done so far."""

    version: int
    names: tuple[str, ...]
    layout: Layout
    blocks: list[NDArray[np.int64]] = field(default_factory=list)
    """The sums of each bucket's blocks, as it was packed."""
    sent: list[tuple[int, int]] = field(default_factory=list)
    """The index of each bucket that was sent, and the sum of what was."""
    nbytes: int = 0
    """Bytes of tensors that were sent to each engine."""
    found: dict[Connection, list[int]] = field(default_factory=dict)
    """The sums that each engine found."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OWN_PARTS, 0.0))


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
        self._engines = AskedEngines(channels, sending)
        self._forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
        self._sending = sending
        self._device = next(iter(tensors.values())).device
        whole = aligned(sum(aligned(form.nbytes) for form in self._forms.values()))
        self._bucket_bytes = min(aligned(sending.bucket_bytes or bucket_bytes[self._device.type]), whole)
        self._outlet = make_outlet(self._bucket_bytes, self._device, sending)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._update: Update | None = None
        self._known: Known | None = None
        """What all engines have; None where that is not certain."""
        self.parts: dict[str, float] = {}
        """Seconds of each part of the last update."""
        self.pause_s = 0.0
        """How long the engine that took longest stood still for it."""
        self.num_waits = 0
        """How often this process has waited for its device in updates."""
        self._open(self.channels)

    @property
    def channels(self) -> list[Connection]:
        """The engines that are there."""
        return self._engines.channels

    # ── the port ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Bring what changed of the plan's tensors into every engine's second set. Blocks until it is there; returns the bytes
        sent."""
        self._check_names(weights)
        self._update = update = Update(plan.version, plan.names, self._layout(plan.names))
        begin = {"version": plan.version, "names": list(plan.names), "hold": self._sending.holds_engines}
        known = self._what_all_have(self._engines.ask_all("begin", begin), plan.names)
        gathered = Gathered(weights.tensors, self._forms, update.parts)
        in_slots: deque[int] = deque()
        for index in range(len(update.layout.buckets)):
            if len(in_slots) == len(self._outlet.slots):
                self._take_loaded(in_slots.popleft())
            slot = len(update.sent) % len(self._outlet.slots)
            self._pack(index, slot, gathered)
            ranges = changed_ranges(update.blocks[index], known.blocks[index] if known else None, update.layout.sizes[index])
            if ranges:
                self._send_bucket(index, slot, ranges)
                in_slots.append(slot)
        for slot in in_slots:
            self._take_loaded(slot)
        self._take_sums()
        return update.nbytes * max(1, len(self.channels))

    def verify(self, weights: WeightSet) -> None:
        """Raise WeightSyncError unless every engine found the sums of the buckets that were sent."""
        self._check_names(weights)
        update = self._update
        if update is None or update.version != weights.version:
            return  # every engine has this version already
        for channel in self.channels:
            found = update.found.get(channel, [])
            wrong = [index for at, (index, total) in enumerate(update.sent) if found[at : at + 1] != [total]]
            if wrong:
                names = update.layout.names(wrong[0])
                which = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
                why = f"{channel.name} has other bytes than were sent in {len(wrong)} of {len(update.sent)} buckets ({which})"
                raise WeightSyncError(why, "try again; where it happens again, look for faults of the memory")

    def adopt(self, probe: Probe | None = None) -> None:
        """Have every engine read what was moved, and block until each has proven it. Where one fails its error is raised when
        all have answered: it has its old version then, and `revert` brings the others back."""
        update = self._update
        assert update is not None, "move comes first"
        fields = {"version": update.version, "probe": probe.to_json() if probe is not None else None}
        with timed("resume", update.parts):
            replies = self._engines.ask_all("adopt", fields)
        self.pause_s = max((reply.fields["pause_s"] for reply in replies.values()), default=0.0)
        self.parts = dict(update.parts)
        is_packed = len(update.blocks) == len(update.layout.buckets)  # not where every engine was lost before that
        self._known = Known(update.version, update.names, update.blocks) if is_packed else None

    def revert(self, version: int) -> None:
        """Bring every engine that has adopted `version` and can be reached back to the one it had before, whole."""
        self._update = self._known = None
        self._engines.tell_each("revert", {"version": version})

    @torch.no_grad()
    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        """Bring one engine that joins, or was started again, to these weights, have it prove that as in every update, and have
        it in every later one."""
        known = self._known
        try:
            with self._engines.alone(channel):
                self._open([channel])
                self._bring(weights, probe)
        finally:
            self._update, self._known = None, known

    def close(self) -> None:
        """Let go of the link. The connections stay open."""
        self._engines.tell_each("close", {})
        self._outlet.close()

    # ── buckets ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _bring(self, weights: WeightSet, probe: Probe | None) -> None:
        self._known = None
        self.move(TransferPlan(weights.version, tuple(weights.tensors)), weights)
        self.verify(weights)
        if self.channels:
            self.adopt(probe)

    def _layout(self, names: tuple[str, ...]) -> Layout:
        if names not in self._layouts:
            self._layouts = {names: lay_out([self._forms[name] for name in names], self._bucket_bytes)}
        return self._layouts[names]

    def _what_all_have(self, ready: Mapping[Connection, Any], names: tuple[str, ...]) -> Known | None:
        """What need not travel; None where an engine says that it has another version than we know of."""
        known = self._known
        if known is None or not self._outlet.takes_parts or known.names != names:
            return None
        return known if all(reply.fields["version"] == known.version for reply in ready.values()) else None

    def _pack(self, index: int, slot: int, gathered: Mapping[str, Tensor]) -> None:
        update = self._update
        assert update is not None
        pieces, bucket = update.layout.buckets[index], self._outlet.slots[slot]
        values = views(pieces, gathered)
        with timed("serialise", update.parts):
            copy_all(slots(pieces, bucket), values)
            update.blocks.append(block_sums(bucket[: update.layout.sizes[index]]).cpu().numpy())  # waits for the device
            self.num_waits += 1

    def _send_bucket(self, index: int, slot: int, ranges: list[Range]) -> None:
        """Have the engines load a bucket. They tell its sum at once only where the slot may be wanted again: for that they wait
        for their device."""
        update = self._update
        assert update is not None
        update.sent.append((index, sum_of(update.blocks[index], ranges)))
        update.nbytes += sum(piece.nbytes for piece in within(update.layout.buckets[index], ranges))
        left = len(update.layout.buckets) - 1 - index
        fields = {"index": index, "slot": slot, "ranges": ranges, "tell": left >= len(self._outlet.slots) or not left}
        with timed("transfer", update.parts):
            self._engines.send_all("bucket", fields)
            self._outlet.offer(slot, ranges)

    def _take_loaded(self, slot: int) -> None:
        update = self._update
        assert update is not None
        with timed("transfer", update.parts):
            replies = self._engines.answers("bucket")
            self._outlet.reclaim(slot)
        self._note_sums(replies)

    def _take_sums(self) -> None:
        """Ask for the sums that were not told, where the last buckets did not change and were not sent."""
        update = self._update
        assert update is not None
        if any(len(update.found.get(channel, [])) < len(update.sent) for channel in self.channels):
            with timed("transfer", update.parts):
                replies = self._engines.ask_all("sums", {})
            self._note_sums(replies)

    def _note_sums(self, replies: Mapping[Connection, Any]) -> None:
        update = self._update
        assert update is not None
        for channel, reply in replies.items():
            update.found.setdefault(channel, []).extend(int(total) for total in reply.fields["sums"])
        for part in ("load", "verify"):
            update.parts[part] = max([update.parts[part], *(reply.fields.get(f"{part}_s", 0.0) for reply in replies.values())])

    def _check_names(self, weights: WeightSet) -> None:
        other = weights.tensors.keys() ^ self._forms.keys()
        assert not other, f"other tensors than the engines were told of: {', '.join(sorted(other))}"

    def _open(self, channels: Sequence[Connection]) -> None:
        forms = [form.to_json() for form in self._forms.values()]
        common = {"link": self._outlet.link, "forms": forms, "bucket_bytes": self._bucket_bytes}
        opening = [
            channel for channel in channels if self._engines.send(channel, "open", common | self._outlet.describe(channel))
        ]
        self._outlet.join(opening)
        for channel in opening:
            self._engines.receive(channel, "open")
