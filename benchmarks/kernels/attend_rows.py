"""Another attention for decode steps of many rows (`attend_rows.cu`), checked, and timed beside the engine's.

    PYTHONPATH=src python benchmarks/kernels/attend_rows.py

The engine's has one program for a row and a key/value head; all begin at once, and wait for their first pages at once: of a
short context that is a good part of the time. This one copies pages into shared memory by its own warp, from its first
instruction on, a few blocks to a multiprocessor; "early", it begins before the launch in front of it has ended. `ring x blocks`
are its stages and its blocks of a multiprocessor. For Hopper, in bfloat16. Times are of one layer, in a graph that takes turns
among caches that are several times the L2 cache; the bound is its bytes at the rate of a copy.

Leaves out: what a launch in front of it has to do, contexts cut into parts, and prefixes that rows share.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_void_p
from functools import cache, partial
from pathlib import Path

import torch
from decode_kernels import MODELS, Step, check, copy_bandwidth, seconds_per_call
from torch import Tensor

from redline.kernels import nvrtc

THREADS, TILE = 160, 64
"""Of a block, and tokens of a stage: `attend_rows.cu`'s."""
RINGS = {64: ((3, 4), (2, 6), (4, 3), (6, 2)), 128: ((3, 2), (2, 3), (2, 2))}
"""Stages and blocks of a multiprocessor, by head size."""
SOURCE = Path(__file__).with_suffix(".cu")


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("heads", "q_norm", "k_norm", "rotary", "keys", "values", "out")),
        *((name, c_void_p) for name in ("positions", "lines", "table")),
        *((name, c_int) for name in ("table_stride", "num_positions")),
        *((name, c_float) for name in ("eps", "scale")),
    ]


def attend_rows(step: Step, layer: int, ring: tuple[int, int], *, early: bool = False) -> Tensor:
    """[B, H, D] of the step, as `decode_attention` has it. Early, it reads the cache before the launch in front has ended."""
    H, K, D = MODELS[step.model]
    keys, values = step.caches[layer]
    out_BHD = step.heads_BND.new_empty(step.rows, H, D)
    tensors = (step.heads_BND, None, None, step.rotary, keys, values, out_BHD, step.positions, step.lines, step.table)
    arguments = _Arguments(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        step.table.stride(0), step.rotary.shape[1], 0.0, D**-0.5 * math.log2(math.e),
    )  # fmt: skip
    _kernel(H, K, D, step.page, *ring).launch_grid((step.rows, K), THREADS, arguments, 0, early=early)
    return out_BHD


@cache
def _kernel(heads: int, kv_heads: int, head_dim: int, page: int, stages: int, resident: int) -> nvrtc.Kernel:
    sizes = {"H": heads, "KV": kv_heads, "D": head_dim, "PAGE": page, "HEAD_NORMS": 0, "STAGES": stages, "RESIDENT": resident}
    shared_bytes = stages * (2 * TILE * head_dim * 2 + 16) + 2 * 4 * 8 * 4
    major, minor = torch.cuda.get_device_capability()
    return nvrtc.Kernel(
        nvrtc.compiled(SOURCE.read_text(), SOURCE.name, f"sm_{major}{minor}a", sizes), "attend_rows", shared_bytes
    )


def check_all() -> None:
    for model, (_, _, D) in MODELS.items():
        for context in (1, 15, 16, 63, 64, 65, 127, 129, 500):
            for page in (16, 64, 128):
                step = Step(model, 6, context, page, layers=1)
                expected = step.expected(0)
                out = attend_rows(step.poison(), 0, RINGS[D][0], early=page == 64)
                check(f"{model} context {context} page {page}", out, expected)
        step, other = (seeded(model) for _ in range(2))
        attend_rows(step, 0, RINGS[D][0])
        other.calls()[0]()
        assert torch.equal(step.caches, other.caches), "the new keys and values are the same bits"


def seeded(model: str) -> Step:
    torch.manual_seed(1)
    return Step(model, 6, 77, layers=1)


CASES = (("0.5B", 512, 128), ("0.5B", 512, 384), ("0.5B", 512, 640), ("0.5B", 256, 768), ("0.5B", 160, 1024), ("7B", 512, 256))
"""Model, rows, tokens of each."""


def main() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        check_all()
        bandwidth = copy_bandwidth()
        for model, rows, context in CASES:
            step = Step(model, rows, context, layers=6 if model == "0.5B" else 3)
            bound_us = step.bytes / bandwidth * 1e6
            print(f"{model} {rows} rows of {context} tokens, bound {bound_us:.1f} us: engine's {us(step.calls()):.1f}")
            for ring in RINGS[MODELS[model][2]]:
                plain, early = us(calls_of(step, ring, early=False)), us(calls_of(step, ring, early=True))
                print(f"  {ring[0]} x {ring[1]}: {plain:.1f}, early {early:.1f}", flush=True)


def calls_of(step: Step, ring: tuple[int, int], *, early: bool) -> list[Callable[[], object]]:
    """One per layer."""
    return [partial(attend_rows, step, layer, ring, early=early) for layer in range(step.layers)]


def us(calls: Sequence[Callable[[], object]]) -> float:
    return statistics.median(seconds_per_call(list(calls))) * 1e6


if __name__ == "__main__":
    main()
