"""Milliseconds of a decode step of many rows, with tuned products, with launches that overlap, with both and with neither.

    PYTHONPATH=src python benchmarks/kernels/many_rows.py [--rows 64,512] [--model random:qwen2.5-0.5b] [--context 640]
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/kernels/many_rows.py --device cpu --model random:tiny-64k \\
        --dtype float32 --rows 2 --context 20 --rounds 1 --launches 1    (does it run at all?)

The engine's own runner on rows that all have `--context` tokens, captured steps with sampling, eight at a time, `--launches`
times; the median of `--rounds` in which the four take turns. Before that, the logits of one captured step, a seventh of its
rows dead, are compared bit by bit. Choosing algorithms for a number of rows is timed on its own: every process does it once. On
a CPU the bits of "neither" are others: torch's operations do there what kernels do elsewhere.

Leaves out: rows of different lengths, common beginnings, prompts and the host's part.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.running import many_rows
from redline.engine.native.running.cuda import MAX_STEPS, CudaRunner
from redline.engine.native.running.device_rows import DeviceRows
from redline.engine.native.running.many_rows import ManyRows
from redline.engine.native.sequence import Wants
from redline.kernels.decode.step import begin_step
from redline.lab.material.networks import make_network
from redline.lab.measure.machine import synchronize
from redline.models.decoder import Decoder

ROWS = (48, 64, 128, 256, 512, 1024, 2048)
WAYS = {"neither": (False, False), "tuned": (True, False), "overlapped": (False, True), "both": (True, True)}
PAGE = 16
PLAIN = Wants()


class Uncaptured(CudaRunner):
    """Without a GPU nothing can be captured, and steps run as they are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._few_rows = None

    def capture(self, key: Any) -> Any:
        raise torch.OutOfMemoryError("no graphs on a CPU")

    def release(self) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--launches", type=int, default=4)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    with torch.inference_mode():
        decoder = decoder_of(asked.model, device, getattr(torch, asked.dtype))
        runners = runners_of(decoder, max(asked.rows), asked.context + asked.launches * MAX_STEPS)
        print(f"{'rows':>5} {'choosing':>9} " + " ".join(f"{name:>16}" for name in WAYS) + "  ms a step; logits")
        for rows in asked.rows:
            print(line(runners, rows, asked.context, asked.rounds, asked.launches), flush=True)


def decoder_of(model: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    decoder = make_network(model, device, dtype, seed=0).decoder
    assert isinstance(decoder, Decoder)
    generator = torch.Generator(device).manual_seed(1)
    for layer in decoder.layers:
        if layer.qkv.bias is not None:
            layer.qkv.bias.normal_(generator=generator)
    return decoder


def runners_of(decoder: Decoder, most_rows: int, most_tokens: int) -> dict[str, CudaRunner]:
    """One for each way; they share rows, each with blocks of its own, and a cache of random keys and values."""
    device, dtype, spec = decoder.embed.device, decoder.embed.dtype, decoder.spec
    blocks = -(-most_tokens // PAGE)
    cache = KVCache(spec, most_rows * blocks + 1, PAGE, device, dtype, heads_first=True)
    cache.blocks.normal_(generator=torch.Generator(device).manual_seed(2))
    rows = DeviceRows(most_rows, blocks, spec.vocab_size, device)
    rows.tables_RN[:most_rows] = 1 + torch.randperm(most_rows * blocks, device=device).view(most_rows, blocks).int()
    kind = CudaRunner if device.type == "cuda" else Uncaptured
    runners = {}
    for name, (tuned, overlapped) in WAYS.items():
        many_rows.TUNED, many_rows.OVERLAPPED = tuned, overlapped
        runners[name] = kind(decoder, cache, rows, shares_device=True)
    return runners


def line(runners: dict[str, CudaRunner], rows: int, context: int, rounds: int, launches: int) -> str:
    chosen_ms = choosing_ms(runners["both"], rows)
    logits = {name: logits_of(runner, rows, context) for name, runner in runners.items()}
    others = [name for name, found in logits.items() if not torch.equal(found, logits["neither"])]
    assert all(found.isfinite().all() and found.any() for found in logits.values())
    del logits
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(1 + rounds):  # the first captures
        for name, runner in runners.items():
            times[name].append(step_ms(runner, rows, context, launches))
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    gains = {name: f"{ms:8.4f} ({ms / medians['neither'] - 1:+5.1%})" for name, ms in medians.items()}
    bits = f"OTHER BITS: {', '.join(others)}" if others else "the same bits"
    return f"{rows:5} {chosen_ms:6.1f} ms " + " ".join(f"{gain:>16}" for gain in gains.values()) + f"  {bits}"


def choosing_ms(runner: CudaRunner, rows: int) -> float:
    chain, device = runner._many_rows, runner.cache.blocks.device
    assert isinstance(chain, ManyRows)
    synchronize(device)
    started = time.perf_counter()
    chain.choose(rows)
    return 1e3 * (time.perf_counter() - started)


def begin(runner: CudaRunner, rows: int, context: int) -> None:
    """All rows stand at the same place, with the same tokens whoever runs them."""
    state = runner.rows
    state.alive_R[:rows] = True
    state.position_R[:rows] = context
    state.sampled_R[:rows] = 0
    state.limit_R[:rows] = 1 << 30
    state.streams_R[:rows] = torch.arange(rows, device=state.streams_R.device)
    state.next_token_R[:rows] = 2 + torch.arange(rows, device=state.streams_R.device) % 1000
    runner._sizes = [rows]


def logits_of(runner: CudaRunner, rows: int, context: int) -> Tensor:
    """Of one step, by a captured graph where there are any."""
    begin(runner, rows, context)
    runner.rows.alive_R[3:rows:7] = False
    rows_B = torch.arange(rows, device=runner.rows.alive_R.device)
    runner._rows32_B[:rows] = rows_B.int()
    inputs = begin_step(runner.rows, rows_B)
    logits_BV = runner._logits(rows_B, inputs, 0, PLAIN)
    if not logits_BV.is_cuda:
        return logits_BV
    del logits_BV
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runner._logits(rows_B, inputs, 0, PLAIN)
    for _ in range(3):
        graph.replay()
    return captured.clone()


def step_ms(runner: CudaRunner, rows: int, context: int, launches: int) -> float:
    begin(runner, rows, context)
    device = runner.cache.blocks.device
    synchronize(device)
    started = time.perf_counter()
    for _ in range(launches):
        runner.decode(np.arange(rows), np.full(rows, context), MAX_STEPS, PLAIN)
    synchronize(device)
    return 1e3 * (time.perf_counter() - started) / (launches * MAX_STEPS)


if __name__ == "__main__":
    main()
