"""`redline env warm`: a file of states to begin attempts from, made in several processes.

States are made seed by seed and kept in FILE.part, a line each, as soon as they are there: a call that was interrupted begins
where the last one ended. When there are enough, the file appears as a whole and FILE.part goes.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

from redline.environments.states import Header, MakesStates, write_states
from redline.errors import ConfigError, TaskError
from redline.lab.environments.made import Made

CHUNK = 96
"""States that are made and kept at a time, by each process: neighbouring seeds may come of one game."""


@dataclass(slots=True, frozen=True)
class Wish:
    """What is to be made."""

    states: int
    out: Path
    seed: int = 0
    workers: int = 1


def warm(made: Made, wish: Wish, progress: Callable[[int], None], tell: Callable[[str], None] = lambda text: None) -> Header:
    """Make the file. Blocks until it is there; `progress` is told how many states there are, and `tell` what was damaged.
    Raises ConfigError for an environment that makes no states, and for a file that cannot be written."""
    if wish.out.is_dir():
        raise ConfigError(f"--out {wish.out} is a folder", "name a file in it")
    environment: Any = made.make()
    if not callable(getattr(environment, "make_state", None)) or not hasattr(environment, "state_kind"):
        raise ConfigError(f"{made.name} makes no states to begin from", "it needs `make_state(seed) -> bytes` and `state_kind`")
    part = wish.out.with_name(f"{wish.out.name}.part")
    with KeptStates(part, environment, made, wish) as kept:
        if kept.dropped:
            tell(f"{part}: {kept.dropped} damaged line(s) dropped; their states are made again")
        header = write_states(wish.out, kept, wish.states, seed=wish.seed, progress=progress)
        part.unlink(missing_ok=True)  # while it is locked: nobody else begins to write to what goes
    return header


class KeptStates:
    """Makes states ahead, in processes where there are several, and keeps them on the disk. Implements `MakesStates`."""

    def __init__(self, path: Path, environment: MakesStates, made: Made, wish: Wish) -> None:
        self._path, self._environment, self._workers = path, environment, wish.workers
        self._known: dict[int, bytes] = {}
        """By seed."""
        self.dropped = 0
        """Lines of the file that were damaged."""
        self._file = _locked(path)
        self._read({"kind": environment.state_kind, "params": dict(made.params), "seed": made.seed})
        spawn = get_context("spawn")
        self._pool = ProcessPoolExecutor(wish.workers, spawn, _prepare, (made,)) if wish.workers > 1 else None

    @property
    def state_kind(self) -> str:
        return self._environment.state_kind

    def make_state(self, seed: int) -> bytes:
        """The state of this seed, and those after it are made as well."""
        if seed not in self._known:
            for made in self._made(seed):
                self._known.update(made)
                self._file.writelines(_line(one, state) for one, state in made)
                self._file.flush()
        return self._known[seed]

    def __enter__(self) -> KeptStates:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _made(self, first: int) -> Iterator[list[tuple[int, bytes]]]:
        chunks = [range(first + CHUNK * worker, first + CHUNK * (worker + 1)) for worker in range(self._workers)]
        if self._pool is None:
            yield from ([(seed, self._environment.make_state(seed))] for seed in chunks[0])
        else:
            yield from self._pool.map(_make, chunks)

    def _read(self, head: dict[str, Any]) -> None:
        """Read what is in the file, and leave in it what is whole. What another environment has left there is refused."""
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        first = json.dumps(head) + "\n"
        if lines and lines[0].endswith("\n") and _json(lines[0]) != json.loads(first):
            self._file.close()
            raise TaskError(
                f"{self._path} was begun with other settings, or is damaged: {lines[0].strip()[:200]!r}",
                "go on with those, or remove the file",
            )
        whole = [line for line in lines[1:] if line.endswith("\n")]  # the last may have been cut off
        kept = {line: state for line in whole if (state := _state(line)) is not None}
        self.dropped = len(whole) - len(kept)
        self._known.update(kept.values())
        self._file.truncate(0)
        self._file.writelines([first, *kept])
        self._file.flush()


def _locked(path: Path) -> IO[str]:
    """The file, open to append to. The kernel lets go of the lock however the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="ascii", errors="replace", newline="\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "name another file with --out") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise TaskError(f"{path}: another process makes these states", "wait for it or stop it, or use another --out") from None
    return file


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _line(seed: int, state: bytes) -> str:
    said = f"{seed} {base64.b64encode(state).decode()}"
    return f"{said} {_digest(said)}\n"


def _state(line: str) -> tuple[int, bytes] | None:
    """The seed and the state of a line; None for one that is not as it was written."""
    said, _, digest = line.rstrip("\n").rpartition(" ")
    if digest != _digest(said):
        return None
    seed, _, text = said.partition(" ")
    try:
        return int(seed), base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ── in a process of its own ────────────────────────────────────────────────────────────────────────────────────────────

_here: MakesStates


def _prepare(made: Made) -> None:
    global _here
    _here = made.make()  # type: ignore[assignment] # it was looked at before


def _make(seeds: Sequence[int]) -> list[tuple[int, bytes]]:
    return [(seed, _here.make_state(seed)) for seed in seeds]
