"""Reads a Chrome trace event by event: of a file of any size only a piece and one event are in memory.

`json.JSONDecoder.raw_decode` parses each event in C, several times as fast as a parser that gives tokens to Python, so that a
streaming library would be slower here and one more dependency.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from redline.errors import TraceError

CHUNK = 1 << 20
"""Bytes that are read at a time."""
LARGEST = 1 << 26
"""Characters of the largest single value; what is longer is no trace."""
FAR = 1 << 16
"""Characters behind an error from which on it is damage, and not the end of what was read so far."""
_SPACE = re.compile(r"[\s,]*")
_NEXT = re.compile(r"\}\s*,\s*(?=\{)")
_DECODER = json.JSONDecoder(strict=False)  # names of kernels hold control characters now and then


class EventStream:
    """The events of one file, read once. `head` fills while they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        """Every other key of the document, as far as it was read."""
        self.is_truncated = False
        """Whether the file ends before its events do."""
        self.num_damaged = 0
        """Events that are no JSON, and were left out."""
        self.has_events = False
        """Whether the document has a list of events at all."""
        self._text, self._at, self._ended = "", 0, False

    def events(self) -> Iterator[dict[str, Any]]:
        """Give every event. Raises `TraceError` where the file is no JSON, or of another shape than a trace."""
        with opened(self.path) as file:
            self._file, self._decode = file, codecs.getincrementaldecoder("utf-8")("replace").decode
            first = self._peek()
            if first == "[":
                yield from self._list()
            elif first == "{":
                yield from self._document()
            else:
                raise not_a_trace(self.path, "it is no JSON")

    def _document(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        while (first := self._peek()) not in ("}", ""):
            if first != '"':
                raise not_a_trace(self.path, "its JSON is damaged")
            key = self._value()
            if key is _CUT or self._peek() != ":":
                break
            self._at += 1
            first = self._peek()
            if key == "traceEvents" and first == "[":
                yield from self._list()
            elif (value := self._value()) not in (_CUT, _DAMAGED):
                self.head[key] = value
            elif value is _DAMAGED:
                raise not_a_trace(self.path, "its JSON is damaged")
            if self.is_truncated:
                return
        self.is_truncated |= self._peek() == ""

    def _list(self) -> Iterator[dict[str, Any]]:
        self.has_events = True
        self._at += 1
        while (first := self._peek()) not in ("]", ""):
            if first != "{":
                raise not_a_trace(self.path, "its events are not objects")
            event = self._value()
            if event is _CUT:
                return
            if event is _DAMAGED:
                self._skip()
            else:
                yield event
        self.is_truncated |= first == ""
        self._at += 1

    def _value(self) -> Any:
        """Return the value that begins here, `_CUT` where the file ends inside it, or `_DAMAGED` where it is no JSON."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if error.pos + FAR < len(self._text) and not error.msg.startswith("Unterminated"):
                    return _DAMAGED
                if self._more():
                    continue
                self.is_truncated = True
                return _CUT
            except (ValueError, RecursionError):  # a number of thousands of digits, or lists within lists without end
                return _DAMAGED
            if end == len(self._text) and self._more():  # a number may go on
                continue
            self._at = end
            return value

    def _skip(self) -> None:
        """Go on at the next event."""
        self.num_damaged += 1
        while (found := _NEXT.search(self._text, self._at)) is None:
            if not self._more():
                self._at = len(self._text)
                return
        self._at = found.end()

    def _peek(self) -> str:
        """Return the next character that is neither space nor comma; empty at the end of the file."""
        while True:
            found = cast(re.Match[str], _SPACE.match(self._text, self._at))
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read on, and forget what is behind. Returns False at the end of the file."""
        if self._ended:
            return False
        if len(self._text) - self._at > LARGEST:
            raise not_a_trace(self.path, "its JSON is damaged")
        try:
            read = self._file.read(CHUNK)
        except (EOFError, zlib.error):  # compressed, and cut or damaged from here on
            self.is_truncated, read = True, b""
        self._ended = not read
        self._text, self._at = self._text[self._at :] + self._decode(read, final=not read), 0
        return bool(read)


_CUT, _DAMAGED = object(), object()


class Unpacked:
    """A gzip file that is read as far as it goes: Python's own reader gives nothing of a piece that is cut."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._inflate, self._left = file, zlib.decompressobj(wbits=31), b""

    def read(self, size: int) -> bytes:
        """Return at most so many bytes, none at the end. Raises EOFError or zlib.error where the file is cut or damaged."""
        while True:
            ended = self._inflate.eof
            raw = (self._inflate.unused_data if ended else self._left) or self._file.read(CHUNK)
            if not raw and ended:
                return b""
            if not raw:
                raise EOFError("the file was cut")
            if ended:  # another member follows
                self._inflate = zlib.decompressobj(wbits=31)
            found = self._inflate.decompress(raw, size)
            self._left = self._inflate.unconsumed_tail
            if found:
                return found


@contextmanager
def opened(path: Path) -> Iterator[Unpacked | IO[bytes]]:
    """Open a file for reading its bytes, unpacked where it is gzip, whatever its name is."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield Unpacked(file) if packed else file


def not_a_trace(path: Path, why: str) -> TraceError:
    return TraceError(
        f"{path}: no trace that can be read: {why}",
        "give what torch.profiler's export_chrome_trace wrote (.json, .json.gz), or what `nsys export --type sqlite` made",
    )
