"""A decode step by every way that the engine has for it, by model and number of rows.

    PYTHONPATH=src python benchmarks/kernels/step_ways.py [--models qwen2.5-7b] [--rows 1,4,8] [--ways one,few]
                                                          [--prompt-tokens 2000] [--save FILE]

    one      the whole step in one launch (kernels/decode/one_launch.py)
    first    own products, their weights ahead of their rows (kernels/decode/weights_first.py)
    few      own products that overlap (kernels/decode/few_rows.py)
    some     products of cuBLAS, some in parts, and own ones for gate and up (engine/native/running/some_rows.py)
    many     own products with the norms around them (engine/native/running/many_rows.py)
    most     products of cuBLAS, and an own one for gate and up (engine/native/running/most_rows.py)
    forward  the decoder's own layers
    fp8      weights and activations in 8 bits (engine.quantization)

The engine itself, all ways in turn over the same random weights: prompts of 256 random tokens and 65 new ones with logprobs at
temperature 1; a step is (end - last first token) / 64, in the shortest of `--runs`. Beside it stands the bound in bfloat16
(`lab/measure/roofline.py`). The ways' `most_rows` are from here. Prompts of more than 32,768 tokens together are computed in
several passes, between which the first rows decode: then not all steps are of all rows, and such a line says too little.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from decode_rows import seconds_of_a_step
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.running import cuda
from redline.engine.native.running.few_rows import FewRows, one_launch_of
from redline.engine.native.running.many_rows import ManyRows
from redline.engine.native.running.most_rows import MostRows
from redline.engine.native.running.some_rows import SomeRows
from redline.engine.native.running.weights_first import WeightsFirst
from redline.kernels.decode import few_rows, gated, one_launch, weights_first
from redline.lab.material.networks import random_decoder
from redline.lab.material.prompts import random_prompts
from redline.lab.measure.machine import Machine, measure_machine
from redline.lab.measure.roofline import Load, NetworkCost, step_seconds
from redline.lab.peers.generation_sides import Batch
from redline.launch.engines import make_engine
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.telemetry import describe_environment

CUDA = torch.device("cuda")
NEW_TOKENS = 65
SIZES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 64, 151_936),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 128, 151_936),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 128, 151_936),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 128, 152_064),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 128, 152_064),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128_256),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128_256),
}
"""Hidden units, inner ones, layers, heads, key/value heads, the size of a head, and the vocabulary."""
UNTIED = ("qwen2.5-7b", "qwen2.5-14b", "llama-3.1-8b")
WAYS = ("one", "first", "few", "some", "many", "most", "forward", "fp8")
MOST_ROWS = {
    "one": one_launch.MOST_ROWS,
    "first": weights_first.MOST_ROWS,
    "few": few_rows.MOST_ROWS,
    "some": gated.MOST_ROWS,
    "many": ManyRows.most_rows,
    "most": MostRows.most_rows,
    "forward": 10**9,
    "fp8": 10**9,
}
"""That a way can take, however slowly."""


@dataclass(slots=True, frozen=True)
class Point:
    model: str
    rows: int
    prompt_tokens: int
    seconds: dict[str, float]
    """By way."""
    bound_s: float


def config_of(name: str) -> PretrainedConfig:
    sizes = SIZES[name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    family, architecture = {
        "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
        "qwen3": (Qwen3Config, "Qwen3ForCausalLM"),
        "llama": (LlamaConfig, "LlamaForCausalLM"),
    }[name[:5]]
    return family(
        **dict(zip(names, sizes, strict=False)),
        vocab_size=sizes[-1],
        architectures=[architecture],
        max_position_embeddings=32768,
        tie_word_embeddings=name not in UNTIED,
        bos_token_id=None,
        eos_token_id=None,
    )


def engine_of(decoder: AnyDecoder, way: str, rows: int, longest: int) -> NativeEngine:
    def only(decoder: Decoder, cache: KVCache, rotary: Tensor, *, is_alone: bool) -> list[object]:
        makers = {
            "one": lambda: one_launch_of(decoder, cache, rotary),
            "first": lambda: WeightsFirst(decoder),
            "few": lambda: FewRows(decoder),
            "some": lambda: SomeRows(decoder),
            "many": lambda: ManyRows(decoder),
            "most": lambda: MostRows(decoder),
        }
        made = makers[way]() if way in makers else None
        if made is not None:
            made.most_rows = MOST_ROWS[way]
        return [] if made is None else [made]

    sizes = EngineConfig(
        max_num_seqs=rows,
        max_model_len=longest,
        kv_cache_memory_bytes=int(1.1 * rows * (longest + 64) * NetworkCost.of(decoder).kv_bytes_per_token),
        max_num_batched_tokens=32768,
        quantization="fp8" if way == "fp8" else "none",
    )
    if way == "fp8":
        return make_engine(decoder, sizes)
    with mock.patch.object(cuda, "ways_of", only):
        return make_engine(decoder, sizes)


def measured(
    name: str, all_rows: tuple[int, ...], prompt_tokens: int, ways: list[str], machine: Machine, runs: int
) -> Iterator[Point]:
    """All ways in turn, at each number of rows; nothing without runs that count."""
    decoder = random_decoder(config_of(name), CUDA, torch.bfloat16, seed=0)
    engines = {way: engine_of(decoder, way, max(all_rows), prompt_tokens + NEW_TOKENS) for way in ways}
    for rows in all_rows:
        batch = Batch(random_prompts(rows, prompt_tokens, 1000, (0, rows)), 1, NEW_TOKENS, seed=rows)
        able = {way: engine for way, engine in engines.items() if rows <= MOST_ROWS[way]}
        rounds = [{way: seconds_of_a_step(engine, batch, CUDA) for way, engine in able.items()} for _ in range(1 + runs)][1:]
        if rounds:
            bound = step_seconds(NetworkCost.of(decoder), Load(rows, prompt_tokens, 1, NEW_TOKENS, rows), machine)
            yield Point(name, rows, prompt_tokens, {way: min(one[way] for one in rounds) for way in able}, bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2, 4, 8, 16, 32))
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument(
        "--runs", type=int, default=3, help="of each, after one that does not count; 0 compiles, and times nothing"
    )
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    machine = measure_machine(CUDA, torch.bfloat16)
    print(machine.how)
    print(f"{'model':>14} {'rows':>5} " + " ".join(f"{way:>9}" for way in (*asked.ways, "bound")) + "  of it")
    points = []
    for name in asked.models:
        for point in measured(name, asked.rows, asked.prompt_tokens, asked.ways, machine, asked.runs):
            points.append(point)
            seconds = [point.seconds.get(way) for way in asked.ways]
            times = " ".join(" " * 9 if one is None else f"{one * 1e3:6.3f} ms" for one in (*seconds, point.bound_s))
            print(f"{name:>14} {point.rows:5} {times} {point.bound_s / min(point.seconds.values()):6.0%}", flush=True)
        torch.cuda.empty_cache()
    if asked.save:
        document = {"what": __doc__.splitlines()[0], "machine": machine.how, "points": [asdict(point) for point in points]}
        asked.save.write_text(json.dumps(document | {"environment": describe_environment()}, indent=1, default=str))


if __name__ == "__main__":
    main()
