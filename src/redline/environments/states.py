"""A file of states to begin attempts from, so that no attempt has to play its way there.

Any environment that can make a state from a seed can have such a file: `make_state(seed) -> bytes`, and `state_kind`, a text
that says what its states are and for which settings they hold. `write_states` makes the file, `StateCache` reads it.

    8 bytes   b"RLSTATES"
    4 bytes   length of the header, little-endian
    header    JSON: version, kind, seed, count, held_out, made
    offsets   (count + 1) × 8 bytes, little-endian: where each state begins, from the end of the offsets
    states    laid end to end; training states first, then the held-out ones
    32 bytes  SHA-256 of everything before

The file appears by one rename, complete or not at all. No two states in it are equal, so that no held-out state is trained on.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from redline.errors import TaskError

MAGIC = b"RLSTATES"
VERSION = 1
HELD_OUT_SHARE = 0.1
"""Share of a file's states that is held out, where nothing else is said."""
_DIGEST_BYTES = 32
_TRIES_PER_STATE = 20
"""Seeds that may give a state which is already there before the environment is said to have no more."""


class MakesStates(Protocol):
    """An environment that attempts can begin anywhere in."""

    @property
    def state_kind(self) -> str:
        """What the states are and which settings they depend on; a file with another kind is refused."""
        ...

    def make_state(self, seed: int) -> bytes:
        """A state; the same seed always gives the same."""
        ...


@dataclass(slots=True, frozen=True)
class Header:
    """What a file says of itself."""

    version: int
    kind: str
    seed: int
    """The first seed that was tried."""
    count: int
    """States in the file, held-out ones included."""
    held_out: int
    made: str
    """When, in UTC."""


def write_states(
    path: Path,
    environment: MakesStates,
    count: int,
    *,
    held_out_share: float = HELD_OUT_SHARE,
    seed: int = 0,
    progress: Callable[[int], None] = lambda made: None,
) -> Header:
    """Make `count` distinct states and write them. Blocks while the environment makes them; `progress` is told how many there
    are. An interrupted call leaves what was at `path` before."""
    if count < 2:
        raise TaskError(f"{count} states: a file needs at least two, one to train on and one held out", "ask for more states")
    held_out = min(count - 1, max(1, round(count * held_out_share)))
    states = []
    for state in _distinct(environment, count, seed):
        states.append(state)
        progress(len(states))
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    header = Header(VERSION, environment.state_kind, seed, count, held_out, made)
    _write_whole(path, _packed(header, states))
    return header


class StateCache:
    """The states of a file, mapped into memory. Its digest is checked when it is opened."""

    def __init__(self, path: Path, kind: str, remedy: str) -> None:
        """Open a file with states of this kind. Raises TaskError, with `remedy` as what to do, where it cannot serve."""
        self.path, self._remedy = path, remedy
        self._data = self._mapped()
        self.header, start = self._header()
        if self.header.kind != kind:
            raise self._refused(f"its states are {self.header.kind!r}, and this environment needs {kind!r}")
        size = 8 * (self.header.count + 1)
        self._offsets = np.frombuffer(self._data, "<i8", self.header.count + 1, start) + (start + size)

    def __len__(self) -> int:
        return self.header.count

    @property
    def num_train(self) -> int:
        """States that may be trained on: count - held_out."""
        return self.header.count - self.header.held_out

    @property
    def num_held_out(self) -> int:
        return self.header.held_out

    def __getitem__(self, index: int) -> bytes:
        """State `index`, from 0; those from `num_train` on are held out."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._data[int(self._offsets[index]) : int(self._offsets[index + 1])]

    def _mapped(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise self._refused("there is no such file") from None
        except (OSError, ValueError) as error:  # a folder; a file without a byte cannot be mapped
            raise self._refused(f"it cannot be read: {error}") from None
        if data[: len(MAGIC)] != MAGIC:
            raise self._refused("it is no file of states")
        if hashlib.sha256(memoryview(data)[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
            raise self._refused("it is damaged: its digest is not that of its contents")
        return data

    def _header(self) -> tuple[Header, int]:
        """The header, and where the offsets begin. The digest has been checked: what is wrong here is another version's."""
        begin = len(MAGIC) + 4
        end = begin + int.from_bytes(self._data[len(MAGIC) : begin], "little")
        fields = json.loads(self._data[begin:end])
        if fields.get("version") != VERSION:
            raise self._refused(f"its format is version {fields.get('version')}, and this one reads version {VERSION}")
        return Header(**fields), end

    def _refused(self, why: str) -> TaskError:
        return TaskError(f"the states in {self.path} cannot be used: {why}", self._remedy)


def _distinct(environment: MakesStates, count: int, seed: int) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for tried in range(seed, seed + count * _TRIES_PER_STATE):
        state = environment.make_state(tried)
        if state not in seen:
            seen.add(state)
            yield state
        if len(seen) == count:
            return
    raise TaskError(f"only {len(seen)} different states came of {count * _TRIES_PER_STATE} seeds", "ask for fewer states")


def _packed(header: Header, states: list[bytes]) -> bytes:
    text = json.dumps(asdict(header)).encode()
    offsets = np.cumsum([0, *map(len, states)], dtype="<i8").tobytes()
    body = b"".join([MAGIC, len(text).to_bytes(4, "little"), text, offsets, *states])
    return body + hashlib.sha256(body).digest()


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears complete or not at all, even if the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
