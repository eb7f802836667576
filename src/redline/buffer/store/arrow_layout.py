"""Where an Arrow IPC file keeps its sizes, so that rows can be added to a file that is complete at all times.

    ARROW1  schema  [message: rows, nodes, buffers]  body  end  footer  ARROW1
                     └── `Head`: overwritten in place ┘  └── its length: once, when the file is made

Messages and footer are FlatBuffers: a table begins with the distance back to its vtable, which holds the place of each field.
https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format has the tables.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

MAGIC = b"ARROW1"
PAGE = 4096
_PREFIX = 8
"""Bytes before the first message: the magic and padding. Before a message's table: 0xFFFFFFFF and its size."""


@dataclass(slots=True)
class Head:
    """Everything before the body of a file's one record batch."""

    data: bytearray
    """Up to where the body begins."""
    message: int
    """Where the batch's message begins."""
    rows_at: int
    body_at: int
    nodes_at: int
    num_nodes: int
    buffers_at: int
    num_buffers: int

    @classmethod
    def of(cls, data: bytes) -> Head:
        """From the beginning of a file. Raises ValueError where it does not begin like one of ours."""
        try:
            return cls._parse(data)
        except (struct.error, OverflowError) as error:
            raise ValueError("the head of the file is damaged or cut") from error

    @classmethod
    def _parse(cls, data: bytes) -> Head:
        message = _PREFIX + _PREFIX + _u32(data, _PREFIX + 4)
        end = message + _PREFIX + _u32(data, message + 4)
        if data[: len(MAGIC)] != MAGIC or not _PREFIX < message < end <= len(data):
            raise ValueError("no Arrow file with a record batch")
        table = _follow(data, message + _PREFIX)
        batch = _follow(data, _field(data, table, 2))
        nodes, buffers = (_follow(data, _field(data, batch, index)) for index in (1, 2))
        num_nodes, num_buffers = _u32(data, nodes), _u32(data, buffers)
        places = (_field(data, batch, 0), _field(data, table, 3), nodes + 4, num_nodes, buffers + 4, num_buffers)
        ends = (places[0] + 8, places[1] + 8, nodes + 4 + 16 * num_nodes, buffers + 4 + 16 * num_buffers)
        if max(ends) > end:
            raise ValueError("the head of the file is damaged")
        return cls(bytearray(data[:end]), message, *places)

    @property
    def nodes(self) -> np.ndarray:
        """int64[nodes, 2], writable: rows and nulls of each."""
        return np.frombuffer(self.data, "<i8", 2 * self.num_nodes, self.nodes_at).reshape(-1, 2)

    @property
    def buffers(self) -> np.ndarray:
        """int64[buffers, 2], writable: where each begins in the body, and its bytes."""
        return np.frombuffer(self.data, "<i8", 2 * self.num_buffers, self.buffers_at).reshape(-1, 2)

    @property
    def body_bytes(self) -> int:
        return struct.unpack_from("<q", self.data, self.body_at)[0]

    def set_rows(self, rows: int) -> None:
        struct.pack_into("<q", self.data, self.rows_at, rows)

    def set_body_bytes(self, size: int) -> None:
        struct.pack_into("<q", self.data, self.body_at, size)

    @property
    def schema(self) -> pa.Schema:
        """The columns that the file says it has. Raises ValueError where they cannot be read."""
        return pa.ipc.read_schema(pa.BufferReader(bytes(self.data[_PREFIX : self.message])))

    @property
    def is_in_one_page(self) -> bool:
        """A kill may come between two pages of a write, but not within one: the sizes are replaced together."""
        return self.message // PAGE == (len(self.data) - 1) // PAGE


def blank_file(schema: pa.Schema, body_bytes: int) -> tuple[Head, bytes]:
    """What stands before and after a body of that size. pyarrow writes a row, and the row is taken out. Where the sizes would
    lie in two pages, a line of metadata before them moves them into the next."""
    data = _file_of_one_row(schema)
    head = Head.of(data)
    if not head.is_in_one_page:
        data = _file_of_one_row(schema.with_metadata({"room": " " * (PAGE - head.message % PAGE)}))
        head = Head.of(data)
    assert head.is_in_one_page, "the sizes do not lie in one page"
    tail = bytearray(data[len(head.data) + head.body_bytes :])
    footer = len(tail) - len(MAGIC) - 4 - _u32(tail, len(tail) - len(MAGIC) - 4)
    blocks = _follow(tail, _field(tail, _follow(tail, footer), 3))
    assert _u32(tail, blocks) == 1
    struct.pack_into("<q", tail, blocks + 4 + 16, body_bytes)
    head.set_body_bytes(body_bytes)
    return head, bytes(tail)


def _file_of_one_row(schema: pa.Schema) -> bytes:
    row = pa.record_batch([_one_value(field.type) for field in schema], schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(row)
    return sink.getvalue().to_pybytes()


def check_sizes(head: Head, schema: pa.Schema) -> None:
    """Raises ValueError where the sizes contradict each other, which only damage can do, and which Arrow does not survive."""
    nodes, buffers = iter(head.nodes.tolist()), iter(head.buffers.tolist())
    rows = struct.unpack_from("<q", head.data, head.rows_at)[0]
    for field in schema:
        _check_array(field.type, rows, nodes, buffers, head.body_bytes)


def _check_array(
    kind: pa.DataType, length: int | None, nodes: Iterator[list[int]], buffers: Iterator[list[int]], body_bytes: int
) -> None:
    """`length` is None inside a list, where only the offsets know it."""
    found, nulls = next(nodes, (-1, 0))
    if not 0 <= nulls <= found or length not in (None, found):
        raise ValueError(f"{found} values, {nulls} of them null, where there should be {length}")
    is_nested = pa.types.is_nested(kind)
    is_list = is_nested and not pa.types.is_struct(kind)
    least = [-(-found // 8) if nulls else 0]
    if is_list or pa.types.is_string(kind):
        least.append((8 if pa.types.is_large_list(kind) else 4) * (found + 1) if found else 0)
    if not is_nested:
        least.append(0 if pa.types.is_string(kind) else found * kind.bit_width // 8)
    for size in least:
        start, taken = next(buffers, (-1, 0))
        if not (0 <= start <= start + taken <= body_bytes and taken >= size):
            raise ValueError(f"a buffer from {start} of {taken} bytes, where there should be {size}")
    for each in [kind.field(i).type for i in range(kind.num_fields)]:
        _check_array(each, None if is_list else found, nodes, buffers, body_bytes)


def _one_value(kind: pa.DataType) -> pa.Array:
    """Lists are not empty: a body of 0 bytes would be left out of the tables, and there would be no place to write its size."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.array([[None if pa.types.is_struct(kind.value_type) else 0]], kind)
    return pa.array(["" if pa.types.is_string(kind) else 0], kind)


def _u32(data: bytes | bytearray, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def _follow(data: bytes | bytearray, at: int) -> int:
    """Where the reference that stands there leads."""
    return at + _u32(data, at)


def _field(data: bytes | bytearray, table: int, index: int) -> int:
    """Where a field of a table stands."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    place = struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0]
    if vtable < 0 or not place:
        raise ValueError("a field that should be there is not")
    return table + place
