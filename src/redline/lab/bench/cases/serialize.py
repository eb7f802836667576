"""`redline bench serialize`: the trajectory store against pickled dicts, padded tensors and what else keeps arrays on disk.

Every side stores the same steps of long-tailed attempts, a step at a time, and gives each back as a `TrainBatch`. Ours has an
index of what became of every group; the others have none. Ours also stores each group as it comes, which is what rollouts
beside the trainer do. No side waits for the disk: what is written is in the page cache, from which it is read again. Then one
batch is handed over, within this process and to another one (`lab/bench/handover.py`).
"""

from __future__ import annotations

import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from redline.lab.bench.handover import Handed, Handover, Route, handing_over, looked_at
from redline.lab.bench.settings import SerializeSettings
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.measure.disk import DiskRates, measure_disk
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.lab.peers.contest import OURS
from redline.lab.peers.storage_sides import ONE_BY_ONE, StorageSide, least_bytes, make_pool, make_side, make_steps
from redline.types import TrajectoryGroup

ROUTES: Mapping[Route, str] = {
    "memory": "to the same process",
    "pipe": "to another process, peers by pipe",
    "file": "to another process by file",
}
WINDOW = 1000
"""Attempts at the beginning and at the end whose times are compared: as many whole steps as they hold."""


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
    """The sum of all tokens: the sides agree on it."""


Rounds = Sequence[Mapping[str, StorageRun]]


def measure(settings: SerializeSettings, console: Console) -> Measured:
    pool, peers = make_pool(settings), list(settings.peers or ())
    sides = {name: make_side(name, settings) for name in (OURS, ONE_BY_ONE, *peers)}
    with tempfile.TemporaryDirectory(prefix="redline-serialize-") as scratch:
        rates = measure_disk(Path(scratch))
        console.print(rates.how, style="dim")
        results: list[Result] = []
        warm_ups: dict[str, WarmUp] = {}
        for count in settings.trajectories:
            rounds = _rounds(sides, pool, _num_steps(settings, count), settings, Path(scratch), console, warm_ups)
            results += _results(rounds, count, _least(pool, settings, count), rates, peers, settings)
        results += _handed_over(pool, peers, rates, settings, console, warm_ups)
    return Measured(settings, results, {peer: _version(peer) for peer in peers}, warm_ups)


def _num_steps(settings: SerializeSettings, count: int) -> int:
    return max(1, round(count / (settings.group_size * settings.groups_per_step)))


def _window(settings: SerializeSettings) -> int:
    """Steps at the beginning and at the end whose times are compared."""
    return max(1, WINDOW // (settings.group_size * settings.groups_per_step))


def _rounds(
    sides: Mapping[str, StorageSide],
    pool: Sequence[TrajectoryGroup],
    num_steps: int,
    settings: SerializeSettings,
    scratch: Path,
    console: Console,
    warm_ups: dict[str, WarmUp],
) -> Rounds:
    window = _window(settings)

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
        _, warm_ups[f"{num_steps} steps: {name}"] = warm_up(round_of(name), max_seconds=settings.warmup_s)
    return interleave({name: round_of(name) for name in sides}, settings.pairs, settings.seed + num_steps, tell)


def _run(side: StorageSide, steps: Any, folder: Path, window: int) -> StorageRun:
    try:
        *write, close_s = side.write(folder, steps)
        num_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        started = time.perf_counter()
        checksum = sum(looked_at(batch) for batch in side.batches(folder))
        read_s = time.perf_counter() - started
        started = time.perf_counter()
        looked_at(side.last_batch(folder))
        first_batch_s = time.perf_counter() - started
        growth = sum(write[-window:]) / sum(write[:window])
        return StorageRun(sum(write) + close_s, read_s, first_batch_s, num_bytes, growth, checksum)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ── from one process to another ────────────────────────────────────────────────────────────────────────────────────────


def _handed_over(
    pool: Sequence[TrajectoryGroup],
    peers: Sequence[str],
    rates: DiskRates,
    settings: SerializeSettings,
    console: Console,
    warm_ups: dict[str, WarmUp],
) -> list[Result]:
    if not settings.handed_over:
        return []
    results = []
    with handing_over() as handover:
        for count in settings.handed_over:
            [groups] = make_steps(pool, 1, count)
            sides: dict[str, Callable[[int], Handed]] = {
                f"{name}, {route}": functools.partial(_hand, handover, name, groups, route)
                for name in (OURS, *peers)
                for route in ROUTES
                if not (name == OURS and route == "pipe")
            }
            for name, side in sides.items():
                _, warm_ups[f"{count} groups: {name}"] = warm_up(side, max_seconds=settings.warmup_s)

            def tell(number: int, row: Mapping[str, Handed], count: int = count) -> None:
                assert len({handed.checksum for handed in row.values()}) == 1, "the sides gave back other tokens"
                each = ", ".join(f"{name} {1e3 * handed.seconds:.1f}" for name, handed in row.items())
                console.print(f"{count} groups, round {number + 1}/{settings.pairs}: {each} ms", soft_wrap=True)

            rounds = interleave(sides, settings.pairs, settings.seed + count, tell)
            least = sum(least_bytes(group) for group in groups)
            value, why = least / rates.write + least / rates.read, f"{least:,} bytes written and read once; {rates.how}"
            attempts = f"{count * settings.group_size:,} attempts"
            for peer, route in ((peer, route) for route in ROUTES for peer in (list[str | None](peers) or [None])):
                ours = f"{OURS}, {'memory' if route == 'memory' else 'file'}"
                name = f"{attempts} {ROUTES[route]}"
                results.append(_handed(rounds, name, ours, peer and f"{peer}, {route}", Bound(value, why)))
    return results


def _hand(handover: Handover, name: str, groups: Sequence[TrajectoryGroup], route: Route, number: int) -> Handed:
    return handover.hand(name, groups, route)


def _handed(rounds: Sequence[Mapping[str, Handed]], name: str, ours: str, peer: str | None, bound: Bound) -> Result:
    seconds, figure = [row[ours].seconds for row in rounds], None
    if peer is not None:
        theirs = [row[peer].seconds for row in rounds]
        comparison = compare(theirs, seconds)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    samples = [{side: asdict(row[side]) for side in (ours, peer) if side is not None} for row in rounds]
    return Result(name, statistics.median(seconds), "s", samples, bound, figure, larger_is_better=False)


# ── bounds ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _least(pool: Sequence[TrajectoryGroup], settings: SerializeSettings, count: int) -> int:
    """Bytes that there are to store."""
    steps = make_steps(pool, _num_steps(settings, count), settings.groups_per_step)
    return sum(least_bytes(group) for groups in steps for group in groups)


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _results(
    rounds: Rounds, count: int, least: int, rates: DiskRates, peers: Sequence[str], settings: SerializeSettings
) -> list[Result]:
    step_size = settings.group_size * settings.groups_per_step
    stored = _num_steps(settings, count) * step_size
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
    results.append(
        _result(rounds, f"{stored:,}: write group by group", values["write"], "s", bounds["write"], None, ONE_BY_ONE)
    )
    if stored > 2 * WINDOW:
        flat = Bound(1, f"the last {_window(settings) * step_size:,} attempts take as long as the first")
        results.append(_result(rounds, f"{stored:,}: growth of write", lambda run: run.growth, "×", flat, None))
    return results


def _result(
    rounds: Rounds,
    name: str,
    value: Callable[[StorageRun], float],
    unit: str,
    bound: Bound,
    peer: str | None,
    side: str = OURS,
) -> Result:
    ours, figure = [value(row[side]) for row in rounds], None
    if peer is not None:
        theirs = [value(row[peer]) for row in rounds]
        comparison = compare(theirs, ours)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    samples = [{each: asdict(row[each]) for each in (side, peer) if each is not None} for row in rounds]
    return Result(name, statistics.median(ours), unit, samples, bound, figure, larger_is_better=False)


def _version(peer: str) -> str:
    from importlib.metadata import version
    from platform import python_version

    packages = {"padded": "torch", "safetensors": "safetensors", "tensordict": "tensordict", "consolidated": "tensordict"}
    return version(packages[peer]) if peer in packages else python_version()
