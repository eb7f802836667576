"""Whether files are those that they were, without keeping a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

PIECE_BYTES = 4096


def fingerprint_files(files: Iterable[Path], folder: Path, *, pieces: int, whole_bytes: int = 0) -> str:
    """A text that differs where names, sizes or contents of two lists of files differ; names are seen from the folder. A file
    of up to `whole_bytes` is read whole. Of a larger one so many pieces are read, spread evenly: gigabytes take too long."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}/{size}/".encode())
        with path.open("rb") as file:
            step = PIECE_BYTES if size <= whole_bytes else max(PIECE_BYTES, size // pieces)
            for place in range(0, size, step):
                file.seek(place)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
