"""Versions of the weights in a folder, so that an engine which comes late or starts again can join by itself.

    shards/000007-9f3c0a-000.safetensors   tensors that version 7 brought; never written again
    versions/000007.json                   the manifest: every tensor of version 7, its shard, form and digest
    current.json                           the version that engines sample from
    writer.lock                            held by the one process that writes

A version is there when its manifest is: shards are written and flushed first, and the manifest appears by one rename. A
crash at any moment leaves the versions that were whole before, and perhaps shards that no manifest names, which the next
writer removes.

Only tensors whose bytes changed are written: a manifest names shards of earlier versions for the others. Shards that hold
mostly tensors of the past are kept alive that way, until what is kept is `MOST_WASTE` times as large as a version: then all is
written again.

A version stays while it is current, or the newest, or while somebody reads it: a reader has a shared lock on the manifest, and
who deletes one needs it alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from redline.errors import RunFolderError
from redline.weight_sync.tensor_bytes import DTYPES, digests, in_groups, pack

SHARD_BYTES = 1 << 30
"""A shard is closed once it holds so many bytes."""
MOST_WASTE = 2.0
ATTEMPTS = 20
"""How often a reader begins again where the version that it was about to read went away."""


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """Where a tensor of a version is."""

    shard: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    sha256: str
    nbytes: int


@dataclass(slots=True, frozen=True)
class Manifest:
    """One version, whole."""

    version: int
    tensors: Mapping[str, StoredTensor]
    bytes_written: int = 0
    """What this version brought that was not there before."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, wherever they are."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def shards(self) -> set[str]:
        return {tensor.shard for tensor in self.tensors.values()}


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class VersionFolder:
    """The folder as its one writer has it. Raises RunFolderError where another process writes to it."""

    def __init__(self, path: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.path = path
        self._shard_bytes = shard_bytes
        for folder in (path / "shards", path / "versions"):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = (path / "writer.lock").open("w")
        if not _lock(self._lock, fcntl.LOCK_EX):
            self._lock.close()
            raise RunFolderError(f"{path}: another process writes weights there", "give every run a folder of its own")
        for left in (*path.glob("*.part"), *path.glob("versions/*.part")):  # by a writer that was killed
            left.unlink()
        self._newest: int | None = None
        """The version that was written last by this process."""

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Manifest:
        """Write a version and return its manifest. Blocks until it is on the disk. Versions that nobody needs go."""
        found, before = digests(tensors), self._before()
        same = {name: before[name] for name in found if name in before and before[name].sha256 == found[name]}
        if self._waste(same, tensors) > MOST_WASTE:
            same = {}
        stored = same | self._write_shards(version, {name: t for name, t in tensors.items() if name not in same}, found)
        written = sum(stored[name].nbytes for name in tensors if name not in same)
        manifest = Manifest(version, {name: stored[name] for name in tensors}, written)
        _write_atomically(_manifest_path(self.path, version), asdict(manifest))
        self._newest = version
        self._prune()
        return manifest

    def make_current(self, version: int) -> None:
        """Engines that come later join at this version. The one before stays until the next is written."""
        _write_atomically(self.path / "current.json", {"version": version})

    def close(self) -> None:
        """Let another process write; the versions stay."""
        self._lock.close()

    def _before(self) -> Mapping[str, StoredTensor]:
        """The tensors of the current version, or those written last; empty where there are none."""
        for version in (self._newest, current_version(self.path)):
            if version is not None and _manifest_path(self.path, version).exists():
                return _read_manifest(_manifest_path(self.path, version).read_text()).tensors
        return {}

    def _waste(self, same: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> float:
        """Bytes of the shards that would be kept for `same`, and of what is new, in units of a version."""
        kept = sum((self.path / "shards" / shard).stat().st_size for shard in {stored.shard for stored in same.values()})
        new = sum(tensor.nbytes for name, tensor in tensors.items() if name not in same)
        return (kept + new) / max(1, sum(tensor.nbytes for tensor in tensors.values()))

    def _write_shards(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> dict[str, StoredTensor]:
        stored = {}
        run = secrets.token_hex(3)  # a run that went back to a checkpoint writes a version of the same number again
        for number, group in enumerate(in_groups(tensors, self._shard_bytes)):
            shard = f"{version:06}-{run}-{number:03}.safetensors"
            with (self.path / "shards" / shard).open("wb") as file:
                for part in pack(group):
                    file.write(part)
                _flush(file)
            for name, t in group.items():
                stored[name] = StoredTensor(shard, DTYPES[t.dtype], tuple(t.shape), found[name], t.nbytes)
        return stored

    def _prune(self) -> None:
        needed = {
            _manifest_path(self.path, version) for version in (current_version(self.path), self._newest) if version is not None
        }
        kept = []
        for path in (self.path / "versions").glob("*.json"):
            with path.open() as file:
                if path not in needed and _lock(file, fcntl.LOCK_EX):  # nobody reads it
                    path.unlink()
                else:
                    kept.append(_read_manifest(file.read()))
        named = {shard for manifest in kept for shard in manifest.shards}
        for shard in (self.path / "shards").iterdir():
            if shard.name not in named:
                shard.unlink()


def _write_atomically(path: Path, content: Any) -> None:
    temporary = path.with_suffix(f".{secrets.token_hex(4)}.part")
    with temporary.open("w") as file:
        json.dump(content, file)
        _flush(file)
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def current_version(path: Path) -> int | None:
    """The version that engines sample from; None before there is one."""
    try:
        return int(json.loads((path / "current.json").read_text())["version"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path / "current.json", error) from error


@contextmanager
def reading(path: Path, version: int | None = None) -> Iterator[Manifest]:
    """The manifest of a version, by default of the current one; the version stays while the block is open. Raises
    RunFolderError where there is no such version."""
    for _ in range(ATTEMPTS):
        wanted = current_version(path) if version is None else version
        if wanted is None:
            break
        manifest = _manifest_path(path, wanted)
        try:
            file = manifest.open()
        except FileNotFoundError:
            continue
        with file:
            if _lock(file, fcntl.LOCK_SH) and _is_still(manifest, file):
                yield _read_manifest(file.read())
                return
    what = "no version of the weights" if version is None else f"no version {version} of the weights"
    raise RunFolderError(f"{path}: {what}", "is it the folder that the trainer writes to?")


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a version that is being read, in host memory, read as they are asked for. The shard of the last one is
    kept. Raises RunFolderError where bytes are not those that were written."""

    def __init__(self, path: Path, manifest: Manifest, names: Collection[str] | None = None) -> None:
        """`names`: those that will be asked for; by default all."""
        self._path, self._manifest = path, manifest
        self._names = dict.fromkeys(manifest.tensors if names is None else names)
        self._shard, self._tensors = "", dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        shard = self._manifest.tensors[name].shard
        if shard != self._shard:
            self._shard, self._tensors = "", {}  # before the next one takes memory
            self._tensors = self._read(shard)
            self._shard = shard
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, shard: str) -> dict[str, Tensor]:
        names = [name for name in self._names if self._manifest.tensors[name].shard == shard]
        file = self._path / "shards" / shard
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error
        found = digests(tensors)
        for name, tensor in tensors.items():
            stored = self._manifest.tensors[name]
            if (DTYPES[tensor.dtype], tuple(tensor.shape), found[name]) != (stored.dtype, tuple(stored.shape), stored.sha256):
                raise _damaged(file, f"{name} is not what was written")
        return tensors


def _manifest_path(path: Path, version: int) -> Path:
    return path / "versions" / f"{version:06}.json"


def _read_manifest(text: str) -> Manifest:
    content = json.loads(text)
    return Manifest(content["version"], {name: StoredTensor(**stored) for name, stored in content["tensors"].items()})


def _lock(file: IO[Any], how: int) -> bool:
    """Whether the lock was to be had at once. It ends with the file."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, file: IO[Any]) -> bool:
    """Whether the path leads to this file: a writer may have deleted or replaced it before it was locked."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _damaged(path: Path, why: object) -> RunFolderError:
    return RunFolderError(f"{path}: damaged: {why}", "remove the folder; the trainer writes all of it again")
