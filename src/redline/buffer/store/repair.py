"""`redline repair RUN`: what is intact in damaged trajectories, in files that are whole again.

Every group carries a checksum in its segment, so that the segments alone say which groups are intact. What the index alone
knows (states, reasons, what was being attempted) is kept where it can still be read, and else follows from the marks in the
segments. Damaged files are moved to `trajectories/damaged-001/`, never deleted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from redline.buffer.store.arrow_layout import Head, check_sizes
from redline.buffer.store.columns import Mark
from redline.buffer.store.earlier import known_schema
from redline.buffer.store.found import FoundGroup, found_groups
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import DamagedIndexError, GroupIndex, GroupRow, index_files
from redline.buffer.store.segments import DamagedSegmentError, SegmentFile, read_segment, seal, segment_files, segment_path

AGAIN = "attempted again"
MOST_NAMED = 20
MOST_MISSING_BYTES = 1 << 32
"""A damaged head may claim any size."""


@dataclass(slots=True)
class RepairReport:
    """What `redline repair` found and did."""

    num_intact: int = 0
    """Groups whose tokens are there."""
    lost: dict[int, str] = field(default_factory=dict)
    """Group → what it was before, or `AGAIN` where it was still to be trained on."""
    num_lost_attempts: int = 0
    """Rows of damaged segments that are part of no intact group, whatever their number was."""
    damage: list[str] = field(default_factory=list)
    """What is wrong, file by file; nothing where all is well."""
    index_rebuilt: bool = False
    set_aside: list[Path] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        return not self.damage

    @property
    def lines(self) -> list[str]:
        """For a person."""
        if self.is_healthy:
            return [f"nothing to repair: {self.num_intact:,} groups, all as they were written"]
        again = sorted(number for number, fate in self.lost.items() if fate == AGAIN)
        settled = len(self.lost) - len(again)
        lines = [f"damaged: {each}" for each in self.damage] + [f"intact: {self.num_intact:,} groups"]
        if self.num_lost_attempts:
            lines.append(f"lost: {self.num_lost_attempts:,} attempts that no checksum vouches for")
        if again:
            lines.append(f"lost before they were trained on, and attempted again: {_listed(again)}")
        if settled:
            lines.append(f"lost after they were trained on or dropped: {settled:,} groups")
        if self.index_rebuilt:
            lines.append("the index was made again from the segments")
        return lines + [f"kept aside: {path}" for path in self.set_aside]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"set_aside": [str(path) for path in self.set_aside]}


def repair(folder: Path) -> RepairReport:
    """Repair a `trajectories/` folder to which no process is writing, and report what was saved."""
    return _repair(folder)


def mend(folder: Path, numbers: Collection[int]) -> RepairReport | None:
    """Repair a folder in which these groups are all that is lost. Returns None, and changes nothing, where more is."""
    report = _repair(folder, at_most=numbers)
    return None if report.index_rebuilt or report.lost.keys() - set(numbers) else report


def _repair(folder: Path, at_most: Collection[int] | None = None) -> RepairReport:
    """Changes nothing where groups beyond `at_most` are lost, or the index."""
    report, aside = RepairReport(), _free_folder(folder)
    segments = {file.number: _Salvaged.of(file) for file in segment_files(folder)}
    known = _read_index(folder, report, expected=bool(segments))
    for segment in segments.values():
        if segment.damage:
            report.damage.append(f"{segment.file.path.name}: {segment.damage}")
            report.num_lost_attempts += segment.num_lost_rows
    rows = _rebuilt(segments) if known is None else _corrected(known, segments)
    report.lost = _lost(known or {}, rows, segments, report)
    report.num_intact = sum(row.is_stored and row.segment in segments for row in rows.values())
    report.index_rebuilt = known is None and not report.is_healthy
    is_too_much = at_most is not None and (report.index_rebuilt or report.lost.keys() - set(at_most))
    if report.is_healthy or is_too_much:
        return report
    for segment in segments.values():
        if segment.damage:
            report.set_aside.append(_kept(segment.file.path, aside))
            rows |= segment.written_again(folder, rows)
    _write_index(folder, rows.values(), aside, report, rebuild=known is None)
    return report


# ── segments ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class _Salvaged:
    """What can be read of a segment."""

    file: SegmentFile
    groups: tuple[FoundGroup, ...] = ()
    """Intact ones."""
    num_lost_rows: int = 0
    damage: str = ""

    @classmethod
    def of(cls, file: SegmentFile) -> _Salvaged:
        damage = ""
        batch: pa.RecordBatch | None
        try:
            batch = read_segment(file.path)
        except DamagedSegmentError as error:
            damage = str(error).removeprefix(f"{file.path}: ")
            batch = _read_in_part(file.path)
        if batch is None:
            return cls(file, damage=f"nothing of it can be read: {damage}")
        groups = list(found_groups(batch))
        intact = tuple(group for group in groups if group.is_intact)
        num_lost = sum(group.last - group.first for group in groups if not group.is_intact)
        if num_lost and not damage:
            damage = f"{num_lost} of {batch.num_rows} attempts are not what was written"
        return cls(file, intact, num_lost, damage)

    def written_again(self, folder: Path, rows: Mapping[int, GroupRow]) -> dict[int, GroupRow]:
        """The intact groups in a segment of their own, of the same number; returns the rows that changed."""
        moved, pieces, end_row = {}, [], 0
        for group in self.groups:
            row = rows.get(group.index)
            pieces.append(group.batch.slice(group.first, group.last - group.first))
            if row is not None and (row.segment, row.first_row) == (self.file.number, group.first):
                moved[row.index] = replace(row, first_row=end_row)
            end_row += group.last - group.first
        path = segment_path(folder, self.file.number)
        if pieces:
            batch = pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]
            seal(batch, path)
        if not pieces or self.file.is_open:
            self.file.path.unlink()
        return moved


def _read_in_part(path: Path) -> pa.RecordBatch | None:
    """A file that was cut: with nothing where something is missing. Rows that lie there fail their checksum."""
    data = path.read_bytes()
    with contextlib.suppress(ValueError, OSError, pa.ArrowException):
        head = Head.of(data)
        schema = known_schema(head.schema)
        check_sizes(head, schema)
        missing = len(head.data) + head.body_bytes - len(data)
        if missing > MOST_MISSING_BYTES:
            return None
        whole = data[8:] + b"\0" * max(0, missing)  # after the magic, a file is a stream
        batch = pa.ipc.open_stream(whole).read_next_batch()
        return batch if batch.schema.equals(schema) else None
    return None


# ── the index ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_index(folder: Path, report: RepairReport, *, expected: bool) -> dict[int, GroupRow] | None:
    """None where it has to be made again."""
    if not index_files(folder):
        if expected:
            report.damage.append("the index is missing")
        return None
    try:
        index = GroupIndex(folder, "rw" if expected else "rwc")
        try:
            index.check()
            return {row.index: row for row in index.rows()}
        finally:
            index.close()
    except DamagedIndexError as error:
        report.damage.append(str(error).removeprefix(f"{folder}/"))
        return None


def _rebuilt(segments: Mapping[int, _Salvaged]) -> dict[int, GroupRow]:
    """From the marks in the segments; of several attempts at one number the last counts. A number without a group was being
    attempted, or its group is lost: it is attempted again, unless segments were evicted, which it may have been in."""
    rows: dict[int, GroupRow] = {}
    forgotten = set()
    for number, segment in segments.items():
        for group in segment.groups:
            forgotten.discard(group.index)
            if group.mark == Mark.FORGOTTEN:
                forgotten.add(group.index)
            rows[group.index] = group.row(number)
    first = min(rows, default=0) if min(segments, default=0) > 0 else 0
    missing = (set(range(first, max(rows, default=-1) + 1)) - set(rows)) | forgotten
    now = time.time()
    for number in missing:
        begun = rows[number].begun_version if number in rows else 0
        rows[number] = GroupRow(number, GroupState.IN_FLIGHT, begun, now)
    return rows


def _corrected(known: Mapping[int, GroupRow], segments: Mapping[int, _Salvaged]) -> dict[int, GroupRow]:
    """The index's own rows; what was still to be trained on and is lost is being attempted again."""
    intact = {(number, group.first): group.index for number, segment in segments.items() for group in segment.groups}
    rows = dict(known)
    for row in known.values():
        if row.segment is not None and intact.get((row.segment, row.first_row)) != row.index:
            gone = replace(row, segment=None)
            begun = GroupRow(row.index, GroupState.IN_FLIGHT, row.begun_version, row.begun_at)
            rows[row.index] = begun if row.is_live else gone
    return rows


def _lost(
    before: Mapping[int, GroupRow], after: Mapping[int, GroupRow], segments: Mapping[int, _Salvaged], report: RepairReport
) -> dict[int, str]:
    lost = {}
    for number, row in before.items():
        if row.segment is None or after[number].segment is not None:
            continue
        if row.is_live:
            lost[number] = AGAIN
            if row.segment not in segments:
                report.damage.append(f"{segment_path(Path(), row.segment)} is missing, and group {number} in it")
        elif row.segment in segments:
            lost[number] = row.state.value
    places = {before[number].segment for number in lost}
    for number, segment in segments.items():
        if number in places and not segment.damage:  # whole in itself
            report.damage.append(f"{segment.file.path.name}: has fewer attempts than the index knows of")
    return lost


def _write_index(folder: Path, rows: Iterable[GroupRow], aside: Path, report: RepairReport, *, rebuild: bool) -> None:
    if rebuild:
        for path in index_files(folder):
            report.set_aside.append(_kept(path, aside))
            path.unlink()
    index = GroupIndex(folder)
    index.put(rows)
    index.mark_flushed(max((file.number + 1 for file in segment_files(folder)), default=0), 0)
    index.flush()
    index.close()


def _listed(numbers: list[int]) -> str:
    more = len(numbers) - MOST_NAMED
    return "groups " + ", ".join(map(str, numbers[:MOST_NAMED])) + (f" and {more:,} more" if more > 0 else "")


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _free_folder(folder: Path) -> Path:
    number = 1
    while (path := folder / f"damaged-{number:03d}").exists():
        number += 1
    return path


def _kept(path: Path, aside: Path) -> Path:
    """A second name for the file: at no time are the intact groups in no file at all."""
    aside.mkdir(exist_ok=True)
    kept = aside / path.name
    kept.hardlink_to(path)
    return kept
