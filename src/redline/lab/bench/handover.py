"""One batch, from the side that sampled it to the side that trains on it: in this process, and to another one.

Ours is the trajectory store: groups are written to its Arrow file, and the other side maps that file. Everybody else's batch
is made into bytes, which stay here or go through a pipe, or into a file, which the other process opens. Files lie in shared
memory where there is any, so that a file is a way from memory to memory. A batch has arrived when every byte of it was looked
at.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from redline.buffer.store.segments import read_segment, segment_files
from redline.buffer.store.stored_groups import Run, pack_stored, stored_groups
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.errors import TrainingError
from redline.lab.peers import tensordicts
from redline.lab.peers.storage_sides import (
    FilePerStep,
    Step,
    batch_of_rows,
    from_padded,
    make_file_side,
    others,
    padded,
    rows_of,
)
from redline.types import TrainBatch

SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 120.0
"""For the other process to answer."""
Route = Literal["memory", "pipe", "file"]


class Codec(Protocol):
    def encode(self, groups: Step) -> bytes: ...

    def decode(self, data: bytes) -> TrainBatch: ...


# ── as bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class PickleCodec:
    """A list of dicts with arrays in them."""

    def encode(self, groups: Step) -> bytes:
        return pickle.dumps(rows_of(groups), protocol=pickle.HIGHEST_PROTOCOL)

    def decode(self, data: bytes) -> TrainBatch:
        return batch_of_rows(pickle.loads(data))


class PaddedCodec:
    """Tensors as wide as the longest attempt, with torch.save."""

    def encode(self, groups: Step) -> bytes:
        file = io.BytesIO()
        torch.save(padded(groups) | {"others": others(groups)}, file)
        return file.getvalue()

    def decode(self, data: bytes) -> TrainBatch:
        return from_padded(torch.load(io.BytesIO(data), weights_only=True))


class SafetensorsCodec:
    """The same tensors as a safetensors file would have them."""

    def encode(self, groups: Step) -> bytes:
        from safetensors.torch import save

        return save(padded(groups), {"others": json.dumps(others(groups))})

    def decode(self, data: bytes) -> TrainBatch:
        from safetensors.torch import load

        return from_padded(load(data))


class TensorDictCodec:
    """The same tensors in a pickled TensorDict, as it is or consolidated into one block of memory first."""

    def __init__(self, *, consolidated: bool) -> None:
        self._consolidated = consolidated

    def encode(self, groups: Step) -> bytes:
        return tensordicts.dumps(padded(groups), json.dumps(others(groups)), consolidated=self._consolidated)

    def decode(self, data: bytes) -> TrainBatch:
        return from_padded(tensordicts.loads(data))


CODECS: Mapping[str, Callable[[], Codec]] = {
    "pickle": PickleCodec,
    "padded": PaddedCodec,
    "safetensors": SafetensorsCodec,
    "tensordict": lambda: TensorDictCodec(consolidated=False),
    "consolidated": lambda: TensorDictCodec(consolidated=True),
}


# ── as files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class StoreFiles:
    """The file that the trajectory store writes groups to. Like that of a run, the store is open before they come, and whoever
    maps the file does so while it may still grow."""

    def __init__(self) -> None:
        self._store: TrajectoryStore | None = None

    def open(self, path: Path) -> None:
        self._store = TrajectoryStore(path)

    def save(self, path: Path, groups: Step) -> None:
        assert self._store is not None
        self._store.begin([group.index for group in groups], 0)
        self._store.add(*groups)

    def close(self) -> None:
        assert self._store is not None
        self._store.close()

    def load(self, path: Path) -> TrainBatch:
        runs = [Run(batch, 0, batch.num_rows) for batch in (read_segment(file.path) for file in segment_files(path))]
        numbers = np.concatenate([run.column("group") for run in runs])
        found, firsts = np.unique(numbers, return_index=True)
        order = found[np.argsort(firsts)].tolist()
        return pack_stored(
            stored_groups(order, [int((numbers == number).sum()) for number in order], runs), 0, keep_no_signal=True
        )


def file_side(name: str) -> StoreFiles | FilePerStep:
    return StoreFiles() if name == "redline" else make_file_side(name)


# ── from here to there ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Handed:
    """One batch that arrived."""

    seconds: float
    """From groups to a batch whose every byte was looked at by the receiver."""
    checksum: int
    num_bytes: int
    """Bytes that went through the pipe or lie in the file; 0 where none did."""


class Handover:
    """Hands batches over on every route. The other process starts once and waits."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder

    def hand(self, name: str, groups: Step, route: Route) -> Handed:
        if route == "file":
            return self._by_file(name, groups, self._there)
        if name == "redline":
            return self._by_file(name, groups, _received)
        return self._as_bytes(name, groups, self._there if route == "pipe" else _received)

    def _as_bytes(self, name: str, groups: Step, receive: Callable[[str, bytes], int]) -> Handed:
        codec = CODECS[name]()
        started = time.perf_counter()
        data = codec.encode(groups)
        checksum = receive(name, data)
        return Handed(time.perf_counter() - started, checksum, len(data))

    def _by_file(self, name: str, groups: Step, receive: Callable[[str, bytes], int]) -> Handed:
        path, side = self._folder / "batch", file_side(name)
        if isinstance(side, StoreFiles):
            side.open(path)
        try:
            started = time.perf_counter()
            side.save(path, groups)
            checksum = receive(f"file:{name}", str(path).encode())
            seconds = time.perf_counter() - started
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            return Handed(seconds, checksum, sum(file.stat().st_blocks * 512 for file in files))
        finally:
            if isinstance(side, StoreFiles):
                side.close()
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _there(self, name: str, data: bytes) -> int:
        self._connection.send_bytes(name.encode())
        self._connection.send_bytes(data)
        if not self._connection.poll(PATIENCE_S):
            raise TrainingError(f"{name}: the other process did not answer in {PATIENCE_S:.0f} s", "hand over fewer groups")
        return int(self._connection.recv_bytes())


@contextmanager
def handing_over() -> Iterator[Handover]:
    """The other process ends with the block."""
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_receive_all, args=(theirs,), daemon=True)
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="redline-handover-", dir=shared) as folder:
        other.start()
        theirs.close()
        try:
            yield Handover(ours, Path(folder))
        finally:
            ours.close()  # which it takes as the end
            other.join(PATIENCE_S)
            if other.is_alive():
                other.kill()
                other.join()


def _receive_all(connection: Connection) -> None:
    """What the other process does."""
    torch.set_num_threads(1)
    while True:
        try:
            name = connection.recv_bytes().decode()
        except EOFError:
            return
        connection.send_bytes(str(_received(name, connection.recv_bytes())).encode())


def _received(name: str, data: bytes) -> int:
    kind, _, side = name.rpartition(":")
    return looked_at(file_side(side).load(Path(data.decode())) if kind else CODECS[name]().decode(data))


def looked_at(batch: TrainBatch) -> int:
    """A view costs nothing until somebody looks."""
    tokens, logprobs = np.asarray(batch.tokens), np.asarray(batch.old_logprobs)
    return int(tokens.sum(dtype=np.int64)) + int(batch.loss_mask.sum()) + round(float(logprobs.sum()))
