"""The Arrow files of a run's trajectories: one record batch each, one row per sequence.

    segment-000007.open.arrow   [tokens ▓▓▓▓░░][mask ▓▓▓▓░░][logprobs ▓▓▓▓░░] …    laid out in advance, filled from the left
    segment-000006.arrow        [tokens][mask][logprobs] …                         full, without the gaps

Every column has its room from the beginning, so that groups which come one after the other lie one after the other in each of
them: a batch of neighbours is a slice. The sizes in the file's head are written last. The file is therefore complete whenever
anybody opens it, and after a kill it holds the groups that were added, whole. The gaps take no space on the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from redline.buffer.store.arrow_layout import Head, blank_file, check_sizes
from redline.buffer.store.columns import SCHEMA, Node
from redline.buffer.store.earlier import known_schema
from redline.telemetry.files.durable import flush_to_disk

SEGMENT_BYTES = 16 << 20
"""A segment is full from this size on: what is evicted, and at worst lost, as a whole."""
ROOM = 1.5
"""Room of each column over what it needs if the groups to come are like those before; unused room takes no disk."""
LEAST_ROOM = 1 << 16
HEAD_BYTES = 1 << 16
"""More than any head has."""
_NAME = re.compile(r"segment-(\d{6,})(\.open)?\.arrow")


class DamagedSegmentError(Exception):
    """A segment cannot be read as it is."""


@dataclass(slots=True, frozen=True)
class SegmentFile:
    path: Path
    number: int
    is_open: bool
    """Has gaps: its writer is at work, or was killed."""


def segment_files(folder: Path) -> list[SegmentFile]:
    """Oldest first; none where there is no such folder."""
    there = folder.iterdir() if folder.is_dir() else ()
    found = [(match, path) for path in there if (match := _NAME.fullmatch(path.name))]
    return sorted((SegmentFile(path, int(match[1]), bool(match[2])) for match, path in found), key=lambda file: file.number)


def segment_path(folder: Path, number: int, *, is_open: bool = False) -> Path:
    return folder / f"segment-{number:06d}{'.open' if is_open else ''}.arrow"


def read_segment(path: Path) -> pa.RecordBatch:
    """Memory-mapped; the mapping lives as long as any of its arrays does, even when the file is gone. The columns are those
    that were written: `earlier.as_of_now` gives today's."""
    try:
        with pa.memory_map(str(path)) as source:
            head = Head.of(source.read(HEAD_BYTES))
            schema = known_schema(head.schema)
            check_sizes(head, schema)
            reader = pa.ipc.open_file(source)
            if reader.num_record_batches != 1 or not reader.schema.equals(schema):
                raise DamagedSegmentError(f"{path}: not one record batch of a run's trajectories")
            return reader.get_batch(0)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise DamagedSegmentError(f"{path}: {error}") from error


def seal(batch: pa.RecordBatch, path: Path, *, replaces: Path | None = None) -> None:
    """Write a segment without gaps. The open file that it was becomes it by renaming: there is one of them at any time."""
    scratch = path.with_name(f".{path.name}.partial")
    try:
        batch = batch.replace_schema_metadata()
        with pa.OSFile(str(scratch), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        flush_to_disk(scratch)
        if replaces is not None:
            scratch.replace(replaces)
            replaces.rename(path)
        else:
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_marks(path: Path, marks: Sequence[tuple[int, int, int]]) -> None:
    """Set `version` of rows in place; each mark is (first row, number of rows, value). It is the first column."""
    file = os.open(path, os.O_RDWR)
    try:
        head = Head.of(os.pread(file, HEAD_BYTES, 0))
        check_sizes(head, known_schema(head.schema))
        start = len(head.data) + int(head.buffers[1, 0])
        for first, rows, value in marks:
            write_at(file, start + 8 * first, np.full(rows, value, dtype="<i8").tobytes())
    except (ValueError, pa.ArrowException) as error:
        raise DamagedSegmentError(f"{path}: {error}") from error
    finally:
        os.close(file)


def write_at(file: int, place: int, data: bytes | bytearray | memoryview) -> None:
    """All of it: a disk that is nearly full takes a part without complaint."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file, view, place)
        view, place = view[written:], place + written


@dataclass(slots=True)
class _Filled:
    """How far each column of an open segment is filled."""

    lengths: list[int]
    nulls: list[int]
    sums: list[int]
    """The last offset, where there are any; one number for each node, as above."""
    used: list[int]
    """Bytes of each buffer."""
    last_bits: np.ndarray
    """bool: validity in its last byte, which the next group shares."""
    rows: int = 0

    @classmethod
    def nothing(cls, num_nodes: int, num_buffers: int) -> _Filled:
        return cls([0] * num_nodes, [0] * num_nodes, [0] * num_nodes, [0] * num_buffers, np.zeros(0, dtype=bool))

    def copy(self) -> _Filled:
        return _Filled(list(self.lengths), list(self.nulls), list(self.sums), list(self.used), self.last_bits, self.rows)

    def take(self, nodes: Sequence[Node]) -> Iterator[tuple[int, int, np.ndarray]]:
        """What to write for these rows, as (buffer, place in it, array)."""
        buffer = 0
        for number, node in enumerate(nodes):
            if node.valid is not None:
                bits = np.concatenate([self.last_bits, node.valid])
                yield buffer, self.rows // 8, np.packbits(bits, bitorder="little")
                self.last_bits = bits[len(bits) // 8 * 8 :]
                self.used[buffer] = _bitmap_bytes(self.rows + node.length)
                self.nulls[number] += node.num_nulls
            self.lengths[number] += node.length
            buffer += 1
            if node.lengths is not None:
                offsets = self.sums[number] + np.cumsum(node.lengths)
                self.sums[number] += int(node.lengths.sum())
                self.used[buffer] = self.used[buffer] or node.offset_bytes  # the first offset is 0, and so is a gap
                yield buffer, self.used[buffer], offsets.astype(f"<i{node.offset_bytes}")
                self.used[buffer] += node.offset_bytes * node.length
                buffer += 1
            if node.values is not None:
                yield buffer, self.used[buffer], node.values
                self.used[buffer] += node.values.nbytes
                buffer += 1
        self.rows += nodes[0].length

    def describe(self, head: Head) -> None:
        head.nodes[:, 0], head.nodes[:, 1], head.buffers[:, 1] = self.lengths, self.nulls, self.used
        head.set_rows(self.rows)


class OpenSegment:
    """The segment that groups are added to."""

    def __init__(self, folder: Path, number: int, first: Sequence[Node], like: Sequence[int], size: int) -> None:
        """Room for `size` bytes, divided among the buffers as in `like`, and at least for `first`."""
        self.number = number
        self.path = segment_path(folder, number, is_open=True)
        self._limit = size
        self._room = _divide(size, like, buffer_bytes(first))
        ends = np.cumsum(self._room)
        starts, body_bytes = ends - self._room, int(ends[-1])
        self._head, tail = blank_file(SCHEMA, body_bytes)
        assert self._head.num_buffers == len(self._room), "the nodes are not those of the schema"
        self._head.buffers[:, 0] = starts
        self._starts = (starts + len(self._head.data)).tolist()
        self._filled = _Filled.nothing(self._head.num_nodes, self._head.num_buffers)
        self._filled.describe(self._head)
        self._file = _made(self.path, self._head.data, body_bytes, tail)

    @property
    def rows(self) -> int:
        return self._filled.rows

    @property
    def used(self) -> Sequence[int]:
        """Bytes of each buffer."""
        return self._filled.used

    def fits(self, nodes: Sequence[Node]) -> bool:
        if sum(self.used) >= self._limit:
            return False
        return all(used + need <= room for used, need, room in zip(self.used, buffer_bytes(nodes), self._room, strict=True))

    def append(self, nodes: Sequence[Node]) -> int:
        """Add the rows of some groups; returns the first. Where that fails, the segment is as before."""
        filled = self._filled.copy()
        for buffer, place, array in filled.take(nodes):
            write_at(self._file, self._starts[buffer] + place, np.ascontiguousarray(array).data)
        head = self._head
        filled.describe(head)
        write_at(self._file, head.message, memoryview(head.data)[head.message :])  # until then no reader sees the rows
        first, self._filled = self._filled.rows, filled
        return first

    def seal(self) -> Path:
        """Its file without the gaps."""
        self.close()
        path = segment_path(self.path.parent, self.number)
        seal(read_segment(self.path), path, replaces=self.path)
        return path

    def close(self) -> None:
        os.close(self._file)


def _made(path: Path, head: bytearray, body_bytes: int, tail: bytes) -> int:
    """A file with nothing in it, whole from the moment it has its name; the descriptor to write it with."""
    scratch = path.with_name(f".{path.name}.partial")
    file = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_at(file, len(head) + body_bytes, tail)
        write_at(file, 0, head)
        scratch.rename(path)
    except OSError:
        os.close(file)
        scratch.unlink(missing_ok=True)
        raise
    return file


def buffer_bytes(nodes: Sequence[Node]) -> list[int]:
    """What these rows take in each buffer."""
    sizes = []
    for node in nodes:
        sizes.append(0 if node.valid is None else _bitmap_bytes(node.length) + 1)
        if node.lengths is not None:
            sizes.append(node.offset_bytes * (len(node.lengths) + 1))
        if node.values is not None:
            sizes.append(node.values.nbytes)
    return sizes


def _divide(size: int, like: Sequence[int], first: Sequence[int]) -> list[int]:
    """Room of each buffer, a multiple of 64 bytes."""
    share = ROOM * size / max(1, sum(like))
    rooms = [max(int(share * part), need) + LEAST_ROOM for part, need in zip(like, first, strict=True)]
    return [-(-room // 64) * 64 for room in rooms]


def _bitmap_bytes(rows: int) -> int:
    return -(-rows // 8)
