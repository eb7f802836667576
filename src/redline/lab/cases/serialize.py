"""`redline bench serialize`: the trajectory store against pickled dicts, padded tensors and what else keeps arrays on disk.

Every side stores the same steps of long-tailed attempts and gives each step back as a `TrainBatch`. Ours stores each group as
it comes, with an index of what became of it; the others store a step at a time and keep no index. Nobody waits for the disk:
what is written is in the page cache, from which it is read again.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from redline.lab.contest import OURS
from redline.lab.document import Bound, Measured, PeerFigure, Result
from redline.lab.pairs import interleave
from redline.lab.settings import SerializeSettings
from redline.lab.statistics import compare
from redline.lab.storage_sides import StorageSide, least_bytes, make_pool, make_side, make_steps
from redline.types import TrainBatch, TrajectoryGroup

WINDOW = 1000
"""Attempts at the beginning and at the end whose times are compared."""
PROBE_BYTES = 1 << 26


@dataclass(slots=True, frozen=True)
class StorageRun:
    """One side with one number of attempts."""

    write_s: float
    read_s: float
    """All steps as batches, every byte of them looked at."""
    first_batch_s: float
    num_bytes: int
    """On the disk."""
    growth: float
    """Time of the last `WINDOW` attempts over that of the first."""
    checksum: int
    """Of all tokens: the sides agree on it."""


Rounds = Sequence[Mapping[str, StorageRun]]


def measure(settings: SerializeSettings, console: Console) -> Measured:
    pool, peers = make_pool(settings), list(settings.peers or ())
    sides = {name: make_side(name, settings) for name in (OURS, *peers)}
    with tempfile.TemporaryDirectory(prefix="redline-serialize-") as scratch:
        rates = _disk_rates(Path(scratch))
        console.print(rates.how, style="dim")
        results: list[Result] = []
        for count in settings.trajectories:
            rounds = _rounds(sides, pool, _num_steps(settings, count), settings, Path(scratch), console)
            results += _results(rounds, count, _least(pool, settings, count), rates, peers, settings)
    return Measured(settings, results, {peer: _version(peer) for peer in peers})


def _num_steps(settings: SerializeSettings, count: int) -> int:
    return max(1, round(count / (settings.group_size * settings.groups_per_step)))


def _rounds(
    sides: Mapping[str, StorageSide],
    pool: Sequence[TrajectoryGroup],
    num_steps: int,
    settings: SerializeSettings,
    scratch: Path,
    console: Console,
) -> Rounds:
    window = max(1, WINDOW // (settings.group_size * settings.groups_per_step))

    def round_of(name: str) -> Callable[[int], StorageRun]:
        def run(number: int) -> StorageRun:
            steps = make_steps(pool, num_steps, settings.groups_per_step)
            return _run(sides[name], steps, scratch / "store", window)

        return run

    def tell(number: int, row: Mapping[str, StorageRun]) -> None:
        assert len({run.checksum for run in row.values()}) == 1, "the sides gave back other tokens"
        each = ", ".join(f"{name} {run.write_s:.2f} + {run.read_s:.2f}" for name, run in row.items())
        console.print(f"{num_steps} steps, round {number + 1}/{settings.pairs}: {each} s", soft_wrap=True)

    for name in sides:
        round_of(name)(0)  # to warm up
    return interleave({name: round_of(name) for name in sides}, settings.pairs, settings.seed + num_steps, tell)


def _run(side: StorageSide, steps: Any, folder: Path, window: int) -> StorageRun:
    try:
        *write, close_s = side.write(folder, steps)
        num_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        started = time.perf_counter()
        checksum = sum(_looked_at(batch) for batch in side.batches(folder))
        read_s = time.perf_counter() - started
        started = time.perf_counter()
        _looked_at(side.last_batch(folder))
        first_batch_s = time.perf_counter() - started
        growth = sum(write[-window:]) / sum(write[:window])
        return StorageRun(sum(write) + close_s, read_s, first_batch_s, num_bytes, growth, checksum)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _looked_at(batch: TrainBatch) -> int:
    """A view costs nothing until somebody looks."""
    return int(batch.tokens.sum(dtype=np.int64)) + int(batch.loss_mask.sum()) + round(float(batch.old_logprobs.sum()))


# ── bounds ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class _Rates:
    """Bytes per second, into the page cache and out of it."""

    write: float
    read: float

    @property
    def how(self) -> str:
        return (
            f"measured here: {self.write / 1e9:.2f} GB/s written to a file at once,"
            f" {self.read / 1e9:.2f} GB/s summed from a mapped one"
        )


def _disk_rates(folder: Path) -> _Rates:
    path, data = folder / "probe", np.ones(PROBE_BYTES // 4, dtype=np.int32)
    write_s, read_s = [], []
    for _ in range(5):
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(data.data)
        write_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        np.memmap(path, dtype=np.int32, mode="r").sum(dtype=np.int64)
        read_s.append(time.perf_counter() - started)
        os.unlink(path)
    return _Rates(PROBE_BYTES / min(write_s), PROBE_BYTES / min(read_s))


def _least(pool: Sequence[TrajectoryGroup], settings: SerializeSettings, count: int) -> int:
    """Bytes that there are to store."""
    steps = make_steps(pool, _num_steps(settings, count), settings.groups_per_step)
    return sum(least_bytes(group) for groups in steps for group in groups)


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _results(
    rounds: Rounds, count: int, least: int, rates: _Rates, peers: Sequence[str], settings: SerializeSettings
) -> list[Result]:
    stored = _num_steps(settings, count) * settings.group_size * settings.groups_per_step
    why = f"{least:,} bytes of tokens, logprobs and text"
    step = least / _num_steps(settings, count)
    bounds = {
        "write": Bound(least / rates.write, f"{why} at {rates.write / 1e9:.2f} GB/s"),
        "read": Bound(least / rates.read, f"{why} at {rates.read / 1e9:.2f} GB/s"),
        "first batch": Bound(step / rates.read, f"those of a step at {rates.read / 1e9:.2f} GB/s"),
        "size": Bound(least, why),
    }
    values: dict[str, Callable[[StorageRun], float]] = {
        "write": lambda run: run.write_s,
        "read": lambda run: run.read_s,
        "first batch": lambda run: run.first_batch_s,
        "size": lambda run: run.num_bytes,
    }
    results = [
        _result(rounds, f"{stored:,}: {name}", values[name], "bytes" if name == "size" else "s", bounds[name], peer)
        for name in bounds
        for peer in (list[str | None](peers) or [None])
    ]
    if stored > 2 * WINDOW:
        flat = Bound(1, f"the last {WINDOW:,} attempts take as long as the first")
        results.append(_result(rounds, f"{stored:,}: growth of write", lambda run: run.growth, "×", flat, None))
    return results


def _result(
    rounds: Rounds, name: str, value: Callable[[StorageRun], float], unit: str, bound: Bound, peer: str | None
) -> Result:
    ours, figure = [value(row[OURS]) for row in rounds], None
    if peer is not None:
        theirs = [value(row[peer]) for row in rounds]
        comparison = compare(theirs, ours)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    samples = [{side: asdict(row[side]) for side in (OURS, peer) if side is not None} for row in rounds]
    return Result(name, statistics.median(ours), unit, samples, bound, figure, larger_is_better=False)


def _version(peer: str) -> str:
    from importlib.metadata import version
    from platform import python_version

    packages = {"padded": "torch", "safetensors": "safetensors", "tensordict": "tensordict", "consolidated": "tensordict"}
    return version(packages[peer]) if peer in packages else python_version()
