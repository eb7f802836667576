"""Rows of files on this machine: JSONL is read line by line, Parquet and Arrow batch by batch. None is kept as Python objects.

A million rows cost 16 MB for JSONL (where each line begins), what Arrow needs for the columns of a Parquet file, and next to
nothing for Arrow files, which are mapped.
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from redline.errors import TaskError

Row = dict[str, Any]

_DECODER = json.JSONDecoder()


class Rows(Protocol):
    """Rows that are numbered from 0. Several threads may ask for rows at once."""

    def __len__(self) -> int: ...

    def scan(self, fields: Sequence[str]) -> Iterator[Row]:
        """Every row in order, with these fields at least where there are such."""
        ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """`file:row`, counted from 1, for a message to the user."""
        ...

    def name(self, index: int) -> str:
        """The identity of a task that is made of the row."""
        ...


class JsonlRows:
    """One JSON object per line; empty lines are no rows, but count."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._file = path.open("rb")
        self._starts, self._lines = array("q"), array("l")
        start = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip(b" \t\r\n" + codecs.BOM_UTF8):
                self._starts.append(start)
                self._lines.append(number)
            start += len(line)
        self._starts.append(start)

    def __len__(self) -> int:
        return len(self._lines)

    def scan(self, fields: Sequence[str]) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Row:
        start, end = self._starts[index], self._starts[index + 1]
        return self._read(os.pread(self._file.fileno(), end - start, start), index)

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def name(self, index: int) -> str:
        return f"{self._name}/{self._lines[index]}"

    def _read(self, line: bytes, index: int) -> Row:
        line = line.rstrip(b"\r\n")  # where a row is cut short, the error is after its last character, not on a next line
        try:
            row = _DECODER.decode(line.removeprefix(codecs.BOM_UTF8).decode())
            if b"\\ud" in line.lower():  # an escape of half a character, unless the other half follows
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            what = f"{self.where(index)}: half a character, {ascii(error.object[error.start])[1:-1]}, which no text can hold"
            raise TaskError(what, "write both halves of it, or leave it out") from error
        except UnicodeDecodeError as error:
            raise TaskError(f"{self.where(index)}: not UTF-8 text: {error.reason}", "save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            ends = error.pos >= len(error.doc.rstrip()) > 0
            why = "the line ends before the object does" if ends else error.msg
            what = f"{self.where(index)}: not valid JSON: {why} at column {error.colno}"
            raise TaskError(what, "one JSON object per line") from error
        except RecursionError as error:
            raise TaskError(f"{self.where(index)}: a field is nested too deep to be read", "flatten it") from error
        except ValueError as error:
            what = f"{self.where(index)}: a number is too long to be read: {str(error).partition(';')[0]}"
            raise TaskError(what, 'write it as a text: "answer": "123..."') from error
        if not isinstance(row, dict):
            what = f"{self.where(index)}: a {type(row).__name__}, not an object"
            raise TaskError(what, 'write {"prompt": ..., "answer": ...}')
        return row


class ArrowRows:
    """The rows of a Parquet or Arrow file."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        try:
            self._batches = list(_parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path))
        except (pa.ArrowException, OSError) as error:
            kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
            why = str(error).splitlines()[0]
            raise TaskError(f"{path}: cannot be read as {kind} file: {why}", "write it again, or download it again") from error
        self._offsets = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def scan(self, fields: Sequence[str]) -> Iterator[Row]:
        for batch in self._batches:
            columns = [field if field in batch.schema.names else field.partition(".")[0] for field in fields]
            known = set(columns) <= set(batch.schema.names)
            yield from _as_rows(batch.select(list(dict.fromkeys(columns))) if known else batch)

    def __getitem__(self, index: int) -> Row:
        batch = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return _as_rows(self._batches[batch].slice(index - int(self._offsets[batch]), 1))[0]

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1}"

    def name(self, index: int) -> str:
        return f"{self._name}/{index + 1}"


def _as_rows(batch: pa.RecordBatch) -> list[Row]:
    """Python has no value for some of Arrow's, such as a time in nanoseconds; these are texts, or None where Arrow has none
    for them either."""
    try:
        rows: list[Row] = batch.to_pylist()
    except (ValueError, OverflowError):
        columns = [_values(column) for column in batch.columns]
        rows = [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]
    return rows


def _values(column: pa.Array) -> list[Any]:
    found: list[Any]
    try:
        found = column.to_pylist()
    except (ValueError, OverflowError):
        try:
            found = column.cast(pa.string()).to_pylist()
        except pa.ArrowException:
            found = [None] * len(column)
    return found


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    from pyarrow import parquet  # here, since most runs read none

    return parquet.ParquetFile(path, memory_map=True).iter_batches()


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """`datasets` writes streams; files with a footer are Arrow's other format."""
    source = pa.memory_map(str(path))
    if source.read(6) == b"ARROW1":
        file = pa.ipc.open_file(source)
        return map(file.get_batch, range(file.num_record_batches))
    source.seek(0)
    return iter(pa.ipc.open_stream(source))


class ShardedRows:
    """The rows of several files, one after another."""

    def __init__(self, shards: Sequence[Rows]) -> None:
        self._shards = shards
        self._offsets = np.cumsum([0, *map(len, shards)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def scan(self, fields: Sequence[str]) -> Iterator[Row]:
        for shard in self._shards:
            yield from shard.scan(fields)

    def __getitem__(self, index: int) -> Row:
        shard, row = self._place(index)
        return shard[row]

    def where(self, index: int) -> str:
        shard, row = self._place(index)
        return shard.where(row)

    def name(self, index: int) -> str:
        shard, row = self._place(index)
        return shard.name(row)

    def _place(self, index: int) -> tuple[Rows, int]:
        shard = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self._shards[shard], index - int(self._offsets[shard])


def open_rows(files: Sequence[Path], folder: Path) -> Rows:
    """The rows of these files. A task is named by its file, seen from the folder, and its row; the file's suffix is part of the
    name where another file has the same name without."""
    relative = [file.relative_to(folder) for file in files]
    named = Counter(name.with_suffix("") for name in relative)
    names = [name if named[name.with_suffix("")] > 1 else name.with_suffix("") for name in relative]
    shards = [_open(file, str(name)) for file, name in zip(files, names, strict=True)]
    return shards[0] if len(shards) == 1 else ShardedRows(shards)


def _open(file: Path, name: str) -> Rows:
    make = ArrowRows if file.suffix in (".parquet", ".arrow") else partial(JsonlRows)
    return make(file, name)
