"""The spans of a process on another machine, copied into the run's folder while it works.

there    its span files ──► SpanSource.changes ──► frames
here     frames ──► SpanCopies.write ──► spans/engine-2-4711.jsonl, and how far its clock is from ours
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from redline.telemetry.processes import ClockOffset, keep_offset, new_span_file, span_files

MAX_BYTES = 1 << 20
"""The most of a file that is sent at once."""
_NAME = re.compile(r"[\w-]{1,100}\.jsonl")


class SpanSource:
    """Reads what was added to the span files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}

    def changes(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield what is new: file name, place in the file, bytes. A file that became shorter is told again as a whole."""
        for path in span_files(self._folder):
            size, sent = path.stat().st_size, self._sent.get(path.name, 0)
            if size < sent:
                sent = 0
            while sent < size:
                with path.open("rb") as file:
                    file.seek(sent)
                    data = file.read(MAX_BYTES)
                if not data:
                    break
                yield path.name, sent, data
                sent += len(data)
            self._sent[path.name] = sent


class SpanCopies:
    """Writes what another machine tells of its spans into the run's folder, into files of its own: a process of a third machine
    may have the same name and id."""

    def __init__(self, folder: Path | None, clock: ClockOffset) -> None:
        """`clock` says how far the other machine's clock is from ours. Without a folder nothing is written."""
        self._folder, self._clock = folder, clock
        self._copies: dict[str, Path] = {}
        """Name of a file there → its copy here."""

    def write(self, name: str, place: int, data: bytes) -> None:
        """Put bytes into a file, and cut it off behind them. Raises ValueError for a name that is no span file's. A disk
        that takes nothing is said once, on stderr: the machine goes on without."""
        if not _NAME.fullmatch(name) or place < 0:
            raise ValueError(f"{name!r} is no file of spans")
        if self._folder is None:
            return
        try:
            self._write(self._folder, name, place, data)
        except OSError as error:
            print(f"spans of other machines are no longer written: {error}", file=sys.stderr, flush=True)
            self._folder = None

    def _write(self, folder: Path, name: str, place: int, data: bytes) -> None:
        if (path := self._copies.get(name)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            path = self._copies[name] = new_span_file(folder, name.removesuffix(".jsonl"))
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data)
            file.truncate()
        if place == 0:
            keep_offset(path, self._clock)
