"""Files that survive a kill: replaced as a whole or not at all, or appended to line by line."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def write_json(path: Path, document: Any) -> None:
    """Put a JSON document in place of what is there. Refuses NaN, which no other JSON reader would take."""
    replace_file(path, (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where the file is missing, half-written or holds something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace_file(path: Path, content: bytes) -> None:
    """A reader, or the next process after a kill, sees the old content or the new, never a mix."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # without it a power cut may keep the rename and lose the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Why a folder cannot be given a name: something has it. A folder that is empty makes room."""


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder to fill. When the block ends, everything in it is flushed to the disk and it takes the name `path`;
    what was there is deleted after that. A block that raises, or a kill, leaves `path` as it was. For names that are redline's
    own, and one writer: what was left beside `path` is deleted too."""
    scratch, old = (path.with_name(f".{path.name}.{end}") for end in ("partial", "old"))
    for left in (scratch, old):
        shutil.rmtree(left, ignore_errors=True)
    scratch.mkdir(parents=True)
    with _filled(scratch):
        yield scratch
    if path.exists():
        path.rename(old)
    scratch.rename(path)
    flush_to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """As `replacing_folder`, for a name that somebody chose: it takes the place of nothing but an empty folder, and deletes
    nothing but its own. Raises `FileExistsError` at the end of the block where `path` holds something by then."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    scratch.mkdir(parents=True)
    with _filled(scratch):
        yield scratch
    try:
        scratch.rename(path)  # in one step with the look at what is there
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if error.errno in TAKEN:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        raise
    flush_to_disk(path.parent)


@contextmanager
def _filled(scratch: Path) -> Iterator[None]:
    """Flushes everything in it when the block ends; deletes it where that raises."""
    try:
        yield
        for each in (*scratch.rglob("*"), scratch):
            flush_to_disk(each)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def flush_to_disk(path: Path) -> None:
    """What was written to a file, by anybody, or the names in a folder: after this a power cut takes neither."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_torn_line(path: Path) -> None:
    """Cut a last line that a kill left without its newline, so that the next append starts on a fresh one."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(end_of_last_line(file))


def end_of_last_line(file: BinaryIO) -> int:
    """Return where the last line with a newline ends; 0 where there is none."""
    end, block = file.seek(0, os.SEEK_END), b""
    while end and b"\n" not in block:
        start = max(0, end - 65536)
        file.seek(start)
        block, end = file.read(end - start), start
    return end + block.rfind(b"\n") + 1
