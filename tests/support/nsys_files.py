"""Writes what `nsys export --type sqlite` writes, with the tables and columns of NVIDIA's "SQLite Schema Reference" (3.16)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from support.late_launches import Recorded

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL, stopTime INTEGER NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, uuid TEXT, smCount INTEGER);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, nameEnum INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE ENUM_NSYS_EVENT_TYPE (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE ENUM_DIAGNOSTIC_SEVERITY_LEVEL (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER NOT NULL, timestampType INTEGER NOT NULL, source INTEGER NOT NULL, severity INTEGER NOT NULL, text TEXT NOT NULL, globalPid INTEGER);
INSERT INTO ENUM_NSYS_EVENT_TYPE VALUES (34, 'NvtxMark', 'NvtxMark'), (59, 'NvtxPushPopRange', 'NvtxPushPopRange'), (60, 'NvtxStartEndRange', 'NvtxStartEndRange');
INSERT INTO ENUM_DIAGNOSTIC_SEVERITY_LEVEL VALUES (0, 'Unknown', 'Unknown'), (1, 'Info', 'Information'), (2, 'Warning', 'Warning'), (3, 'Error', 'Error');
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2024.6.2.225'), ('EXPORT_SCHEMA_VERSION', '3.16.1');
INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1763000000000000000, '2025-11-13T02:13:20', '2025-11-13T02:13:20');
"""  # noqa: E501
RUNTIME = """
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
"""
KERNEL = """
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER,
  registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
  blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
  dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL,
  gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
"""
GRAPH = """
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL);
"""
NVTX = """
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
  color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER,
  int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER,
  jsonText TEXT, binaryData TEXT);
"""
OSRT = """
CREATE TABLE OSRT_API (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
  nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, nestingLevel INTEGER, callchainId INTEGER NOT NULL);
"""
VERSIONED = {"cudaGraphLaunch": "cudaGraphLaunch_v10000", "cudaStreamSynchronize": "cudaStreamSynchronize_v3020"}
"""Names of calls as nsys records them: with the version of the function."""


def packed(pid: int, tid: int = 0) -> int:
    """A "serialized GlobalId": hardware and virtual machine in the upper bits, then the process, then the thread."""
    return (1 << 56) | (2 << 48) | (pid << 24) | tid


def write(recorded: Recorded, path: Path, *, graphs: str = "graph", without: tuple[str, ...] = ()) -> Path:
    """Write all processes into one export. `graphs` is what --cuda-graph-trace was; `without` leaves tables out."""
    with sqlite3.connect(path) as database:
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA)
        strings = _Strings(database)
        _processes(database, recorded, strings)
        if "calls" not in without:
            _calls(database, recorded, strings)
        if "device" not in without:
            (_replays if graphs == "graph" else _kernels)(database, recorded, strings)
    database.close()
    return path


class _Strings:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database, self._known = database, dict[str, int]()

    def __call__(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self._known) + 1
            self._database.execute("INSERT INTO StringIds VALUES (?, ?)", (self._known[text], text))
        return self._known[text]


def _processes(database: sqlite3.Connection, recorded: Recorded, strings: _Strings) -> None:
    for pid in recorded.ranks:
        database.execute("INSERT INTO PROCESSES VALUES (?, ?, ?)", (packed(pid), pid, "/usr/bin/python3.11"))
        database.execute("INSERT INTO ThreadNames VALUES (?, ?, ?)", (strings("python3"), 20, packed(pid, pid + 7)))


def _calls(database: sqlite3.Connection, recorded: Recorded, strings: _Strings) -> None:
    database.executescript(RUNTIME + NVTX + (OSRT if any(call.kind == "system" for call in recorded.calls) else ""))
    for number, call in enumerate(recorded.calls):
        thread = packed(call.pid, call.tid)
        if call.kind == "range":
            # every other range has a registered string, as C++ libraries use them
            text, text_id = (None, strings(call.name)) if number % 2 else (call.name, None)
            row = (call.start, call.end, 59, None, None, None, text, thread, None, text_id, 0, None, call.payload, *[None] * 7)
            database.execute(f"INSERT INTO NVTX_EVENTS VALUES ({', '.join('?' * 20)})", row)
        elif call.kind == "cuda":
            row = (call.start, call.end, 0, thread, call.correlation, strings(VERSIONED[call.name]), 0, None)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        else:
            database.execute(
                "INSERT INTO OSRT_API VALUES (?, ?, 27, ?, ?, 0, 0, 1)", (call.start, call.end, thread, strings(call.name))
            )
    database.execute(
        "INSERT INTO NVTX_EVENTS (start, eventType, text) VALUES (0, 75, 'NCCL')"  # a domain, which has no end
    )


def _kernels(database: sqlite3.Connection, recorded: Recorded, strings: _Strings) -> None:
    database.executescript(KERNEL)
    for number, kernel in enumerate(recorded.kernels):
        name = strings(kernel.name)
        short = strings(kernel.name.partition("(")[0])
        row = (
            *(kernel.start, kernel.end, kernel.device, 1, None, kernel.stream, kernel.correlation, packed(kernel.pid)),
            *(name, short, None, 0, 0, 90, 255, 1, 1, 256, 1, 1, 0, 0, 0, 0, number, None, kernel.node, None),
        )
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * 28)})", row)


def _replays(database: sqlite3.Connection, recorded: Recorded, strings: _Strings) -> None:
    """One row for each replay, as with `--cuda-graph-trace=graph`: the kernels in it are not seen."""
    database.executescript(GRAPH)
    spans: dict[tuple[int, int], list] = {}
    for kernel in recorded.kernels:
        spans.setdefault((kernel.pid, kernel.correlation), []).append(kernel)
    for (pid, correlation), kernels in spans.items():
        first = kernels[0]
        row = (
            *(min(k.start for k in kernels), max(k.end for k in kernels), first.device, 1, None, first.stream),
            *(correlation, packed(pid), first.graph, first.graph + 1),
        )
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES ({', '.join('?' * 10)})", row)
