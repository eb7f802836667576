"""Fields of a protobuf message, as they lie on the wire: enough to read logs of others without their packages."""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types. A group (3, 4) is in no message that we read."""
Value = int | bytes


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Give each field of a message: its number, and its value. Numbers of fixed size are bytes, as messages and texts are: the
    schema says what they mean. Raises `ValueError` for what is no message."""
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        wire, value = key & 7, b""
        if wire == VARINT:
            number, place = _varint(message, place)
            yield key >> 3, number
            continue
        if wire == BYTES:
            size, place = _varint(message, place)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        value, place = message[place : place + size], place + size
        if place > end:
            raise ValueError("a field is longer than its message")
        yield key >> 3, value


def text(value: Value) -> str:
    """Return the text of a field; what is not UTF-8 in it is replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def double(value: Value) -> float:
    """Return the number of a `double` field."""
    return float(struct.unpack("<d", _sized(value, 8))[0])


def single(value: Value) -> float:
    """Return the number of a `float` field."""
    return float(struct.unpack("<f", _sized(value, 4))[0])


def integer(value: Value) -> int:
    """Return the number of an `int64` field: a negative one lies there as its complement."""
    if isinstance(value, bytes):
        raise ValueError("not an integer")
    return value - (1 << 64) if value >= 1 << 63 else value


def message(value: Value) -> bytes:
    """Return the bytes of a message inside a message."""
    if not isinstance(value, bytes):
        raise ValueError("not a message")
    return value


def _sized(value: Value, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        raise ValueError(f"not a number of {size} bytes")
    return value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and the place behind it."""
    number = shift = 0
    while True:
        if place >= len(message) or shift > 63:
            raise ValueError("a number does not end")
        byte = message[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number & ((1 << 64) - 1), place
