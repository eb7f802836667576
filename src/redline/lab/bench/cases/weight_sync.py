"""`redline bench weight-sync`: what it takes until the engine samples from the trainer's new weights.

Three ways. Ours: the protocol and the transport of a run (`weight_sync/`), where the engine reads the trainer's own storage and
a version is published by counting. Beside it two of the usual ways, written as plainly as can be: a second set of weights on
the same device gets a copy of each tensor; a safetensors file is written by one side, read by the other, and copied into the
second set. After every round of these all tensors of the second set are compared with the trainer's, which change from round to
round; the time for that is not counted.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from redline.lab.bench.settings import WeightSyncSettings
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.material.networks import make_network
from redline.lab.measure.disk import DiskRates, measure_disk
from redline.lab.measure.machine import best_seconds, stream_rate, synchronize
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.types import Completion, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync import SharedStorage, WeightProtocol

SHARED, COPY, FILE = "shared storage", "copy on the device", "safetensors file"


@dataclass(slots=True, frozen=True)
class Sync:
    seconds: float
    bytes_moved: int
    """Written to wherever the engine reads them, and to a file on the way."""


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


class Weights:
    """The trainer's, and a second set that an engine of its own would have."""

    def __init__(self, settings: WeightSyncSettings, folder: Path) -> None:
        self._device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        decoder = make_network(settings.model, self._device, dtype, settings.seed).decoder
        self.trainer = {name: tensor.detach() for name, tensor in decoder.named_parameters()}
        self.engine = {name: torch.zeros_like(tensor) for name, tensor in self.trainer.items()}
        self._engine = IdleEngine()
        self._sync = WeightProtocol(SharedStorage(self.trainer), self._engine)
        self._file = folder / "weights.safetensors"
        self._version = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.trainer.values())

    def run(self, way: str, number: int) -> Sync:
        ways: dict[str, Callable[[], int]] = {SHARED: self._share, COPY: self._copy, FILE: self._by_file}
        with self._sync.writing():
            self._train()
        synchronize(self._device)
        started = time.perf_counter()
        moved = ways[way]()
        synchronize(self._device)
        seconds = time.perf_counter() - started
        if way == SHARED:
            assert self._engine.version == self._version
        else:
            assert all(torch.equal(self.engine[name], tensor) for name, tensor in self.trainer.items()), f"{way}: not the same"
        return Sync(seconds, moved)

    def _train(self) -> None:
        """Every tensor changes, so that a tensor that was left out would show."""
        self._version += 1
        for tensor in self.trainer.values():
            tensor.view(-1)[0] = self._version % 256

    def _share(self) -> int:
        update = self._sync.publish(WeightSet(self._version, self.trainer))
        self._sync.engine.apply(update)
        return update.bytes_moved

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
    with tempfile.TemporaryDirectory(prefix="redline-weight-sync-") as scratch, torch.no_grad():
        rates = measure_disk(Path(scratch))
        weights = Weights(settings, Path(scratch))
        sides = {way: functools.partial(weights.run, way) for way in (SHARED, COPY, FILE)}
        warm_ups: dict[str, WarmUp] = {}
        for way, side in sides.items():
            _, warm_ups[way] = warm_up(side, max_seconds=settings.warmup_s)

        def tell(number: int, row: Mapping[str, Sync]) -> None:
            each = ", ".join(f"{way} {1e3 * sync.seconds:.3g} ms" for way, sync in row.items())
            console.print(f"round {number + 1}/{settings.pairs}: {each}", soft_wrap=True)

        rounds = interleave(sides, settings.pairs, settings.seed, tell)
        bounds = _bounds(weights, stream_rate(weights.num_bytes, torch.device(settings.device)), rates)
    results = [
        _result(rounds, SHARED, COPY, bounds[SHARED]),
        _result(rounds, SHARED, FILE, bounds[SHARED]),
        _result(rounds, COPY, FILE, bounds[COPY]),
        _result(rounds, FILE, None, bounds[FILE]),
    ]
    return Measured(settings, results, warm_ups=warm_ups)


def _bounds(weights: Weights, bandwidth: float, rates: DiskRates) -> dict[str, Bound]:
    size, tensors = weights.num_bytes, list(weights.trainer.values())
    look_s = best_seconds(lambda: [tensor.data_ptr() for tensor in tensors], torch.device("cpu"))
    copy_s, how = 2 * size / bandwidth, f"{bandwidth / 1e9:.3g} GB/s of so many bytes, measured here"
    return {
        SHARED: Bound(look_s, f"no byte moves; what is left is to look whether all {len(tensors)} tensors are where they were"),
        COPY: Bound(copy_s, f"{size:,} bytes, read and written; {how}"),
        FILE: Bound(
            size / rates.write + size / rates.read + copy_s,
            f"{size:,} bytes written to a file, read from it, and copied; {rates.how}; {how}",
        ),
    }


def _result(rounds: Rounds, way: str, peer: str | None, bound: Bound) -> Result:
    own, figure = [row[way].seconds for row in rounds], None
    if peer is not None:
        theirs = [row[peer].seconds for row in rounds]
        comparison = compare(theirs, own)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    value, moved = statistics.median(own), rounds[0][way].bytes_moved
    return Result(
        way,
        value,
        "s",
        [{name: asdict(row[name]) for name in (way, peer) if name is not None} for row in rounds],
        bound,
        figure,
        larger_is_better=False,
        details={"bytes_moved": moved, "bytes_per_s": moved / value},
    )
