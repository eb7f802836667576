"""Output that is not read any more: `redline train … | head`, a terminal that was closed, a log on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""A pipe without a reader; a terminal that was closed; a descriptor that somebody closed."""


class UnreadStream:
    """A text stream that drops what cannot be written, instead of raising."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Where the reader is gone for good, let the descriptor lead nowhere: for libraries that write to it as well, and for
        what Python flushes when it exits. A full disk may have room again."""
        if not isinstance(error, OSError) or error.errno not in _GONE:
            return
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def dropping_unread_output() -> Iterator[None]:
    """While it is open, nothing that is printed raises, even when its reader has gone."""
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", UnreadStream(stream)) if stream else stream for stream in before)
    try:
        yield
    finally:
        if sys.stdout:
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _open_closed_streams() -> None:
    """Let standard streams that the caller has closed (`2>&-`) lead nowhere. Else the next file that is opened gets the number,
    and whatever a library prints ends up in it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
