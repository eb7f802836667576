"""Top-k and top-p on a GPU: milliseconds to find where they end, and of a whole sample, by sorting and by kernels.

    PYTHONPATH=src python benchmarks/kernels/top_filters.py [--rows 1,64,512] [--vocabulary 151936]

Rows of normal logits in bfloat16 at temperature 0.8, all with the same filter, inside a CUDA graph as the engine has them; the
median of 20 replays. Both ways sample from the same numbers: how many of the tokens are equal is printed beside the times,
and where some differ, how many rows keep another number of tokens. The bound is one read of the float32 logits at the rate of
a large copy. Leaves out bias, min-p and the network.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redline.engine.native.running import sampler
from redline.engine.native.running.sampler import SamplingRows, sample
from redline.lab.measure.machine import measure_machine

DEVICE = torch.device("cuda")
FILTERS = {"top-k 50": (50, 1.0), "top-p 0.9": (0, 0.9), "both": (50, 0.9), "top-p 0.999": (0, 0.999)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 64, 512))
    parser.add_argument("--vocabulary", type=int, default=151936)
    asked = parser.parse_args()
    machine = measure_machine(DEVICE, torch.bfloat16)
    print(machine.how)
    print(f"{'':27} | where it ends     | a whole sample")
    print(" rows filter          bound |   sorted  kernels |   sorted  kernels")
    for count in asked.rows:
        logits_BV = torch.randn(count, asked.vocabulary, device=DEVICE).mul_(3).bfloat16()
        bound = 4 * logits_BV.numel() / machine.bandwidth * 1e3
        for name, (k, p) in FILTERS.items():
            rows, scaled_BV = _rows(count, k, p), logits_BV.float() / 0.8
            ends = [_timed(partial(sampler._last_kept, scaled_BV, rows), by_kernels)[0] for by_kernels in (False, True)]
            (sorting, one), (kernels, other) = (_timed(partial(sample, logits_BV, rows), by) for by in (False, True))
            equal = int((one.tokens_B == other.tokens_B).sum())
            times = f"{bound:7.3f} | {ends[0]:8.3f} {ends[1]:8.3f} | {sorting:8.3f} {kernels:8.3f}"
            said = "" if equal == count else _difference(scaled_BV, rows)
            print(f"{count:5} {name:13} {times} | {equal} of {count} tokens are equal{said}", flush=True)


def _rows(count: int, k: int, p: float) -> SamplingRows:
    return SamplingRows(
        torch.full((count,), 0.8, device=DEVICE),
        torch.randint(-(2**62), 2**62, (count,), device=DEVICE),
        torch.zeros(count, dtype=torch.int64, device=DEVICE),
        top_k_B=torch.full((count,), k, dtype=torch.int32, device=DEVICE) if k else None,
        top_p_B=torch.full((count,), p, device=DEVICE) if p < 1 else None,
    )


@contextmanager
def _served(by_kernels: bool) -> Iterator[None]:
    serves = sampler.kernels_serve
    sampler.kernels_serve = lambda tensor: by_kernels  # type: ignore[assignment]
    try:
        yield
    finally:
        sampler.kernels_serve = serves


def _timed(run: Callable[[], Any], by_kernels: bool) -> tuple[float, Any]:
    """Milliseconds of a graph, and what it made."""
    with _served(by_kernels):
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = run()
    samples = []
    for _ in range(21):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end))
    return statistics.median(samples[1:]), made


def _difference(scaled_BV: Tensor, rows: SamplingRows) -> str:
    counts = []
    for by_kernels in (False, True):
        with _served(by_kernels):
            counts.append((sampler._filtered(scaled_BV, rows) > float("-inf")).sum(dim=-1))
    difference_B = (counts[0] - counts[1]).abs()
    return f", {int((difference_B > 0).sum())} rows keep another number, by {int(difference_B.max())} at most"


if __name__ == "__main__":
    main()
