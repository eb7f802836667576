"""The second set of an engine that several ranks divide: whole buckets come to rank 0, and every rank keeps its own bytes.

    trainer ── bucket ──► rank 0 ── the same bytes ──► ranks 1, 2, …     each sums it and takes its part into its second set
    trainer ── adopt ───► rank 0 ── adopt ───────────► ranks 1, 2, …     each exchanges its two sets; all compute the probe

The engine stands still meanwhile: its other ranks take what comes between two steps, in the order in which rank 0 tells them. A
rank that cannot do its part ends, and the engine with it: no rank ever goes on with other weights than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from redline.errors import EngineError, WeightSyncError
from redline.models.parallel import Cut, Shard
from redline.telemetry import span
from redline.weight_sync.buckets import (
    ALIGNMENT,
    Form,
    Layout,
    Piece,
    Range,
    aligned,
    copy_all,
    flat_bytes,
    form_of,
    lay_out,
    slots,
    within,
)
from redline.weight_sync.second_set import SecondSet, Take
from redline.weight_sync.verify import BLOCK, block_sums

SPANS = {"adopt": "weight_sync.resume", "revert": "weight_sync.resume", "probe": "weight_sync.verify"}
"""An order → the span of the time that it takes another rank; all others are `weight_sync.load`."""


class OtherRanks(Protocol):
    """The other ranks of an engine, as rank 0 has them between two steps. Every method raises `EngineLostError` where one of
    them is gone."""

    def order(self, entry: Mapping[str, Any]) -> None:
        """Have them do something; `entry` is JSON."""
        ...

    def send(self, run: Tensor) -> None:
        """Send them a run of bytes."""
        ...

    def is_same(self, value: int) -> bool:
        """Block until each has come to this point, and return whether all have the same value."""
        ...


class RankZero(Protocol):
    """The same, as another rank sees rank 0."""

    def send(self, run: Tensor) -> None:
        """Fill a run of bytes with what rank 0 sends."""
        ...

    def is_same(self, value: int) -> bool: ...


class PartSet:
    """One rank's part of the weights: what it reads, and a second set of the same form."""

    def __init__(self, live: Mapping[str, Tensor], cuts: Mapping[str, Cut], shard: Shard, version: int = 0) -> None:
        """`live` are the parts that this rank reads, by the trainer's names."""
        self.second = SecondSet(live, version)
        self._windows = {name: window_of(tensor, cuts[name], shard) for name, tensor in self.second.live.items()}
        self._forms = {name: _whole_form(form_of(name, part), cuts[name], shard.world) for name, part in live.items()}
        self._buckets: tuple[tuple[Piece, ...], ...] = ()
        self._parts: dict[str, Tensor] = {}
        """The bytes of each part in the second set."""

    def whole_form(self, name: str) -> Form | None:
        """The form of the tensor of which this rank has a part."""
        return self._forms.get(name)

    @torch.no_grad()
    def begin(self, version: int, buckets: Sequence[Sequence[Piece]]) -> None:
        """Make room for a version whose tensors come in these buckets. What does not come is as it is now."""
        self._buckets = tuple(tuple(pieces) for pieces in buckets)
        names = dict.fromkeys(piece.name for pieces in self._buckets for piece in pieces)
        own = [form_of(name, self.second.live[name]) for name in names if self._windows[name] is not None]
        layout = lay_out(own, ALIGNMENT + sum(aligned(form.nbytes) for form in own))
        self.second.begin(version, layout)
        self._parts = {}
        for index, bucket in enumerate(self.second.buckets):
            runs = slots(bucket.pieces, bucket.memory)
            copy_all(runs, [flat_bytes(self.second.live[piece.name]) for piece in bucket.pieces])
            self._parts |= {piece.name: run for piece, run in zip(bucket.pieces, runs, strict=True)}
            self.second.loaded(index, [(0, bucket.memory.numel())])

    @torch.no_grad()
    def take(self, index: int, memory: Tensor, ranges: Sequence[Range]) -> None:
        """Copy this rank's bytes of ranges of a bucket, which lie in `memory` as in the bucket, into the second set."""
        for piece in within(self._buckets[index], ranges):
            window = self._windows[piece.name]
            if window is not None:
                window.copy(piece.start, memory[piece.offset : piece.offset + piece.nbytes], self._parts[piece.name])


class DividedSet:
    """The second set of an engine of several ranks, for its receiver on rank 0. Implements `receiver.ReceivedSet`."""

    needs_hold = True
    """The other ranks listen between two steps only."""

    def __init__(self, part: PartSet, others: OtherRanks) -> None:
        self._part, self._others = part, others
        self._layout = Layout(())
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        """The bucket that has come, whole."""

    @property
    def version(self) -> int:
        return self._part.second.version

    @property
    def before(self) -> int | None:
        return self._part.second.before

    @property
    def coming(self) -> int | None:
        return self._part.second.coming

    @property
    def device(self) -> torch.device:
        return self._part.second.device

    def form(self, name: str) -> Form | None:
        return self._part.whole_form(name)

    def begin(self, version: int, layout: Layout) -> None:
        if layout != self._layout:
            self._layout = layout
            self._memory = _room_for(layout, self.device)
        buckets = [[[piece.name, piece.start, piece.offset, piece.nbytes] for piece in pieces] for pieces in layout.buckets]
        self._others.order({"weights": "begin", "version": version, "buckets": buckets})
        self._part.begin(version, layout.buckets)

    def memory(self, index: int) -> Tensor:
        return self._memory[: self._layout.sizes[index]]

    def loaded(self, index: int, ranges: Sequence[Range]) -> None:
        """Pass on what has come of a bucket. Raises WeightSyncError where another rank has got other bytes."""
        memory = self.memory(index)
        self._others.order({"weights": "bucket", "index": index, "ranges": list(ranges)})
        for begin, end in ranges:
            self._others.send(memory[begin:end])
        if not self._others.is_same(sum_within(memory, ranges)):
            raise WeightSyncError(
                "a rank of the engine has other bytes than it was sent",
                "try again; where it happens again, look for faults of the memory",
            )
        self._part.take(index, memory, ranges)

    def adopt(self, take: Take, check: Callable[[], None]) -> None:
        """Have every rank exchange its two sets, note the version and `check` it together. Where that fails, all of them have
        their old bytes and their old version again."""
        old = self.version

        def all_have_it() -> None:
            self._others.is_same(0)
            check()

        self._others.order({"weights": "adopt"})
        try:
            self._part.second.adopt(take, all_have_it)
        except BaseException:
            self._order_back(old)
            raise

    def revert(self, version: int, take: Take) -> None:
        """Go back to `version`, the one before."""
        assert version == self.before
        self._order_back(version)
        self._part.second.revert(version, take)

    def give_up(self) -> None:
        """Forget what came for the version under way. The other ranks do so when the next one begins."""
        self._part.second.give_up()

    def drop(self) -> None:
        """Give the memory back. The other ranks keep theirs for the next version."""
        self._part.second.drop()
        self._layout, self._memory = Layout(()), torch.empty(0, dtype=torch.uint8, device=self.device)

    def _order_back(self, version: int) -> None:
        self._others.order({"weights": "revert", "version": version})


class Follower:
    """What another rank than 0 does with its part, as rank 0 orders."""

    def __init__(self, part: PartSet, rank_zero: RankZero, take: Take, logprobs: Callable[[Sequence[int]], object]) -> None:
        """`take` has this rank's engine note a version. `logprobs` computes a probe, with all ranks."""
        self._part, self._rank_zero, self._take, self._logprobs = part, rank_zero, take, logprobs
        self._layout = Layout(())
        self._memory = torch.empty(0, dtype=torch.uint8, device=part.second.device)
        """The bucket that has come, whole."""

    def do(self, entry: Mapping[str, Any]) -> None:
        """Do what an order of rank 0 says. Whatever it raises is the end of this rank."""
        second, kind = self._part.second, entry["weights"]
        with span(SPANS.get(kind, "weight_sync.load")):
            if kind == "begin":
                self._begin(entry["version"], entry["buckets"])
            elif kind == "bucket":
                self._take_bucket(entry["index"], [(begin, end) for begin, end in entry["ranges"]])
            elif kind == "adopt":
                second.adopt(self._take, lambda: None)
                self._rank_zero.is_same(0)
            elif kind == "probe":
                self._logprobs(entry["tokens"])
            elif kind == "revert":
                second.revert(entry["version"], self._take)
            else:
                raise EngineError(f"{kind!r}: no such order about weights", "all ranks must be of one version")

    def _begin(self, version: int, buckets: Sequence[Sequence[Sequence[Any]]]) -> None:
        layout = Layout(tuple(tuple(Piece(*fields) for fields in pieces) for pieces in buckets))
        if layout != self._layout:
            self._layout = layout
            self._memory = _room_for(layout, self._part.second.device)
        self._part.begin(version, layout.buckets)

    def _take_bucket(self, index: int, ranges: Sequence[Range]) -> None:
        memory = self._memory[: self._layout.sizes[index]]
        for begin, end in ranges:
            self._rank_zero.send(memory[begin:end])
        self._rank_zero.is_same(sum_within(memory, ranges))
        self._part.take(index, memory, ranges)


# ── which bytes of a tensor are a rank's ───────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Window:
    """Bytes of a tensor that a rank has, with the tensor as rows of equal length: some columns of some rows."""

    row_bytes: int
    """Bytes of a row of the whole tensor."""
    columns: Range
    """The bytes of a row that the rank has."""
    rows: tuple[Range, ...]
    """The rows of the whole tensor that it has, in the order in which they lie in its part."""

    def copy(self, start: int, run: Tensor, part: Tensor) -> None:
        """Copy what the rank has of `run`, the bytes from `start` on of the whole tensor, to its place in `part`."""
        width, row = self.columns[1] - self.columns[0], 0
        for first, last in self.rows:
            if width == self.row_bytes:
                self._copy_run(start, run, part, (first * width, last * width), row * width)
            else:
                self._copy_columns(start, run, part, (first, last), row)
            row += last - first

    def _copy_columns(self, start: int, run: Tensor, part: Tensor, rows: Range, place: int) -> None:
        """Copy whole rows at once, and each row that the run cuts by itself."""
        (left, right), size = self.columns, self.row_bytes
        width, end = right - left, start + run.numel()
        first, last = max(rows[0], -(-start // size)), min(rows[1], end // size)
        if first < last:
            whole = run[first * size - start : last * size - start].view(-1, size)[:, left:right]
            at = place + first - rows[0]
            part[at * width : (at + last - first) * width].view(-1, width).copy_(whole)
        for row in _cut_rows(start, end, size):
            if rows[0] <= row < rows[1]:
                self._copy_run(start, run, part, (row * size + left, row * size + right), (place + row - rows[0]) * width)

    @staticmethod
    def _copy_run(start: int, run: Tensor, part: Tensor, wanted: Range, place: int) -> None:
        """Copy bytes `wanted` of the whole tensor, as far as the run has them; in the part the first of them is at `place`."""
        begin, end = max(start, wanted[0]), min(start + run.numel(), wanted[1])
        if begin < end:
            at = place + begin - wanted[0]
            part[at : at + end - begin].copy_(run[begin - start : end - start])


def _cut_rows(start: int, end: int, size: int) -> Iterator[int]:
    """Rows of which a run of bytes has a part."""
    if start % size:
        yield start // size
    if end % size and (end // size != start // size or not start % size):
        yield end // size


def window_of(part: Tensor, cut: Cut, shard: Shard) -> Window | None:
    """The bytes of the whole tensor that lie in a rank's part of it; None where the part stays zero."""
    if cut.first_alone and shard.rank:
        return None
    rows, row_bytes = part.shape[0], prod(part.shape[1:]) * part.dtype.itemsize
    if cut.dim is None:
        return Window(row_bytes, (0, row_bytes), ((0, rows),))
    if cut.dim == 1:
        assert part.dim() == 2
        return Window(row_bytes * shard.world, (shard.rank * row_bytes, (shard.rank + 1) * row_bytes), ((0, rows),))
    assert cut.dim == 0
    found, begin = [], 0
    for size in cut.sizes or (rows * shard.world,):
        each = size // shard.world
        found.append((begin + shard.rank * each, begin + (shard.rank + 1) * each))
        begin += size
    return Window(row_bytes, (0, row_bytes), tuple(found))


def _whole_form(part: Form, cut: Cut, world: int) -> Form:
    shape = tuple(size * world if dim == cut.dim else size for dim, size in enumerate(part.shape))
    return Form(part.name, part.dtype, shape)


def sum_within(memory: Tensor, ranges: Sequence[Range]) -> int:
    """The sum of ranges of a bucket, as a receiver tells it. Waits for the device."""
    sums_P = block_sums(memory)
    return int(torch.cat([sums_P[begin // (8 * BLOCK) : -(-end // (8 * BLOCK))] for begin, end in ranges]).sum())


def _room_for(layout: Layout, device: torch.device) -> Tensor:
    """Memory that holds any one bucket."""
    return torch.empty(max(layout.sizes, default=0), dtype=torch.uint8, device=device)
