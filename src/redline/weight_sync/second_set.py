"""A second set of an engine's weights: filled while the engine samples from the first, exchanged with it between two steps.

    begin(version) ──► loaded(…) or put(…) ──► adopt() ──► the engine reads the new bytes, the second set has the old
                                                  │
                                                  └──► revert() ──► the engine reads the old bytes again

Only what came is exchanged; the rest of what the engine reads stays as it is. Bytes are exchanged, not addresses, since
captured graphs and views of fused tensors know the addresses. An adoption is all or nothing: room for the exchange is taken
before its first byte moves, and what fails later brings the old bytes and the old version back, together. Where even that
fails the error is TornWeightsError, and the engine must take no further step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from redline.errors import EngineError, TornWeightsError, in_words
from redline.weight_sync.buckets import (
    ALIGNMENT,
    Form,
    Layout,
    Piece,
    Range,
    aligned,
    copy_all,
    exchange,
    form_of,
    lay_out,
    slots,
    views,
    within,
)
from redline.weight_sync.verify import checksum

SCRATCH_BYTES = {"cuda": 128 * 2**20, "cpu": 4 * 2**20}
"""Through which the two sets are exchanged, by device: enough that copies, not their launches, take the time."""

Take = Callable[[int, tuple[str, ...], int], None]
"""Has the engine note a version, given the names and the number of bytes that changed."""


@dataclass(slots=True)
class SecondBucket:
    """A run of bytes of the second set."""

    pieces: tuple[Piece, ...]
    memory: Tensor
    """uint8, on the engine's device."""
    ranges: list[Range] = field(default_factory=list)
    """What came of it for the version under way."""


@dataclass(slots=True, frozen=True)
class Both:
    """The same bytes of both sets, and room through which they are exchanged."""

    live: list[Tensor]
    second: list[Tensor]
    scratch: Tensor
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.numel() for run in self.live)

    def exchange(self) -> None:
        """Exchange them where they lie, or leave them as they are and raise. Does not wait for the device."""
        exchange(self.live, self.second, self.scratch)


class SecondSet:
    """The second set of weights of one engine. Implements `receiver.ReceivedSet`."""

    needs_hold = False
    """The engine samples on while buckets come."""

    def __init__(self, live: Mapping[str, Tensor], version: int = 0) -> None:
        """`live`: the tensors that the engine reads, by the trainer's names; `version` is theirs."""
        self.live = {name: tensor.detach() for name, tensor in live.items()}
        """What the engine reads."""
        assert all(tensor.is_contiguous() for tensor in self.live.values()), "weights lie in one piece each"
        self.device = next(iter(self.live.values())).device
        self.version = version
        """Whose bytes are live."""
        self.before: int | None = None
        """The version that the second set holds since it was exchanged, whole; None where it holds none."""
        self.coming: int | None = None
        """The version that is being put together; None between an adoption and the next `begin`."""
        self.buckets: list[SecondBucket] = []
        self._layout: Layout | None = None
        self._exchanged: Both | None = None

    def form(self, name: str) -> Form | None:
        """The form of a tensor that the engine reads; None where it has none of this name."""
        return form_of(name, self.live[name]) if name in self.live else None

    # ── a version comes ────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, version: int, layout: Layout | None = None) -> None:
        """Forget what came for another version, and the version before the live one. With a `layout` there is room for all of
        its buckets afterwards; without one, `put` makes room."""
        self._exchanged, self.before, self.coming = None, None, version
        if layout is None or layout != self._layout:
            self.buckets = []  # before the next are made
            self.buckets = [self._room(pieces) for pieces in layout.buckets] if layout is not None else []
            self._layout = layout
        for bucket in self.buckets:
            bucket.ranges = []

    def drop(self) -> None:
        """Forget all of it, and give its memory back. The live weights stay."""
        self.buckets, self._layout, self._exchanged, self.before, self.coming = [], None, None, None, None

    def give_up(self) -> None:
        """Forget what came for the version under way."""
        self.coming = None
        for bucket in self.buckets:
            bucket.ranges = []

    def memory(self, index: int) -> Tensor:
        """Where the bytes of a bucket go: uint8 on the engine's device."""
        return self.buckets[index].memory

    def loaded(self, index: int, ranges: Sequence[Range]) -> None:
        """Note that these bytes of a bucket have come."""
        self.buckets[index].ranges = list(ranges)

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take whole tensors of the version that is being put together, from host memory. Blocks until they are on the engine's
        device and checked there. Raises EngineError, and takes none of them, where the engine has no such tensors."""
        assert self.coming is not None, "begin first"
        for name, tensor in tensors.items():
            self._check_form(name, tensor)
        forms = [form_of(name, tensor) for name, tensor in tensors.items()]
        for pieces in lay_out(forms, ALIGNMENT + sum(aligned(form.nbytes) for form in forms)).buckets:
            bucket = self._room(pieces)
            sent = torch.zeros(bucket.memory.numel(), dtype=torch.uint8)
            copy_all(slots(pieces, sent), views(pieces, tensors))
            bucket.memory.copy_(sent)
            if int(checksum(bucket.memory)) != int(checksum(sent)):
                raise EngineError("other bytes have arrived on the device than were sent", "send the weights again")
            for other in self.buckets:  # a tensor that is sent again counts once
                other.pieces = tuple(piece for piece in other.pieces if piece.name not in tensors)
            bucket.ranges = [(0, bucket.memory.numel())]
            self.buckets.append(bucket)

    def check_whole(self, version: int, names: Iterable[str]) -> None:
        """Raise EngineError unless this version came, with exactly these tensors."""
        if version != self.coming:
            raise EngineError(f"version {version} was not sent; the one that was is {self.coming}", "send it first")
        if missing := set(names) ^ set(self._names()):
            raise EngineError(f"version {version} is not whole: {', '.join(sorted(missing)[:5])}", "send it again")

    def _check_form(self, name: str, tensor: Tensor) -> None:
        there = self.live.get(name)
        if there is None:
            raise EngineError(f"the engine has no tensor {name}", "trainer and engine must run the same model")
        if form_of(name, tensor) != form_of(name, there):
            raise EngineError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} was sent, the engine reads {there.dtype} {list(there.shape)}",
                "trainer and engine must run the same model in the same type",
            )

    def _room(self, pieces: tuple[Piece, ...]) -> SecondBucket:
        size = aligned(pieces[-1].offset + pieces[-1].nbytes)
        return SecondBucket(pieces, torch.empty(size, dtype=torch.uint8, device=self.device))

    def _names(self) -> tuple[str, ...]:
        """Tensors of which something came."""
        return tuple(dict.fromkeys(piece.name for bucket in self.buckets for piece in within(bucket.pieces, bucket.ranges)))

    # ── the engine changes over: for the thread that has it between two steps ──────────────────────────────────────────

    @torch.no_grad()
    def adopt(self, take: Take, check: Callable[[], None] = lambda: None) -> None:
        """Exchange what came with what the engine reads, have it note the version, and `check` it. Where one of them raises,
        the engine has its old bytes and its old version again. Does not wait for the device, unless `check` does."""
        assert self.coming is not None, "begin comes first"
        old, new, both = self.version, self.coming, self._both()
        both.exchange()
        try:
            take(new, both.names, both.nbytes)
            check()
        except BaseException as error:
            try:
                both.exchange()
            except BaseException as second:
                why = f"an update that failed cannot be taken back: {in_words(error)}"
                raise TornWeightsError(why, "start the engine again") from second
            take(old, both.names, both.nbytes)
            raise
        self.version, self.before, self.coming, self._exchanged = new, old, None, both

    @torch.no_grad()
    def revert(self, version: int, take: Take) -> None:
        """Go back to `version`, the one before; the live one may have its number. Raises EngineError where it is gone."""
        self.give_up()
        if version != self.before or self._exchanged is None:
            raise EngineError(f"version {version} is gone; the engine is at {self.version}", "send it again")
        both = self._exchanged
        both.exchange()
        self.version, self.before, self._exchanged = version, None, None
        take(version, both.names, both.nbytes)

    def _both(self) -> Both:
        live: list[Tensor] = []
        second: list[Tensor] = []
        for bucket in self.buckets:
            pieces = within(bucket.pieces, bucket.ranges)
            live += views(pieces, self.live)
            second += slots(pieces, bucket.memory)
        most = max(ALIGNMENT, sum(aligned(run.numel()) for run in live))
        scratch = torch.empty(min(most, SCRATCH_BYTES[self.device.type]), dtype=torch.uint8, device=self.device)
        return Both(live, second, scratch, self._names())
