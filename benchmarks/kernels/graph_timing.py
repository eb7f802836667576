"""What a call takes on a GPU, in a graph, where nothing waits for the host."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch

CALLS = 16
"""Per graph: enough that starting it does not show."""


def seconds_per_call(calls: list[Callable[[], object]], replays: int = 15) -> list[float]:
    """One sample per replay of a graph that makes the calls in turn."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), math.ceil(CALLS / len(calls))
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            call()
    samples = []
    for replay in range(replays + 2):  # the first two warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            samples.append(start.elapsed_time(end) / 1e3 / (len(calls) * repeats))
    return samples


def copy_bandwidth() -> float:
    """Bytes read and written per second by a kernel that copies 2 GiB; a captured `copy_` is a slower transfer of its own."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 4 * 2**30 / statistics.median(seconds_per_call([lambda: torch.neg(source, out=target)]))
