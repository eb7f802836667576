"""Rows of files on this machine: JSONL is read line by line, Parquet and Arrow batch by batch. None is kept as Python objects.

A million rows cost 16 MB for JSONL (where each line begins), what Arrow needs for the columns of a Parquet file, and next to
nothing for Arrow files, which are mapped.
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
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
        try:
            row = _DECODER.decode(line.removeprefix(codecs.BOM_UTF8).decode())
        except UnicodeDecodeError as error:
            raise TaskError(f"{self.where(index)}: not UTF-8 text: {error.reason}", "save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            what = f"{self.where(index)}: not valid JSON: {error.msg} at column {error.colno}"
            raise TaskError(what, "one JSON object per line") from error
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
            yield from (batch.select(list(dict.fromkeys(columns))) if known else batch).to_pylist()

    def __getitem__(self, index: int) -> Row:
        batch = int(np.searchsorted(self._offsets, index, side="right")) - 1
        row: Row = self._batches[batch].slice(index - int(self._offsets[batch]), 1).to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        return f"{self._path}:{index + 1}"

    def name(self, index: int) -> str:
        return f"{self._name}/{index + 1}"


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
    """The rows of these files. A task is named by its file, seen from the folder, and its row."""
    shards = [_open(file, str(file.relative_to(folder).with_suffix(""))) for file in files]
    return shards[0] if len(shards) == 1 else ShardedRows(shards)


def _open(file: Path, name: str) -> Rows:
    make = ArrowRows if file.suffix in (".parquet", ".arrow") else partial(JsonlRows)
    return make(file, name)
