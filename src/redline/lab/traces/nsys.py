"""Reads what `nsys export --type sqlite` made of a report: all processes of one machine in one file.

A table exists only where something was recorded, and columns come and go between versions: a query asks for what is there. The
ids of processes and threads are packed: `globalTid` holds the process in bits 24–47 and the thread in the lowest 24. With
`--cuda-graph-trace=graph` a replay is one row of `CUPTI_ACTIVITY_KIND_GRAPH_TRACE`; with `node` all kernels of a replay have
the correlation of its launch.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redline.errors import TraceError
from redline.lab.traces.builder import Builder
from redline.lab.traces.timeline import LATEST, Kind, Process, Work

DEVICE = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (Work.KERNEL, ("demangledName", "shortName", "name")),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (Work.COPY, ()),
    "CUPTI_ACTIVITY_KIND_MEMSET": (Work.SET, ()),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (Work.GRAPH, ()),
}
"""Table → what its rows are, and the columns that may have their names."""
CALLS = {"CUPTI_ACTIVITY_KIND_RUNTIME": Kind.RUNTIME, "OSRT_API": Kind.SYSTEM}
"""Table → what its rows are; each has a name by its number."""
PUSH_POP, START_END = 59, 60
"""Kinds of NVTX events that are ranges."""
PAYLOADS = ("int64Value", "uint64Value", "int32Value", "uint32Value", "doubleValue", "floatValue")
COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""Number of a copy's direction → how CUDA writes it."""
WORDS = {Work.COPY: "Memcpy", Work.SET: "Memset", Work.GRAPH: "CUDA graph replay"}


def read(path: Path, into: Builder) -> None:
    """Read one export. Raises `TraceError` where it is no such export; what it lacks is added to `into.lacks`."""
    try:
        database = sqlite3.connect(f"file:{quote(os.fsencode(path.resolve()))}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: cannot be opened: {error}", "check the file, or export it again") from error
    try:
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        _Export(database, path, into).read()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # names in what SQLite says may be damaged too
        raise TraceError(
            f"{path}: damaged: {error}", "export it again: nsys export --type sqlite --force-overwrite true …"
        ) from error
    finally:
        database.close()


class _Export:
    """One export while it is read."""

    def __init__(self, database: sqlite3.Connection, path: Path, into: Builder) -> None:
        self._database, self._path, self._into = database, path, into
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        self._processes: dict[int, int] = {}
        self._pids: dict[int, str] = {}
        self._base = 0
        self._names: dict[int, int] = {}

    def read(self) -> None:
        known = self._tables & {*DEVICE, *CALLS, "NVTX_EVENTS"}
        if not known or "StringIds" not in self._tables:
            raise TraceError(
                f"{self._path}: a SQLite database, but no export of nsys: it has neither calls nor device work",
                "make one with: nsys export --type sqlite -o trace.sqlite report.nsys-rep",
            )
        self._describe()
        for table, (work, columns) in DEVICE.items():
            self._device(table, work, columns)
        for table, kind in CALLS.items():
            self._calls(table, kind)
        self._ranges()
        self._complain()

    def _describe(self) -> None:
        """Take strings, processes and the clock."""
        into = self._into
        self._strings = {number: _words(text) for number, text in self._rows("StringIds", ("id", "value"))}
        self._pids = {self._pid(packed): _words(name) for packed, name in self._rows("PROCESSES", ("globalPid", "name"))}
        epoch = next(iter(self._rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))), (0,))[0]
        self._base = epoch if isinstance(epoch, int) and 0 <= epoch < LATEST else 0
        for name_id, packed in self._rows("ThreadNames", ("nameId", "globalTid")):
            if isinstance(packed, int) and self._strings.get(name_id):
                into.name_thread(self._process(packed), packed & 0xFFFFFF, self._strings[name_id])

    def _device(self, table: str, work: Work, name_columns: tuple[str, ...]) -> None:
        into, has = self._into, self._columns(table)
        column = next((name for name in name_columns if name in has), None)
        optional = [c for c in ("globalPid", "copyKind") if c in has]
        wanted = ("start", "end", "deviceId", "streamId", "correlationId", *([column] if column else []), *optional)
        for row in self._rows(table, wanted):
            found = dict(zip(wanted, row, strict=True))
            if not self._are_times(found["start"], found["end"]):
                continue
            process = self._process(found.get("globalPid"))
            text = self._text(found[column]) if column else f"{WORDS[work]} {COPIES.get(found.get('copyKind', 0), '')}".strip()
            stream = into.stream(process, _whole(found["deviceId"]), _whole(found["streamId"]))
            into.work(found["start"], found["end"], stream, into.name(text), work, _correlation(found["correlationId"]))

    def _calls(self, table: str, kind: Kind) -> None:
        into, has = self._into, self._columns(table)
        column = "correlationId" if "correlationId" in has else "NULL"
        for start, end, packed, name_id, correlation in self._rows(table, ("start", "end", "globalTid", "nameId", column)):
            if self._are_times(start, end, packed):
                thread = into.thread(self._process(packed), packed & 0xFFFFFF)
                into.range(start, end, thread, self._name(name_id), kind, _correlation(correlation))

    def _ranges(self) -> None:
        """Take NVTX ranges with their payload, which is a size where it is a number."""
        has = self._columns("NVTX_EVENTS")
        payloads = [name for name in PAYLOADS if name in has]
        kinds = f"WHERE eventType IN ({PUSH_POP}, {START_END})" if "eventType" in has else ""
        text = "textId" if "textId" in has else "NULL"
        opened = 0
        for start, end, packed, words, text_id, *numbers in self._rows(
            "NVTX_EVENTS", ("start", "end", "globalTid", "text", text, *payloads), kinds
        ):
            if end is None or not isinstance(packed, int):
                opened += 1
                continue
            if not self._are_times(start, end):
                continue
            name = self._into.name(_words(words) if words is not None else self._strings.get(text_id, ""))
            size = next((float(number) for number in numbers if isinstance(number, int | float)), math.nan)
            thread = self._into.thread(self._process(packed), packed & 0xFFFFFF)
            self._into.range(start, end, thread, name, Kind.ANNOTATION, -1, size)
        if opened:
            self._into.lacks.append(f"{self._path.name}: {opened:,} ranges never end, and were left out.")

    def _complain(self) -> None:
        """Name what nsys itself says went wrong."""
        if "DIAGNOSTIC_EVENT" in self._tables:
            rows = self._rows("DIAGNOSTIC_EVENT", ("severity", "text"))
            bad = list(dict.fromkeys(_words(text) for severity, text in rows if _whole(severity) > 1 and text))
            self._into.lacks.extend(f"{self._path.name}: nsys says: {text.splitlines()[0]}" for text in bad[:5])

    def _are_times(self, start: Any, end: Any, thread: Any = 0) -> bool:
        """Whether an event has a length, and a thread where it is of one; one that has not is counted."""
        good = isinstance(start, int) and isinstance(end, int) and isinstance(thread, int) and -LATEST < start <= end < LATEST
        self._into.no_duration += not good
        return good

    def _process(self, packed: Any) -> int:
        pid = self._pid(packed)
        if pid not in self._processes:
            name = Path(self._pids.get(pid, "process")).name
            self._processes[pid] = self._into.process(Process(name, pid, str(self._path), base_ns=self._base))
        return self._processes[pid]

    @staticmethod
    def _pid(packed: Any) -> int:
        return (_whole(packed) >> 24) & 0xFFFFFF

    def _name(self, number: int) -> int:
        if number not in self._names:
            self._names[number] = self._into.name(self._text(number))
        return self._names[number]

    def _text(self, value: Any) -> str:
        return self._strings.get(value, str(value)) if isinstance(value, int) else _words(value)

    def _columns(self, table: str) -> set[str]:
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}

    def _rows(self, table: str, wanted: tuple[str, ...], where: str = "") -> Iterator[tuple]:
        """Give the rows of a table with these columns; none where there is no such table."""
        has = self._columns(table)
        if not has:
            return iter(())
        if missing := [name for name in wanted if name not in has and name != "NULL"]:
            raise TraceError(
                f"{self._path}: table {table} has no column {missing[0]}", "export the report again with a newer nsys"
            )
        columns = ", ".join(name if name == "NULL" else f'"{name}"' for name in wanted)
        return self._database.execute(f'SELECT {columns} FROM "{table}" {where}')


def _whole(value: Any) -> int:
    """Return a number; 0 for what is none, since SQLite holds anything in any column."""
    return value if isinstance(value, int) else 0


def _words(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _correlation(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else -1
