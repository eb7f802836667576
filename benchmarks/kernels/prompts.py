"""Prompts on a GPU: the first token of a short one, attention of long ones, and where the time of four long ones goes.

    PYTHONPATH=src python benchmarks/kernels/prompts.py [first] [attention] [long]

`first`: one prompt by itself, streamed, by its length; in one graph and launch by launch; p50 of 20. `attention`: of one layer
of the 0.5B shape, beside torch's FlashAttention for packed sequences, which is given all keys in order: to gather them is not
timed; the best of three. `long`: 4 prompts of 24,000 random tokens → 256 new ones, until the last one has its first token, and
until the end; the better of two.

Leaves out: other shapes, prompts beside rows that decode, prompts of different lengths. About 40 s, most of it to compile.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.engine.native.running.prompts import CapturedPrompts
from redline.kernels.decode.prompt_attention import TILES, Tile, prompt_attention, query_blocks
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.launch.engines import make_engine
from redline.models.files.hf import AnyDecoder
from redline.types import GenerateRequest, SamplingParams

CUDA = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, PAGE = 14, 2, 64, 64
OTHER_TILES = [Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)]
LONG, NEW_TOKENS = 24_000, 256


def engine_of(decoder: AnyDecoder, rows: int, longest: int, chunk: int = 32768) -> NativeEngine:
    return make_engine(decoder, EngineConfig(max_num_seqs=rows, max_model_len=longest, max_num_batched_tokens=chunk))


def asked(decoder: AnyDecoder, count: int, length: int, new_tokens: int, seed: int) -> list[GenerateRequest]:
    prompts = random_prompts(count, length, decoder.spec.vocab_size, (length, seed))
    return [GenerateRequest(prompt, SamplingParams(max_tokens=new_tokens, seed=seed)) for prompt in prompts]


# ── the first token ────────────────────────────────────────────────────────────────────────────────────────────────────


def first(decoder: AnyDecoder) -> None:
    engine, captured = engine_of(decoder, 16, 1024), CapturedPrompts.logits
    began = time.perf_counter()
    first_token_s(engine, 128, seed=0)
    print(f"very first request: {time.perf_counter() - began:.1f} s")
    for length in (16, 128, 500):
        found = {}
        for name, logits in (("one graph", captured), ("launches", lambda self, prompts: None)):
            CapturedPrompts.logits = logits  # type: ignore[method-assign]
            found[name] = [first_token_s(engine, length, seed) for seed in range(25)][5:]
        CapturedPrompts.logits = captured  # type: ignore[method-assign]
        print(
            f"first token of {length:4} tokens, ms:",
            ", ".join(f"{n} {statistics.median(s) * 1e3:.2f}" for n, s in found.items()),
        )


def first_token_s(engine: NativeEngine, length: int, seed: int) -> float:
    [request] = asked(engine.decoder, 1, length, 4, seed)
    engine.reset_prefix_cache()
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.submit(request, streaming=1)
    while not engine.step():
        pass
    took = time.perf_counter() - began
    while engine.has_work:
        engine.step()
    return took


# ── attention ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention(_: AnyDecoder) -> None:
    for queries, start in ((LONG, 0), (8192, LONG - 8192)):
        flop = 4 * HEADS * HEAD_DIM * (queries * start + queries * (queries + 1) / 2)
        blocks = -(-(start + queries) // PAGE)
        keys, values = torch.randn(2, blocks + 1, KV_HEADS, PAGE, HEAD_DIM, device=CUDA, dtype=torch.bfloat16)
        table = (torch.randperm(blocks, device=CUDA) + 1).int()[None]
        heads = torch.randn(queries, HEADS + 2 * KV_HEADS, HEAD_DIM, device=CUDA, dtype=torch.bfloat16)
        flash = by_torch(heads, keys, values, table, start + queries)
        expected = flash()
        print(f"{queries} queries behind {start}: torch {rate(flash, flop)}")
        for tile in (TILES[HEAD_DIM], *OTHER_TILES):
            own = query_blocks(np.array([0, queries]), np.array([start]), np.array([0]), tile.queries)
            arguments = (heads, keys, values, torch.from_numpy(own).to(CUDA), table, tile)
            error = (prompt_attention(*arguments).float() - expected.float()).abs().max().item()
            print(f"  {tuple(tile)} {rate(partial(prompt_attention, *arguments), flop)}, off by {error:.4f}")


def by_torch(heads: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int) -> Callable[[], Tensor]:
    k_NKD, v_NKD = (cache[table[0].long()].transpose(1, 2).flatten(0, 1)[:length].contiguous() for cache in (keys, values))
    offsets = [torch.tensor([0, count], dtype=torch.int32, device=CUDA) for count in (len(heads), length)]
    rest = (*offsets, len(heads), length, 0.0, True, False)
    return lambda: torch.ops.aten._flash_attention_forward(heads[:, :HEADS], k_NKD, v_NKD, *rest)[0]


def rate(call: Callable[[], Tensor], flop: float, repeats: int = 3) -> str:
    best = float("inf")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):  # the first compiles
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / repeats)
    return f"{best:.3f} ms, {flop / best / 1e9:.0f} TFLOP/s"


# ── long prompts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def long(decoder: AnyDecoder) -> None:
    for chunk in (8192, 32768):
        engine, times = engine_of(decoder, 4, LONG + NEW_TOKENS, chunk), []
        for seed in range(3):
            requests = asked(decoder, 4, LONG, NEW_TOKENS, seed)
            engine.reset_prefix_cache()
            torch.cuda.synchronize()
            began = time.perf_counter()
            completions = [each[0] for each in engine.generate(requests)]
            times.append((time.perf_counter() - began, max(one.first_token_s for one in completions)))
        whole, prompts = min(times[1:])
        print(f"4 x {LONG:,} -> {NEW_TOKENS}, chunks of {chunk}: {whole:.3f} s, all prompts after {prompts:.3f} s")
        del engine
        torch.cuda.empty_cache()


if __name__ == "__main__":
    network = make_network("random:qwen2.5-0.5b", CUDA, torch.bfloat16, 0).decoder
    parts: dict[str, Callable[[AnyDecoder], None]] = {"first": first, "attention": attention, "long": long}
    with torch.no_grad():
        for name in sys.argv[1:] or parts:
            parts[name](network)
