"""The rows of a JSONL file that another process may be writing, or has been killed while writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_REMEMBERED_BYTES = 256
_BLOCK_BYTES = 8 << 20
"""Read at once: a long log does not have to fit into memory."""
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)
"""NaN, which is no JSON, is nothing."""


class Tail:
    """Reads what was appended since it last looked. A last line without its newline waits until it is whole."""

    def __init__(self, path: Path, block_bytes: int = _BLOCK_BYTES) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._offset = 0
        self._last = b""
        """What stood before the offset: where something else does, the file was written anew."""
        self.at_end = False
        """Whether the last call read as far as the file went."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file began again (a resumed run cuts its logs), and rows that are new: all of them, or, until `at_end`,
        those of one block. A line that is no JSON object is left out."""
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
        return restarted, [row for line in whole.splitlines() if (row := _row(line)) is not None]

    def _continues(self, file: Any) -> bool:
        file.seek(self._offset - len(self._last))
        return bool(file.read(len(self._last)) == self._last)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = _DECODER.decode(line.decode())
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
