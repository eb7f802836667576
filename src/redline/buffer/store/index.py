"""`index.sqlite`: one row per group, what became of it and where it lies.

SQLite in WAL mode: a transaction survives a kill, and others may read while a run writes. Rows carry a checksum of their own,
since SQLite notices damage to its pages but not to the values in them.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from redline.buffer.store.group_store import GroupState
from redline.errors import RunFolderError
from redline.telemetry.files.durable import flush_to_disk

INDEX_NAME = "index.sqlite"
PATIENCE_S = 30.0
"""How long to wait for another program that is writing to the index: a backup, a browser of databases."""
_SIDES = ("", "-wal", "-shm")


class DamagedIndexError(Exception):
    """The index is missing, or not what was written."""


@dataclass(slots=True, frozen=True)
class GroupRow:
    """A group as the index has it. Times are seconds since 1970."""

    index: int
    """Index of the group in its run."""
    state: GroupState
    begun_version: int
    begun_at: float
    reason: str | None = None
    """Why it was dropped."""
    oldest_version: int | None = None
    newest_version: int | None = None
    """The versions it was sampled with; this and what follows is there once it is complete."""
    reward: float | None = None
    """Mean over its attempts that have one; None where all failed."""
    num_tokens: int = 0
    """Tokens of all its attempts, prompts included."""
    num_attempts: int = 0
    has_signal: bool = False
    segment: int | None = None
    first_row: int = 0
    """The first of its `num_rows` rows in the segment."""
    ready_at: float | None = None
    trained_version: int | None = None
    """The step that trained on it, or that it is leased to."""
    settled_at: float | None = None
    """When it was trained or dropped."""
    num_sequences: int | None = None
    """Sequences of its attempts; None where each attempt is a single one."""

    @property
    def num_rows(self) -> int:
        """Rows that it has in its segment, one for each sequence."""
        return self.num_attempts if self.num_sequences is None else self.num_sequences

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows

    @property
    def is_stored(self) -> bool:
        return self.segment is not None

    @property
    def is_live(self) -> bool:
        """Its tokens are still wanted."""
        return self.state in (GroupState.READY, GroupState.LEASED)


FIELDS = tuple(field.name for field in fields(GroupRow))
COLUMNS = ("group_index", *FIELDS[1:])  # `index` is a word of SQL
_STATE, _SIGNAL = FIELDS.index("state"), FIELDS.index("has_signal")
_get_all = attrgetter(*FIELDS)
_TABLE = f"""
CREATE TABLE IF NOT EXISTS groups (
  group_index INTEGER PRIMARY KEY, state TEXT NOT NULL, begun_version INTEGER NOT NULL, begun_at REAL NOT NULL, reason TEXT,
  oldest_version INTEGER, newest_version INTEGER, reward REAL, num_tokens INTEGER NOT NULL, num_attempts INTEGER NOT NULL,
  has_signal INTEGER NOT NULL, segment INTEGER, first_row INTEGER NOT NULL, ready_at REAL, trained_version INTEGER,
  settled_at REAL, checksum INTEGER NOT NULL, num_sequences INTEGER,
  CHECK (state IN ({", ".join(repr(state.value) for state in GroupState)}))
)"""
_FLUSHED = "CREATE TABLE IF NOT EXISTS flushed (segment INTEGER NOT NULL, end_row INTEGER NOT NULL)"
"""One row: how far the segments were on the disk for certain. An index of an earlier version has no such table."""
_PUT = f"REPLACE INTO groups ({', '.join(COLUMNS)}, checksum) VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
_GET = f"SELECT {', '.join(COLUMNS)}, checksum FROM groups"
_REASONS = """SELECT CASE reason WHEN 'silent' THEN 'no_signal' ELSE reason END, COUNT(*) FROM groups WHERE state = 'dropped'
GROUP BY 1"""  # `silent` is an earlier version's word
_LIVE = "state IN ('ready', 'leased')"
_NEWEST = "MAX(MAX(begun_version, COALESCE(trained_version, 0)))"
_TOTALS = f"""SELECT segment, SUM({_LIVE}), {_NEWEST},
  MAX(first_row + COALESCE(num_sequences, num_attempts)) FROM groups
WHERE segment IS NOT NULL GROUP BY segment"""
_LARGEST = 2**63 - 1
_LAST = f"SELECT COALESCE(MAX(group_index) + 1, 0), COALESCE({_NEWEST}, 0) FROM groups"


@dataclass(slots=True)
class SegmentTotals:
    """Sums over the groups in a segment."""

    num_live: int = 0
    """Groups whose tokens are still wanted."""
    newest: int = -1
    """The last step that had to do with any of them."""
    end_row: int = 0
    """The rows that the index knows."""


class GroupIndex:
    """The rows, on disk."""

    def __init__(self, folder: Path, mode: Literal["rwc", "rw", "ro"] = "rwc") -> None:
        """`mode` as SQLite has it: make it where it is not there, write, or only read."""
        self.path = folder / INDEX_NAME
        with _explained(self.path):
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._database = sqlite3.connect(uri, timeout=PATIENCE_S, uri=True, isolation_level=None, check_same_thread=False)
        try:
            with _explained(self.path):
                self._set_up(mode)
        except BaseException:
            self._database.close()
            raise

    def _set_up(self, mode: str) -> None:
        self._get = _GET
        if mode != "ro":
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
        if mode == "rwc":
            is_new = not self._database.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'groups'").fetchone()[0]
            self._database.execute(_TABLE)
            if is_new:
                self._put_flushed(0, 0)
        self._meet_earlier(can_write=mode != "ro")
        if mode != "rwc":
            self._database.execute(f"{self._get} LIMIT 0")

    def _meet_earlier(self, *, can_write: bool) -> None:
        """Give an index that an earlier version wrote today's columns; one that is only read is asked by its own names."""
        names = {name for _, name, *_ in self._database.execute("PRAGMA table_info(groups)")}
        if "number" in names:  # from when a group's index was called its number
            if can_write:
                self._database.execute("ALTER TABLE groups RENAME COLUMN number TO group_index")
            else:
                self._get = self._get.replace("group_index", "number AS group_index")
        if names and "num_sequences" not in names:  # from when each attempt was a single sequence
            if can_write:
                self._database.execute("ALTER TABLE groups ADD COLUMN num_sequences INTEGER")
            else:
                self._get = self._get.replace("num_sequences", "NULL")

    def put(self, rows: Iterable[GroupRow]) -> None:
        """All or none of them."""
        with _explained(self.path), self._transaction():
            self._database.executemany(_PUT, [_values(row) for row in rows])

    def rows(self, where: str = "", *values: Any) -> Iterator[GroupRow]:
        """By index, each compared with its checksum; `where` is SQL."""
        with _explained(self.path):
            for found in self._database.execute(f"{self._get} {where and 'WHERE ' + where} ORDER BY group_index", values):
                yield _row(self.path, found)

    def stored_after(self, count: int) -> Iterator[GroupRow]:
        """In the order in which they came, without the first `count`."""
        with _explained(self.path):
            order = "WHERE segment IS NOT NULL ORDER BY segment, first_row LIMIT -1 OFFSET ?"
            for found in self._database.execute(f"{self._get} {order}", (count,)):
                yield _row(self.path, found)

    def sampled_before(self, version: int, most: int) -> list[GroupRow]:
        """The last `most` by index whose tokens are all older than `version`, the first of them first."""
        with _explained(self.path):
            which = "WHERE segment IS NOT NULL AND newest_version < ? ORDER BY group_index DESC LIMIT ?"
            found = self._database.execute(f"{self._get} {which}", (version, most)).fetchall()
            return [_row(self.path, one) for one in reversed(found)]

    def newest(self, before: int | None = None) -> Iterator[GroupRow]:
        """Those that are stored, from the last index back, or from the one before `before`."""
        which = "WHERE segment IS NOT NULL AND group_index < ? ORDER BY group_index DESC"
        with _explained(self.path):
            for found in self._database.execute(f"{self._get} {which}", (_LARGEST if before is None else before,)):
                yield _row(self.path, found)

    def trained_steps(self, segments: Iterable[int]) -> list[int]:
        """Versions that were trained on a group of one of these segments, in order."""
        return self._versions("trained_version", "state = 'trained' AND ", segments)

    def begun_versions(self, segments: Iterable[int]) -> list[int]:
        """Versions that began a group of one of these segments, in order."""
        return self._versions("begun_version", "", segments)

    def _versions(self, column: str, which: str, segments: Iterable[int]) -> list[int]:
        there = ", ".join(str(int(segment)) for segment in segments)
        found = f"SELECT DISTINCT {column} FROM groups WHERE {which}segment IN ({there}) ORDER BY 1"
        with _explained(self.path):
            return [version for (version,) in self._database.execute(found)]

    def get(self, index: int) -> GroupRow | None:
        return next(self.rows("group_index = ?", index), None)

    def totals(self) -> tuple[dict[GroupState, int], dict[int, SegmentTotals], int, int]:
        """Groups in each state; of each segment; the next index; the last version. Without reading row by row."""
        with _explained(self.path):
            counts = self._database.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall()
            segments = self._database.execute(_TOTALS).fetchall()
            next_index, version = self._database.execute(_LAST).fetchone()
        if not all(isinstance(value, int) for found in (*segments, (next_index, version)) for value in found):
            raise DamagedIndexError(f"{self.path}: something else where there should be a whole number")
        return (
            {GroupState(state): count for state, count in counts},
            {segment: SegmentTotals(*found) for segment, *found in segments},
            next_index,
            version,
        )

    def reasons(self) -> dict[str, int]:
        """Why groups were dropped, and how many for each reason."""
        with _explained(self.path):
            return dict(self._database.execute(_REASONS))

    def count_outside(self, segments: Iterable[int]) -> int:
        """Groups that were stored in another segment than these."""
        there = ", ".join(str(int(segment)) for segment in segments)
        counted = f"SELECT COUNT(*) FROM groups WHERE segment IS NOT NULL AND segment NOT IN ({there})"
        with _explained(self.path):
            return int(self._database.execute(counted).fetchone()[0])

    def check(self) -> None:
        """Raises `DamagedIndexError` where SQLite finds its own structures damaged."""
        with _explained(self.path):
            problem = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise DamagedIndexError(f"{self.path}: {problem}")

    @property
    def flushed(self) -> tuple[int, int] | None:
        """The segment, and the row of it, before which everything is on the disk; None where no count was kept."""
        with _explained(self.path):
            if not self._database.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'flushed'").fetchone()[0]:
                return None
            found = self._database.execute("SELECT segment, end_row FROM flushed").fetchall()
        return found[0] if len(found) == 1 and all(isinstance(value, int) for value in found[0]) else None

    def mark_flushed(self, segment: int, end_row: int) -> None:
        """Remember it; it counts from the next `flush` on."""
        with _explained(self.path), self._transaction():
            self._put_flushed(segment, end_row)

    def _put_flushed(self, segment: int, end_row: int) -> None:
        self._database.execute(_FLUSHED)
        self._database.execute("DELETE FROM flushed")
        self._database.execute("INSERT INTO flushed VALUES (?, ?)", (segment, end_row))

    def flush(self) -> None:
        """Everything up to here survives a power cut too. SQLite flushes its log only now and then; its readers are not waited
        for. (To open the database itself here would be wrong: closing it again would let go of SQLite's locks.)"""
        log = self.path.with_name(f"{INDEX_NAME}-wal")
        if log.exists():
            flush_to_disk(log)
        with _explained(self.path):
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise


def index_files(folder: Path) -> list[Path]:
    """The index, and what SQLite keeps beside it."""
    return [path for side in _SIDES if (path := folder / f"{INDEX_NAME}{side}").exists()]


def _values(row: GroupRow) -> tuple[Any, ...]:
    values = list(_get_all(row))
    values[_STATE], values[_SIGNAL] = row.state.value, int(row.has_signal)
    return *values, _checksum(values)


def _row(path: Path, found: tuple[Any, ...]) -> GroupRow:
    if _checksum(found[:-1]) != found[-1]:
        raise DamagedIndexError(f"{path}: the row of group {found[0]} is not what was written")
    *values, _ = found
    values[_STATE], values[_SIGNAL] = GroupState(values[_STATE]), bool(values[_SIGNAL])
    return GroupRow(*values)


def _checksum(values: Sequence[Any]) -> int:
    """The last column counts where it has a value: rows without one are those of earlier versions, to the last bit."""
    return zlib.crc32(repr(tuple(values if values[-1] is not None else values[:-1])).encode())


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors in our words; a full disk is the OSError that it is."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", None)  # Python's own, such as text that is no UTF-8, have none
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):  # the rest says where
            raise RunFolderError(
                f"{path}: another program has locked it for more than {PATIENCE_S:g} s",
                f"end that program (`fuser {path}` names it), then continue with --resume",
            ) from error
        raise DamagedIndexError(f"{path}: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise DamagedIndexError(f"{path}: {error}") from error
