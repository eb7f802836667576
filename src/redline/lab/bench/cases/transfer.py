"""`redline bench transfer`: bytes between host and device, and what a copy costs that runs beside products.

On CUDA every size goes to the device and back in four ways: from pageable and from pinned memory, with and without
`non_blocking`. Each sample has two times: until the bytes are there, and until the host may go on. Without a CUDA device there
is nowhere to go, and host memory is copied to host memory: to a place that is used again and again, and to fresh pages.

Then a copy and products of about the same length run one after the other, and at the same time: on CUDA in two streams, on the
CPU in two threads of one core each.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from torch import Tensor

from redline.errors import ConfigError
from redline.lab.bench.settings import TransferSettings
from redline.lab.bench.table import quantity
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.measure.clocks import read_clocks
from redline.lab.measure.machine import MATMUL_SIZE, best_seconds, device_name, stream_rate, synchronize
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.lab.plan.devices import find_device

LEAST_BYTES = 2**24
"""The least bytes of one sample: smaller copies are repeated, since a clock cannot time one."""
MOST_COPIES = 4096
"""Copies of one sample: of few bytes each takes as long as the call."""
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Generation → bytes per second of a lane, each way, after encoding."""
TOGETHER, IN_TURN = "together", "one after the other"
Copy = Callable[[], object]


@dataclass(slots=True, frozen=True)
class Way:
    """How bytes get from one place to another."""

    direction: str
    name: str
    copy: Copy


@dataclass(slots=True, frozen=True)
class Copied:
    seconds: float
    """Seconds of one copy, until its bytes are there."""
    host_s: float
    """Seconds of one copy, until the host may go on."""
    bytes_per_s: float


def measure(settings: TransferSettings, console: Console) -> Measured:
    device = torch.device(settings.device)
    results: list[Result] = []
    warm_ups: dict[str, WarmUp] = {}
    if device.type != "cuda":
        console.print("there is no CUDA device: host memory is copied to host memory", style="dim")
    for size in settings.sizes:
        results += _copies(settings, size, device, warm_ups, console)
    results += _overlap(settings, device, warm_ups, console)
    return Measured(settings, results, warm_ups=warm_ups)


# ── by size ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ways(size: int, device: torch.device) -> list[Way]:
    """The first of each direction is ours: what the trainer's staging does."""
    pageable = torch.ones(size, dtype=torch.uint8)
    if device.type != "cuda":
        there = torch.ones_like(pageable)
        return [
            Way("host to host", "to pages in use", lambda: there.copy_(pageable)),
            Way("host to host", "to fresh pages", lambda: pageable.clone()),
        ]
    pinned, on_device = pageable.pin_memory(), pageable.to(device)
    found = []
    for direction, to_device in (("to the device", True), ("to the host", False)):
        for kind, host in (("pinned", pinned), ("pageable", pageable)):
            for non_blocking in (True, False):
                source, target = (host, on_device) if to_device else (on_device, host)
                name = f"{kind}, {'non_blocking' if non_blocking else 'blocking'}"
                found.append(Way(direction, name, functools.partial(target.copy_, source, non_blocking=non_blocking)))
    return found


def _copies(
    settings: TransferSettings,
    size: int,
    device: torch.device,
    warm_ups: dict[str, WarmUp],
    console: Console,
) -> list[Result]:
    bound = _link(device, size)
    every, repeats = ways(size, device), max(1, min(MOST_COPIES, LEAST_BYTES // size))

    def run(way: Way, number: int) -> Copied:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            way.copy()
        host_s = time.perf_counter() - started
        synchronize(device)
        seconds = time.perf_counter() - started
        return Copied(seconds / repeats, host_s / repeats, repeats * size / seconds)

    sides = {f"{way.direction}: {way.name}": functools.partial(run, way) for way in every}
    label = quantity(size, "bytes")
    for name, side in sides.items():
        _, warm_ups[f"{label}, {name}"] = warm_up(side, max_seconds=settings.warmup_s)
    rounds = interleave(sides, settings.pairs, settings.seed, lambda *_: None)
    results = []
    for direction in dict.fromkeys(way.direction for way in every):
        ours, *others = (f"{way.direction}: {way.name}" for way in every if way.direction == direction)
        results += [_copied(rounds, f"{label} {ours}", ours, other, bound) for other in others]
    console.print(f"{label}: " + ", ".join(f"{r.peer and r.peer.ratio:.2f}×" for r in results), style="dim")
    return results


def _copied(rounds: Sequence[Mapping[str, Copied]], name: str, ours: str, peer: str, bound: Bound) -> Result:
    own, theirs = ([row[side].bytes_per_s / 1e9 for row in rounds] for side in (ours, peer))
    comparison = compare(own, theirs)
    figure = PeerFigure(peer.partition(": ")[2], statistics.median(theirs), comparison.ratio, comparison)
    samples = [{side: asdict(row[side]) for side in (ours, peer)} for row in rounds]
    details = {
        "host_s": statistics.median(row[ours].host_s for row in rounds),
        "peer_host_s": statistics.median(row[peer].host_s for row in rounds),
    }
    return Result(name, statistics.median(own), "GB/s", samples, bound, figure, details=details)


def _link(device: torch.device, size: int) -> Bound:
    """GB/s of what copies go through, and how that is known."""
    if device.type != "cuda":
        rate = stream_rate(size, device) / 1e9
        why = f"no CUDA device: each byte is read and written in host memory, at {rate:.3g} GB/s for so many (measured here)"
        return Bound(rate / 2, why)
    index = torch.cuda.current_device()
    told = read_clocks()["gpus"]
    gpu = told[index] if index < len(told) else {}
    lane = PCIE_LANE.get(int(gpu.get("pcie_generation", 0)))
    if lane and gpu.get("pcie_lanes"):
        lanes = int(gpu["pcie_lanes"])
        why = f"PCIe {int(gpu['pcie_generation'])} with {lanes} lanes of {lane / 1e9:.3g} GB/s each way"
        return Bound(lanes * lane / 1e9, why)
    try:
        known = find_device(device_name(device))
    except ConfigError as error:
        raise ConfigError(
            f"redline bench transfer: neither the driver nor the table knows the link of {device_name(device)}",
            "make nvidia-smi available",
        ) from error
    rate = known.host_bandwidth / 1e9
    return Bound(rate, f"{rate:.0f} GB/s each way: what pinned copies of a {known.name} reach")


# ── beside products ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Beside:
    """Two kinds of work that may run at the same time."""

    copy: Callable[[], None]
    compute: Callable[[], None]
    both: Callable[[], None]
    """Begins both and waits for neither, on CUDA; on a CPU returns when both are done."""


def _overlap(settings: TransferSettings, device: torch.device, warm_ups: dict[str, WarmUp], console: Console) -> list[Result]:
    results = []
    kinds = ("pinned", "pageable") if device.type == "cuda" else ("host to host",)
    for kind in kinds:
        beside = (
            _on_two_streams(settings.overlap_bytes, device, pinned=kind == "pinned")
            if device.type == "cuda"
            else _on_two_threads(settings.overlap_bytes)
        )

        def timed(work: Callable[[], None], number: int) -> float:
            synchronize(device)
            started = time.perf_counter()
            work()
            synchronize(device)
            return time.perf_counter() - started

        work = {"copy": beside.copy, "products": beside.compute, TOGETHER: beside.both}
        sides = {name: functools.partial(timed, each) for name, each in work.items()}
        for name, side in sides.items():
            _, warm_ups[f"{kind}, {name}"] = warm_up(side, max_seconds=settings.warmup_s)
        rounds = interleave(sides, settings.pairs, settings.seed, lambda *_: None)
        results.append(_overlapped(rounds, kind, settings.overlap_bytes))
        console.print(f"{results[-1].name}: {results[-1].peer and results[-1].peer.ratio:.2f}×", style="dim")
    return results


def _on_two_streams(size: int, device: torch.device, *, pinned: bool) -> Beside:
    source = torch.ones(size, dtype=torch.uint8)
    source = source.pin_memory() if pinned else source
    target = torch.empty(size, dtype=torch.uint8, device=device)
    a, b = (torch.randn(MATMUL_SIZE["cuda"], MATMUL_SIZE["cuda"], device=device, dtype=torch.bfloat16) for _ in range(2))
    out, stream = torch.empty_like(a), torch.cuda.Stream(device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    compute = _as_long_as(copy, lambda: torch.mm(a, b, out=out), device)

    def both() -> None:
        compute()  # launched first, since a copy that blocks would hold the launches up
        copy()

    return Beside(copy, compute, both)


def _on_two_threads(size: int) -> Beside:
    device = torch.device("cpu")
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    a, b = (torch.randn(MATMUL_SIZE["cpu"] // 4, MATMUL_SIZE["cpu"] // 4) for _ in range(2))
    out = torch.empty_like(a)
    copy = _on_one_core(lambda: target.copy_(source))
    product = _on_one_core(lambda: torch.mm(a, b, out=out))
    compute = _on_one_core(_as_long_as(copy, product, device))

    def both() -> None:
        beside = threading.Thread(target=copy)
        beside.start()
        compute()
        beside.join()

    return Beside(copy, compute, both)


def _on_one_core(work: Callable[[], Tensor | None]) -> Callable[[], None]:
    """torch's number of threads belongs to the thread that asks for it."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            work()
        finally:
            torch.set_num_threads(threads)

    return run


def _as_long_as(copy: Callable[[], None], product: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """So many products that they take about as long as the copy: then overlap can save the most."""

    def whole_copy() -> None:
        copy()
        synchronize(device)

    count = max(1, round(best_seconds(whole_copy, torch.device("cpu")) / best_seconds(product, device)))

    def run() -> None:
        for _ in range(count):
            product()

    return run


def _overlapped(rounds: Sequence[Mapping[str, float]], kind: str, size: int) -> Result:
    together, in_turn = [row[TOGETHER] for row in rounds], [row["copy"] + row["products"] for row in rounds]
    comparison = compare(in_turn, together)
    longer = statistics.median(max(row["copy"], row["products"]) for row in rounds)
    parts = {name: statistics.median(row[name] for row in rounds) for name in ("copy", "products")}
    return Result(
        f"{quantity(size, 'bytes')} {kind}, beside products",
        statistics.median(together),
        "s",
        [dict(row) for row in rounds],
        Bound(longer, "the longer of the two: the other can all be done meanwhile"),
        PeerFigure(IN_TURN, statistics.median(in_turn), comparison.ratio, comparison),
        larger_is_better=False,
        details={"parts": parts},
    )
