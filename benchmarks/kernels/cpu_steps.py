"""What our C brings to the engine on a CPU: with it and without, in turn.

    PYTHONPATH=src python benchmarks/kernels/cpu_steps.py [--dtype bfloat16] [--rounds 4] [--prompts 64] [--new-tokens 128]

C1's questions, sampled by engines over one network; who is first changes from round to round. Prompts are in it. Says how many
completions are the same as torch's: all round, and not alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.engine.native.running import cpu, sampler
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import question_prompts
from redline.launch.engines import make_engine
from redline.models.decoder import Decoder
from redline.models.layers import few_rows
from redline.types import GenerateRequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args()
    network = make_network(asked.model, torch.device("cpu"), getattr(torch, asked.dtype), seed=0)
    prompts = question_prompts(asked.prompts, network.tokenizer)
    config = EngineConfig(max_num_seqs=asked.prompts, max_model_len=max(map(len, prompts)) + asked.new_tokens)
    engines = {"torch": without_c(network.decoder, config), "C": make_engine(network.decoder, config)}
    assert isinstance(engines["C"]._runner, cpu.CpuRunner), "no C here"
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    found: dict[str, list[list[int]]] = {}
    for number in range(-1, asked.rounds):
        for name in list(engines) if number % 2 else list(reversed(engines)):
            length = asked.new_tokens if number >= 0 else 4  # the first round warms up
            requests = [GenerateRequest(p, SamplingParams(max_tokens=length, seed=i)) for i, p in enumerate(prompts)]
            engines[name].reset_prefix_cache()
            with nullcontext() if name == "C" else by_torch():
                began = time.perf_counter()
                groups = engines[name].generate(requests)
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
                found[name] = [group[0].token_ids.tolist() for group in groups]
    print(f"{asked.prompts} prompts, {asked.new_tokens} new tokens, {asked.rounds} rounds, {torch.get_num_threads()} threads")
    for name, each in seconds.items():
        ratios = [before / after for before, after in zip(seconds["torch"], each, strict=True)]
        same = sum(a == b for a, b in zip(found["torch"], found[name], strict=True))
        rate = asked.prompts * asked.new_tokens / statistics.median(each)
        spread = f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:8} {rate:7.0f} tok/s, {spread}, {same} completions are the same")


def without_c(decoder: Decoder, config: EngineConfig) -> NativeEngine:
    with mock.patch.object(cpu, "steps_for", return_value=None):
        return make_engine(decoder, config)


@contextmanager
def by_torch() -> Iterator[None]:
    with mock.patch.object(few_rows, "products_of", return_value=None), mock.patch.object(sampler, "draws", return_value=None):
        yield


if __name__ == "__main__":
    main()
