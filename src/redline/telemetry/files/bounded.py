"""Logs that may not grow for ever: they keep their beginning and their newest stretch, and let go of the lines in between.

    before  [beginning │ ............................. │ newest stretch]      more than the log may take
    after   [beginning │ what was said to stand here    │ newest stretch]

The file is replaced as a whole by one rename, so that a reader, or the next process after a kill, finds the old content or the
new. It is not flushed to the disk: what a power cut may take of a log is not worth a pause of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 20


@dataclass(slots=True, frozen=True)
class Stretch:
    """Whole lines of a file, from one byte to another."""

    start: int
    end: int


def between(path: Path, head_bytes: int, tail_bytes: int) -> Stretch:
    """The lines that start after the first `head_bytes` and end before the last `tail_bytes`, as far as lines are whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return Stretch(_line_after(file, head_bytes), _line_after(file, max(head_bytes, size - tail_bytes)))


def lines_of(path: Path, stretch: Stretch) -> Iterator[bytes]:
    """The lines of a stretch, one at a time, each with its newline."""
    with path.open("rb") as file:
        file.seek(stretch.start)
        position = stretch.start
        while position < stretch.end and (line := file.readline()):
            position += len(line)
            yield line


def rewrite(path: Path, parts: Sequence[Stretch | bytes]) -> None:
    """Put these parts, one after the other, in place of the file: stretches of its content, and bytes that are new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            for part in parts:
                if isinstance(part, bytes):
                    target.write(part)
                    continue
                source.seek(part.start)
                left = part.end - part.start
                while left and (block := source.read(min(_BLOCK, left))):
                    target.write(block)
                    left -= len(block)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def last_lines(path: Path, most_bytes: int) -> bytes:
    """The end of a file, at most so many bytes of it, from the start of a line on; all of it where it is smaller."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(_line_after(file, size - most_bytes) if size > most_bytes else 0)
        return file.read()


def _line_after(file: BinaryIO, position: int) -> int:
    """Where the first line begins that does not begin before `position`."""
    if position <= 0:
        return 0
    file.seek(position - 1)
    file.readline()
    return file.tell()
