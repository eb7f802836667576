"""Tensors laid end to end in buckets: what one side packs, the other unpacks by the same arithmetic.

    forms of the tensors ──lay_out──► Layout: buckets of pieces        a bucket   |piece|piece|…      one flat run of bytes
                                                                       a piece    bytes start…start+size of one tensor

A tensor that does not fit into what is left of a bucket goes on in the next, so that buckets have one size however large an
embedding is. Both sides compute the layout from names, forms and the size of a bucket: it is never sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from redline.errors import TornWeightsError, WeightSyncError, in_words

ALIGNMENT = 16
"""Bytes: pieces begin at multiples of it, so that every type can be read there and copies move whole words."""
WORD = torch.int64
"""Bytes are copied and summed as words of this type."""


@dataclass(slots=True, frozen=True)
class Form:
    """A tensor without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape)]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} {list(self.shape)}"


def form_of(name: str, tensor: Tensor) -> Form:
    return Form(name, tensor.dtype, tuple(tensor.shape))


def form_from_json(values: Any) -> Form:
    """Read a form that another process has sent. Raises WeightSyncError where it is none."""
    try:
        name, dtype, shape = values
        kind = getattr(torch, dtype)
        assert isinstance(name, str)
        assert isinstance(kind, torch.dtype)
        assert all(type(size) is int and size >= 0 for size in shape)
        return Form(name, kind, tuple(shape))
    except (AssertionError, AttributeError, TypeError, ValueError):
        raise WeightSyncError(f"{values!r} is not the form of a tensor", "both sides must be of one version") from None


@dataclass(slots=True, frozen=True)
class Piece:
    """Some bytes of a tensor in a bucket."""

    name: str
    start: int
    """The first of them in the tensor."""
    offset: int
    """The first of them in the bucket."""
    nbytes: int


Range = tuple[int, int]
"""Bytes of a bucket: the first of them, and the first behind them."""


@dataclass(slots=True, frozen=True)
class Layout:
    """Which bytes are in which bucket, in the order in which they travel."""

    buckets: tuple[tuple[Piece, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each bucket, gaps between pieces included: a multiple of `ALIGNMENT`."""
        return tuple(aligned(pieces[-1].offset + pieces[-1].nbytes) for pieces in self.buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.nbytes for pieces in self.buckets for piece in pieces)

    def names(self, bucket: int) -> list[str]:
        """Tensors that have bytes in a bucket."""
        return [piece.name for piece in self.buckets[bucket]]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lay_out(forms: Iterable[Form], bucket_bytes: int) -> Layout:
    """Put tensors into buckets of at most `bucket_bytes`, in the order given. Tensors without elements are left out."""
    assert bucket_bytes > 0
    assert bucket_bytes % ALIGNMENT == 0
    buckets: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    offset = 0
    for form in forms:
        start = 0
        while start < form.nbytes:
            if offset == bucket_bytes:
                buckets.append(tuple(pieces))
                pieces, offset = [], 0
            size = min(form.nbytes - start, bucket_bytes - offset)
            pieces.append(Piece(form.name, start, offset, size))
            start, offset = start + size, offset + aligned(size)
    return Layout((*buckets, tuple(pieces)) if pieces else tuple(buckets))


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: a view of it where it is contiguous, else of a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def within(pieces: Iterable[Piece], ranges: Sequence[Range]) -> list[Piece]:
    """What ranges of a bucket hold of its pieces."""
    found = []
    for piece in pieces:
        for begin, end in ranges:
            first, last = max(piece.offset, begin), min(piece.offset + piece.nbytes, end)
            if first < last:
                found.append(Piece(piece.name, piece.start + first - piece.offset, first, last - first))
    return found


def views(pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The bytes that each piece stands for, from tensors by name; each is asked for once in a row."""
    found, name, flat = [], None, torch.empty(0)
    for piece in pieces:
        if piece.name != name:
            name, flat = piece.name, flat_bytes(tensors[piece.name])
        found.append(flat[piece.start : piece.start + piece.nbytes])
    return found


def slots(pieces: Sequence[Piece], bucket: Tensor) -> list[Tensor]:
    """Where each piece lies in the bytes of a bucket."""
    return [bucket[piece.offset : piece.offset + piece.nbytes] for piece in pieces]


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy runs of bytes, few launches for all of them: as words where each is whole words, else as bytes."""
    words = [_is_words(to) and _is_words(value) for to, value in zip(into, values, strict=True)]
    for dtype, wanted in ((WORD, True), (torch.uint8, False)):
        pairs = [(to, value) for to, value, is_words in zip(into, values, words, strict=True) if is_words is wanted]
        if pairs:
            torch._foreach_copy_([to.view(dtype) for to, _ in pairs], [value.view(dtype) for _, value in pairs])


def _is_words(run: Tensor) -> bool:
    return run.numel() % WORD.itemsize == 0 and run.storage_offset() % WORD.itemsize == 0


def exchange(ours: Sequence[Tensor], theirs: Sequence[Tensor], scratch: Tensor) -> None:
    """Exchange two lists of runs of bytes through `scratch`, a lot of that size at a time. All or nothing: where a copy fails,
    what was exchanged is exchanged back and the error is raised; TornWeightsError where that fails too."""
    done: list[tuple[list[Tensor], list[Tensor]]] = []
    try:
        for left, right in _at_most(scratch.numel(), ours, theirs):
            _exchange_lot(left, right, scratch)
            done.append((left, right))
    except TornWeightsError:
        raise
    except BaseException as error:
        with _or_torn(error):
            for left, right in reversed(done):
                _exchange_lot(left, right, scratch)
        raise


def _exchange_lot(left: list[Tensor], right: list[Tensor], scratch: Tensor) -> None:
    """Exchange one lot that fits into `scratch`, or leave both sides as they were and raise."""
    begins = accumulate((aligned(run.numel()) for run in left[:-1]), initial=0)
    kept = [scratch[begin : begin + run.numel()] for begin, run in zip(begins, left, strict=True)]
    copy_all(kept, left)
    back = [(left, kept)]
    try:
        copy_all(left, right)
        back = [(right, left), (left, kept)]
        copy_all(right, kept)
    except BaseException as error:
        with _or_torn(error):
            for into, values in back:
                copy_all(into, values)
        raise


@contextmanager
def _or_torn(error: BaseException) -> Iterator[None]:
    """What is done here brings weights back after an error. Where it fails, they are torn."""
    try:
        yield
    except BaseException as second:
        why = f"weights were exchanged in part and cannot be brought back: {in_words(error)}"
        raise TornWeightsError(why, "start the engine again") from second


def _at_most(limit: int, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Pairs of runs in lots of at most `limit` bytes; longer runs are cut."""
    left: list[Tensor] = []
    right: list[Tensor] = []
    room = limit
    for our, their in zip(ours, theirs, strict=True):
        begin = 0
        while begin < our.numel():
            if room < ALIGNMENT:
                yield left, right
                left, right, room = [], [], limit
            end = min(our.numel(), begin + room // ALIGNMENT * ALIGNMENT)
            left.append(our[begin:end])
            right.append(their[begin:end])
            room, begin = room - aligned(end - begin), end
    if left:
        yield left, right
