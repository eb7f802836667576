"""Rows of a JSONL file that another process may be writing, or was killed while writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from redline.telemetry.files.durable import end_of_last_line

_REMEMBERED_BYTES = 256
_BLOCK_BYTES = 8 << 20
"""Read at once: a long log does not have to fit into memory."""
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)
"""Reads NaN and Infinity, which are no JSON, as null."""


class Tail:
    """Reads what was appended since it last looked. A last line without its newline waits until it is whole."""

    def __init__(self, path: Path, block_bytes: int = _BLOCK_BYTES) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._offset = 0
        self._last = b""
        """The bytes before the offset: where the file has others there, it was written anew."""
        self.at_end = False
        """Whether the last call read as far as the file went."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file began again (a resumed run cuts its logs), and the rows that are new: all of them, or, until
        `at_end`, those of one block. A line that is no JSON object is left out; a file that cannot be read has no rows."""
        try:
            with self._path.open("rb") as file:
                restarted = not self._continues(file)
                if restarted:
                    self._offset, self._last = 0, b""
                file.seek(self._offset)
                lines = file.read(self._block_bytes)
                self.at_end = len(lines) < self._block_bytes
                if not self.at_end:
                    lines += file.readline()
        except OSError:  # not there, or not ours to read: the other runs of a dashboard are
            restarted, self._offset, self._last, self.at_end = self._offset > 0, 0, b"", True
            return restarted, []
        whole = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._last = (self._last + whole[-_REMEMBERED_BYTES:])[-_REMEMBERED_BYTES:]
        return restarted, [row for line in whole.splitlines() if (row := parse_row(line)) is not None]

    def skip(self) -> None:
        """Leave out every whole line that is there now."""
        self._offset, self._last, self.at_end = 0, b"", True
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            self._offset = end_of_last_line(file)
            file.seek(max(0, self._offset - _REMEMBERED_BYTES))
            self._last = file.read(min(self._offset, _REMEMBERED_BYTES))

    def _continues(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for a line that is none."""
    try:
        row = _DECODER.decode(line.decode())
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
