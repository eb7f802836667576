"""`redline env warm`: a file of states to begin attempts from, made in several processes.

States are made seed by seed and kept in FILE.part, a line each, as soon as they are there: a call that was interrupted begins
where the last one ended. When there are enough, the file appears as a whole and FILE.part goes.
"""

from __future__ import annotations

import base64
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


def warm(made: Made, wish: Wish, progress: Callable[[int], None]) -> Header:
    """Make the file. Blocks until it is there; `progress` is told how many states there are. Raises ConfigError for an
    environment that makes no states."""
    environment: Any = made.make()
    if not callable(getattr(environment, "make_state", None)) or not hasattr(environment, "state_kind"):
        raise ConfigError(f"{made.name} makes no states to begin from", "it needs `make_state(seed) -> bytes` and `state_kind`")
    part = wish.out.with_name(f"{wish.out.name}.part")
    with KeptStates(part, environment, made, wish) as kept:
        header = write_states(wish.out, kept, wish.states, seed=wish.seed, progress=progress)
    part.unlink(missing_ok=True)
    return header


class KeptStates:
    """Makes states ahead, in processes where there are several, and keeps them on the disk. Implements `MakesStates`."""

    def __init__(self, path: Path, environment: MakesStates, made: Made, wish: Wish) -> None:
        self._path, self._environment, self._workers = path, environment, wish.workers
        self._known: dict[int, bytes] = {}
        """By seed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._opened({"kind": environment.state_kind, "params": dict(made.params), "seed": made.seed})
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

    def _opened(self, head: dict[str, Any]) -> IO[str]:
        """The file to append to, after what is in it was read. What another environment has left there is refused."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last may have been cut off
        if whole and json.loads(whole[0]) != head:
            raise TaskError(
                f"{self._path} was begun with other settings: {whole[0].strip()}", "go on with those, or remove the file"
            )
        for line in whole[1:]:
            seed, _, text = line.partition(" ")
            self._known[int(seed)] = base64.b64decode(text)
        file = self._path.open("w")
        file.writelines(whole or [json.dumps(head) + "\n"])
        file.flush()
        return file


def _line(seed: int, state: bytes) -> str:
    return f"{seed} {base64.b64encode(state).decode()}\n"


# ── in a process of its own ────────────────────────────────────────────────────────────────────────────────────────────

_here: MakesStates


def _prepare(made: Made) -> None:
    global _here
    _here = made.make()  # type: ignore[assignment] # it was looked at before


def _make(seeds: Sequence[int]) -> list[tuple[int, bytes]]:
    return [(seed, _here.make_state(seed)) for seed in seeds]
