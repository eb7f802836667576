"""All segments of a run: the one that is written, those that are read, and when one may go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from redline.buffer.store.columns import Node, Rows
from redline.buffer.store.index import GroupRow, SegmentTotals
from redline.buffer.store.segments import (
    DamagedSegmentError,
    OpenSegment,
    buffer_bytes,
    read_segment,
    seal,
    segment_files,
    segment_path,
    write_marks,
)
from redline.telemetry.files.durable import flush_to_disk

MOST_MAPPED = 4
"""Segments kept mapped between reads."""


@dataclass(slots=True)
class _Segment:
    path: Path
    num_bytes: int
    totals: SegmentTotals = field(default_factory=SegmentTotals)
    """What decides whether it may go."""


class SegmentSet:
    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        files = segment_files(folder)
        self._segments = {file.number: _Segment(file.path, file.path.stat().st_size) for file in files}
        self.left_open = [file.number for file in files if file.is_open]
        """Those whose writer was killed; `take_in` closes them."""
        self._next = max(self._segments, default=-1) + 1
        self._open: OpenSegment | None = None
        self._like: Sequence[int] | None = None
        """Bytes of each buffer in the last segment: how the next one is laid out."""
        self._mapped: dict[int, pa.RecordBatch] = {}
        self._unflushed: set[int] = set()
        """Written to since the last `flush`."""

    def __contains__(self, number: int | None) -> bool:
        return number in self._segments

    def know(self, totals: Mapping[int, SegmentTotals]) -> None:
        """What the index says of each; a number that it knows is not given out again, even if the segment is gone."""
        self._next = max([self._next, *(number + 1 for number in totals)])
        for number, segment in self._segments.items():
            segment.totals = totals.get(number, segment.totals)

    def count(self, row: GroupRow, change: int) -> None:
        """One row more, or one less, that speaks of a group."""
        segment = None if row.segment is None else self._segments.get(row.segment)
        if segment is not None:
            totals = segment.totals
            totals.num_live += change * row.is_live
            totals.newest = max(totals.newest, row.begun_version, row.trained_version or 0)
            totals.end_row = max(totals.end_row, row.end_row)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, nodes: Sequence[Node]) -> tuple[int, int]:
        """The segment, and the row from which on the groups now lie there."""
        if self._open is not None and not self._open.fits(nodes):
            self.seal()
        if self._open is None:
            self._open = OpenSegment(self._folder, self._next, nodes, self._like or buffer_bytes(nodes), self._segment_bytes)
            self._segments[self._next] = _Segment(self._open.path, 0)
            self._next += 1
        first_row = self._open.append(nodes)
        self._unflushed.add(self._open.number)
        self._segments[self._open.number].num_bytes = sum(self._open.used)
        return self._open.number, first_row

    def mark(self, rows: Iterable[GroupRow], value: int) -> None:
        """What became of the groups, in the segments too, so that the index can be made again from them."""
        stored = sorted((row for row in rows if row.segment in self._segments), key=_segment_of)
        for number, members in groupby(stored, key=_segment_of):
            write_marks(self._segments[number].path, [(row.first_row, row.num_rows, value) for row in members])
            self._unflushed.add(number)

    def seal(self) -> None:
        """The open one is full, or the last."""
        if self._open is None:
            return
        self._like = self._open.used
        self._replaced(self._open.number, self._open.seal())
        self._open = None

    def flush(self) -> tuple[int, int]:
        """Rows and marks, then the names of the files. Returns the segment, and the row, before which all is on the disk."""
        for number in sorted(self._unflushed & self._segments.keys()):
            flush_to_disk(self._segments[number].path)
        flush_to_disk(self._folder)
        self._unflushed.clear()
        return (self._next, 0) if self._open is None else (self._open.number, self._open.rows)

    def evict(self, version: int, max_bytes: int | None, max_age: int | None, keep_steps: int) -> int:
        """Delete whole segments, the oldest first, and never one that is still wanted. Returns how many."""
        before = len(self._segments)
        too_many = 0 if max_bytes is None else sum(segment.num_bytes for segment in self._segments.values()) - max_bytes
        for number, segment in list(self._segments.items()):
            age = version - segment.totals.newest
            is_open = self._open is not None and number == self._open.number
            if segment.totals.num_live or age < keep_steps or is_open:
                continue
            if too_many > 0 or (max_age is not None and age > max_age):
                segment.path.unlink()
                del self._segments[number]
                self._mapped.pop(number, None)
                too_many -= segment.num_bytes
        return before - len(self._segments)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def map(self, row: GroupRow) -> pa.RecordBatch:
        """The segment that holds the group; the same object for its neighbours."""
        number = _segment_of(row)
        batch = self._mapped.pop(number, None)
        if batch is None or batch.num_rows < self._segments[number].totals.end_row:
            batch = read_segment(self._segments[number].path)
        while len(self._mapped) >= MOST_MAPPED:
            self._mapped.pop(next(iter(self._mapped)))
        self._mapped[number] = batch
        return batch

    def check(self, wanted: Iterable[int]) -> None:
        """These are there, and can be read."""
        for number in wanted:
            if number not in self._segments:
                raise DamagedSegmentError(f"{segment_path(self._folder, number)} is missing")
            segment = self._segments[number]
            if read_segment(segment.path).num_rows < segment.totals.end_row:
                raise DamagedSegmentError(f"{segment.path} has fewer attempts than the index knows of")

    def lost(self, rows: Iterable[GroupRow]) -> list[GroupRow]:
        """Those of which the attempts are not there, or not as they were written. A segment that was sealed is not looked into:
        it was flushed then. A settled group whose segment is gone was evicted with it."""
        lost = []
        for number, members in groupby(sorted(rows, key=_segment_of), key=_segment_of):
            if number not in self._segments:
                lost += [row for row in members if row.is_live]
            elif number in self.left_open:
                try:
                    stored = Rows(read_segment(self._segments[number].path))
                except DamagedSegmentError:
                    lost += members
                else:
                    lost += [row for row in members if not stored.is_intact(row.first_row, row.end_row)]
        return lost

    def check_groups(self, rows: Iterable[GroupRow]) -> None:
        """These are what was written."""
        for number, members in groupby(sorted(rows, key=_segment_of), key=_segment_of):
            path = self._segments[number].path
            stored = Rows(read_segment(path))
            for row in members:
                if not stored.is_intact(row.first_row, row.end_row):
                    raise DamagedSegmentError(f"{path}: group {row.index} is not what was written")

    def tail(self, number: int) -> tuple[pa.RecordBatch, int]:
        """A segment, and the first row of it that the index does not know."""
        return read_segment(self._segments[number].path), self._segments[number].totals.end_row

    def close_left_open(self, number: int, batch: pa.RecordBatch) -> None:
        """These rows of it are all. Where there are none (the disk was full before the first) the file is taken away."""
        if not batch.num_rows:
            self._mapped.pop(number, None)
            self._segments.pop(number).path.unlink()
            return
        path = segment_path(self._folder, number)
        seal(batch, path, replaces=self._segments[number].path)
        self._replaced(number, path)

    def _replaced(self, number: int, path: Path) -> None:
        self._mapped.pop(number, None)
        self._segments[number].path, self._segments[number].num_bytes = path, path.stat().st_size


def _segment_of(row: GroupRow) -> int:
    assert row.segment is not None
    return row.segment
