"""TensorBoard's event files: frames of TFRecord, each a protobuf `Event` (tensorflow/core/util/event.proto).

frame   length u64 · masked CRC-32C of the length u32 · the event · masked CRC-32C of the event u32
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from redline.runs.others import protobuf
from redline.runs.others.log import Log, Row, from_json, is_number

_POLYNOMIAL = 0x82F63B78
"""The polynomial of CRC-32C, mirrored."""
_MOST_BYTES = 1 << 30
"""Bytes of an event: more is a damaged length."""
_TEXT = "/text_summary"
"""What `add_text` puts behind a tag."""
_SETTINGS = f"args{_TEXT}"
"""Where transformers' callback writes the arguments of its trainer, as JSON."""


def read_events(path: Path) -> Log:
    """Read the scalars of an event file. A file that is cut short, or damaged, is read as far as it is whole; `damage` says
    so."""
    reader = _Events()
    with path.open("rb") as file:
        for event in reader.frames(file):
            try:
                reader.take(event)
            except ValueError:
                reader.num_bad += 1
    return Log(path, "TensorBoard", tuple(reader.rows), reader.config, damage=reader.damage)


class _Events:
    """Collects what the events of one file hold."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.config: dict[str, Any] = {}
        self.num_bad = 0
        self._cut = ""

    @property
    def damage(self) -> str:
        bad = f"{self.num_bad} of its events are damaged and left out" if self.num_bad else ""
        return "; ".join(filter(None, (bad, self._cut)))

    def frames(self, file: BinaryIO) -> Iterator[bytes]:
        """Give the bytes of each event whose checksum is right. A frame whose length is damaged ends the file: there is no
        telling where the next one begins."""
        while head := file.read(12):
            place = file.tell() - len(head)
            if len(head) == 12 and _masked(head[:8]) == struct.unpack("<I", head[8:])[0]:
                size = struct.unpack("<Q", head[:8])[0]
                body = file.read(size + 4) if size < _MOST_BYTES else b""
                if len(body) == size + 4:
                    if _masked(body[:-4]) == struct.unpack("<I", body[-4:])[0]:
                        yield body[:-4]
                    else:
                        self.num_bad += 1
                    continue
            elif len(head) == 12:
                self._cut = f"it is damaged at byte {place:,}, and what follows is not read"
                return
            self._cut = f"it is cut short: what begins at byte {place:,} is not whole"
            return

    def take(self, event: bytes) -> None:
        """Add the scalars of an event, in one row."""
        time, step, values = 0.0, 0, dict[str, float]()
        for number, value in protobuf.fields(event):
            if number == 1:
                time = protobuf.double(value)
            elif number == 2:
                step = protobuf.integer(value)
            elif number == 5:
                for kind, summary in protobuf.fields(protobuf.message(value)):
                    if kind == 1:
                        self._add(protobuf.message(summary), values)
        values = {tag: value for tag, value in values.items() if is_number(value)}
        if values:
            self.rows.append(Row(values, step, time))

    def _add(self, summary: bytes, values: dict[str, float]) -> None:
        """Take one value of a summary: a scalar of either form, or the arguments of a trainer."""
        found = dict(protobuf.fields(summary))
        tag = protobuf.text(found.get(1, b""))
        if 2 in found:
            values[tag] = protobuf.single(found[2])
        elif 8 in found:
            tensor = dict(protobuf.fields(protobuf.message(found[8])))
            if tag == _SETTINGS and 8 in tensor:
                self.config = _settings(protobuf.text(tensor[8]))
            elif (scalar := _scalar(tensor)) is not None:
                values[tag] = scalar


def _scalar(tensor: dict[int, protobuf.Value]) -> float | None:
    """Return the number of a tensor that holds one float or double; None for any other."""
    of_type = {1: (5, protobuf.single, 4), 2: (6, protobuf.double, 8)}.get(protobuf.integer(tensor.get(1, 0)))
    if of_type is None:
        return None
    listed, number, size = of_type
    value = tensor.get(listed, tensor.get(4))  # its list of values, or its raw content
    return number(value) if isinstance(value, bytes) and len(value) == size else None


def _settings(text: str) -> dict[str, Any]:
    found = from_json(text)
    return found if isinstance(found, dict) else {}


def _table() -> tuple[int, ...]:
    """Return the CRC-32C of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


def _masked(data: bytes) -> int:
    """Return the checksum that TFRecord writes: CRC-32C, rotated and shifted by a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
