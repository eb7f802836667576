"""`redline bench weight-sync`: what it takes until the engine samples from the trainer's new weights.

Ours: the protocol and a transport of a run (`weight_sync/`). With `shared` the engine reads the trainer's own storage, and a
version is published by counting; with the others it is in another process, with a second set of weights (`weight_engine.py`).
Beside them two of the usual ways, written as plainly as can be: a second set of weights on the same device gets a copy of each
tensor; a safetensors file is written by one side, read by the other, and copied into the second set. After every round all
tensors of the second set are compared with the trainer's, which change from round to round; the time for that is not counted.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from redline.lab.bench.settings import WeightSyncSettings
from redline.lab.bench.weight_engines import APART, EngineApart
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.material.sized_weights import make_weights
from redline.lab.measure.disk import measure_disk
from redline.lab.measure.machine import best_seconds, stream_rate, synchronize
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.types import Completion, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync import SharedStorage, WeightProtocol
from redline.weight_sync.changes import BLOCK_BYTES
from redline.weight_sync.parts import PARTS

SHARED, COPY, FILE = "shared storage", "copy on the device", "safetensors file"


@dataclass(slots=True, frozen=True)
class Sync:
    seconds: float
    bytes_moved: int
    """Written to wherever the engine reads them, and to a file on the way."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part, where the transport tells; `pause` is how long the engine stood still."""


Rounds = Sequence[Mapping[str, Sync]]


class IdleEngine:
    """Between two steps at any time: what is measured is the protocol's own time. Implements `protocol.HeldEngine`."""

    def __init__(self) -> None:
        self.version: int | None = None

    def hold(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def apply(self, update: WeightUpdate) -> None:
        self.version = update.version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        raise NotImplementedError("it has weights and no network")


def ways_of(settings: WeightSyncSettings) -> list[str]:
    """The ways that are measured, ours first."""
    if settings.compare_all:
        return [SHARED, *APART, COPY, FILE]
    if settings.strategy is None:
        return [SHARED, COPY, FILE]
    return [SHARED if settings.strategy == "shared" else settings.strategy, COPY]


class Weights:
    """The trainer's, a second set that an engine of its own would have, and engines in other processes."""

    def __init__(self, settings: WeightSyncSettings, folder: Path, ways: Sequence[str] = (SHARED, COPY, FILE)) -> None:
        self._device = torch.device(settings.device)
        names = [way for way in ways if way in APART]
        copies = [way for way in ways if way in (COPY, FILE)]
        self.sized = make_weights(settings, 1 + bool(copies) + (FILE in ways) + 2 * len(names))
        self.trainer = dict(self.sized.tensors)
        self.engine = {name: torch.zeros_like(tensor) for name, tensor in self.trainer.items()} if copies else {}
        self._apart: dict[str, EngineApart] = {}
        self._syncs: dict[str, WeightProtocol] = {SHARED: WeightProtocol(SharedStorage(self.trainer), IdleEngine())}
        with ExitStack() as stack:  # an engine that does not start ends those that did
            for name in names:
                self._apart[name] = stack.enter_context(EngineApart(name, self.trainer))
                self._syncs[name] = WeightProtocol(self._apart[name].transport, IdleEngine())
            self._stack = stack.pop_all()
        self._file = folder / "weights.safetensors"
        self._version = 0

    @property
    def num_bytes(self) -> int:
        return self.sized.num_bytes

    def close(self) -> None:
        """End the other processes."""
        self._stack.close()

    def run(self, way: str, number: int) -> Sync:
        self._train(way)
        synchronize(self._device)
        started = time.perf_counter()
        if way in self._syncs:
            moved, parts = self._publish(way)
        else:
            others: dict[str, Callable[[], int]] = {COPY: self._copy, FILE: self._by_file}
            moved, parts = others[way](), {}
        synchronize(self._device)
        seconds = time.perf_counter() - started
        self._check(way)
        return Sync(seconds, moved, parts)

    def _check(self, way: str) -> None:
        if way in self._apart:
            self._apart[way].check(self.trainer)
        elif way != SHARED:
            assert all(torch.equal(self.engine[name], tensor) for name, tensor in self.trainer.items()), f"{way}: not the same"

    def _train(self, way: str) -> None:
        """Change every block of every tensor: one that was left out would show, and none may be."""
        self._version += 1
        with self._syncs[way].writing() if way in self._syncs else nullcontext():
            for tensor in self.trainer.values():
                tensor.view(-1)[:: BLOCK_BYTES // 8] = self._version % 256

    def _publish(self, way: str) -> tuple[int, dict[str, float]]:
        sync = self._syncs[way]
        update = sync.publish(WeightSet(self._version, self.trainer))
        sync.engine.apply(update)
        parts = dict(update.seconds)
        parts["pause"] -= parts.pop("write", 0.0)  # the trainer's own time, with any transport
        return update.bytes_moved, parts

    def _copy(self) -> int:
        torch._foreach_copy_(list(self.engine.values()), list(self.trainer.values()))
        return self.num_bytes

    def _by_file(self) -> int:
        from safetensors.torch import load_file, save_file

        save_file(self.trainer, self._file)
        found = load_file(self._file, device=str(self._device))
        torch._foreach_copy_(list(self.engine.values()), [found[name] for name in self.engine])
        return 2 * self.num_bytes


def measure(settings: WeightSyncSettings, console: Console) -> Measured:
    ways = ways_of(settings)
    with tempfile.TemporaryDirectory(prefix="redline-weight-sync-") as scratch, torch.no_grad(), ExitStack() as stack:
        weights = Weights(settings, Path(scratch), ways)
        stack.callback(weights.close)
        sides = {way: functools.partial(weights.run, way) for way in ways}
        warm_ups: dict[str, WarmUp] = {}
        for way, side in sides.items():
            _, warm_ups[way] = warm_up(side, max_seconds=settings.warmup_s)

        def tell(number: int, row: Mapping[str, Sync]) -> None:
            each = ", ".join(f"{way} {1e3 * sync.seconds:.3g} ms" for way, sync in row.items())
            console.print(f"round {number + 1}/{settings.pairs}: {each}", soft_wrap=True)

        rounds = interleave(sides, settings.pairs, settings.seed, tell)
        for way in ways:
            console.print(parts_line(way, rounds), soft_wrap=True)
        if weights.sized.note:
            console.print(weights.sized.note, soft_wrap=True)
        bounds = {way: _bound(way, weights, Path(scratch)) for way in ways}
    pairs = [(way, peer) for index, way in enumerate(ways) for peer in _peers_of(way, ways[index + 1 :])]
    results = [_result(rounds, way, peer, bounds[way], weights) for way, peer in pairs]
    return Measured(settings, results, warm_ups=warm_ups)


def parts_line(way: str, rounds: Rounds) -> str:
    """Every part of an update by its median, those that a way has; `pause` is how long the engine stood still."""
    names = [part for part in (*PARTS, "pause") if part in rounds[0][way].parts]
    parts = {part: statistics.median(row[way].parts[part] for row in rounds) for part in names}
    return f"{way}: {', '.join(f'{part} {1e3 * seconds:.3g} ms' for part, seconds in parts.items()) or 'one part'}"


def _peers_of(way: str, after: Sequence[str]) -> list[str | None]:
    """What a way is compared with: the two plain ways, where they were measured."""
    plain = [peer for peer in after if peer in (COPY, FILE)]
    return list(plain) or [None]


def _bound(way: str, weights: Weights, folder: Path) -> Bound:
    device, size, scale = torch.device(weights._device), weights.num_bytes, weights.sized.scale
    tensors = list(weights.trainer.values())
    if way == SHARED:
        look_s = best_seconds(lambda: [tensor.data_ptr() for tensor in tensors], torch.device("cpu"))
        why = f"no byte moves; what is left is to look whether all {len(tensors)} tensors are where they were"
        return Bound(scale * look_s, why)
    bandwidth = stream_rate(size, device)
    copy_s, how = 2 * size / bandwidth, f"{bandwidth / 1e9:.3g} GB/s of so many bytes, measured here"
    if way == FILE:
        rates = measure_disk(folder)
        why = f"{size:,} bytes written to a file, read from it, and copied; {rates.how}; {how}"
        return Bound(scale * (size / rates.write + size / rates.read + copy_s), why)
    return Bound(scale * copy_s, f"{size:,} bytes, read and written once; {how}")


def _result(rounds: Rounds, way: str, peer: str | None, bound: Bound, weights: Weights) -> Result:
    scale = weights.sized.scale
    own, figure = [scale * row[way].seconds for row in rounds], None
    if peer is not None:
        theirs = [scale * row[peer].seconds for row in rounds]
        comparison = compare(theirs, own)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    value, moved = statistics.median(own), round(scale * rounds[0][way].bytes_moved)
    parts = {name: scale * statistics.median(row[way].parts[name] for row in rounds) for name in rounds[0][way].parts}
    details = {
        "bytes_moved": moved,
        "bytes_per_s": moved / value,
        "mean_s": statistics.mean(own),
        "min_s": min(own),
        "max_s": max(own),
        **({"pause_s": parts["pause"]} if "pause" in parts else {}),
        **({"parts": parts} if len(parts) > 1 else {}),
        **({"beside": weights.sized.note} if weights.sized.note else {}),
    }
    samples = [{name: asdict(row[name]) for name in (way, peer) if name is not None} for row in rounds]
    return Result(way, value, "s", samples, bound, figure, larger_is_better=False, details=details)
