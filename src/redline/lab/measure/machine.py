"""What this device can do, measured in the run that is judged by it, and how much memory a side takes."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

STREAM_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""On a GPU far more than its cache. A CPU's may hold the weights of a small model, so there it is about their size."""
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
MIN_REPEATS, MIN_SECONDS = 5, 0.3
Moment = float | torch.cuda.Event


@dataclass(slots=True, frozen=True)
class Machine:
    """The two rates that bound everything here, the best of several tries each."""

    bandwidth: float
    """Bytes per second, read or written."""
    flops: float
    """Floating-point operations per second of a large product in the compute dtype."""
    how: str
    """What was measured, in words."""


def free_memory(device: torch.device) -> None:
    """Give back what the sides before no longer use: those after it would find the device full."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    size, length = MATMUL_SIZE[device.type], STREAM_BYTES[device.type]
    product_s = _product_seconds(size, device, dtype)
    copy_s, read_s = _stream_seconds(length, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    bandwidth, flops = max(2 * length / copy_s, length / read_s), 2 * size**3 / product_s
    name = str(dtype).removeprefix("torch.")
    return Machine(
        bandwidth,
        flops,
        # four digits: `redline plan` reads them in saved results
        f"measured here: {bandwidth / 1e9:,.4g} GB/s (the better of a copy and a dot product of {length >> 20} MiB) and"
        f" {flops / 1e12:.4g} TFLOP/s ({size}³ {name} product)",
    )


def stream_rate(length: int, device: torch.device) -> float:
    """Bytes per second, read or written, of so many bytes: on a CPU a few may stay in its caches, and are faster there."""
    length = min(length, STREAM_BYTES[device.type])
    copy_s, read_s = _stream_seconds(length, device)
    return max(2 * length / copy_s, length / read_s)


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return best_seconds(lambda: torch.mm(a, b, out=out), device)


def _stream_seconds(length: int, device: torch.device) -> tuple[float, float]:
    """Seconds to copy that many bytes, and to read them. On a CPU a copy also reads what it overwrites; that is not counted."""
    half = -(-length // 8)
    source = torch.ones(2 * half, device=device)
    target = torch.empty_like(source)
    copy_s = best_seconds(lambda: target.copy_(source), device)
    return copy_s, best_seconds(lambda: torch.dot(source[:half], source[half:]), device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The best seconds of repeated calls, after one to warm up; by device events on CUDA, where the host only launches."""
    work()
    best, spent, repeats = math.inf, 0.0, 0
    while repeats < MIN_REPEATS or spent < MIN_SECONDS:
        seconds = _timed_on_cuda(work) if device.type == "cuda" else _timed(work)
        best, spent, repeats = min(best, seconds), spent + seconds, repeats + 1
    return best


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _timed_on_cuda(work: Callable[[], object]) -> float:
    device = torch.device("cuda")
    begin = moment(device)
    work()
    return seconds_between(begin, moment(device))


def moment(device: torch.device) -> Moment:
    """Now. An event on CUDA, so that taking the time does not make the host wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Waits until the device has come to `end`."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class MemoryMeter:
    """Bytes a side takes. Make it before the side; tell it when the side is made, and read it after a run.

    On CUDA it counts what torch has allocated, elsewhere resident memory: what stays once the side is made, and how much more
    there was at the peak of the run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._now()
        self._held = self._run_begin = 0

    def begin_run(self) -> None:
        """The side is made; what it needed only for that no longer counts."""
        self._run_begin = self._now()
        self._held = self._run_begin - self._before
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak()

    def peak_bytes(self) -> int:
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else _resident("VmHWM")
        return max(0, self._held) + max(0, peak - self._run_begin)

    @property
    def held_bytes(self) -> int:
        """What there was when the run began."""
        return max(0, self._held)

    def taken_bytes(self) -> int:
        """What there is now."""
        return self._now() - self._before

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.memory_allocated(self._device)
        _give_back_freed_memory()
        return _resident("VmRSS")


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    return _resident("VmRSS")


def take_peak(device: torch.device) -> int:
    """Most bytes at once since this was last called: what torch had allocated on CUDA, elsewhere resident memory."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = _resident("VmHWM")
    _reset_peak()
    return peak


def _give_back_freed_memory() -> None:
    """What was freed may still be resident: it would count for the side that freed it, not for the next one."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _resident(field: str) -> int:
    """A line of /proc/self/status, in bytes; where there is none, the largest resident size so far."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(f"{field}:"))


def _reset_peak() -> None:
    """Without the right to, the peak is that of the whole process: too large, never too small."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
