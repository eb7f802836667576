"""What sampling in whole numbers brings on a CPU, and what it costs: `engine.quantization` none, int16 and int8, in turn.

    PYTHONPATH=src python benchmarks/kernels/cpu_quantized.py [--rows 1,4,16,64] [--rounds 3] [--new-tokens 128]

C1's questions, sampled by engines over one network in float32; who is first changes from round to round. Prompts are in it, and
ratios are of the same round. Then how far the logprobs are from those that the engine without it gives the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import question_prompts
from redline.launch.engines import make_engine
from redline.types import Completion, GenerateRequest, SamplingParams

KINDS = ("none", "int16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args()
    network = make_network(asked.model, torch.device("cpu"), torch.float32, seed=0)
    print(f"{asked.model}, {asked.new_tokens} new tokens, {asked.rounds} rounds, {torch.get_num_threads()} threads")
    for rows in map(int, asked.rows.split(",")):
        prompts = question_prompts(rows, network.tokenizer)
        config = EngineConfig(max_num_seqs=rows, max_model_len=max(map(len, prompts)) + asked.new_tokens)
        engines = {kind: make_engine(network.decoder, config.model_copy(update={"quantization": kind})) for kind in KINDS}
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(-1, asked.rounds):
            for kind in KINDS if number % 2 else KINDS[::-1]:
                length = asked.new_tokens if number >= 0 else 4  # the first round warms up
                seconds, found = sampled(engines[kind], prompts, length)
                if number >= 0:
                    rates[kind].append(sum(len(each.token_ids) for each in found) / seconds)
        for kind in KINDS:
            ratios = [rate / plain for rate, plain in zip(rates[kind], rates["none"], strict=True)]
            print(
                f"{rows:4} rows  {kind:5}  {statistics.median(rates[kind]):7.1f} tok/s"
                f"  {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    for kind in KINDS:
        print(f"{kind:5}  {beside(engines[kind], engines['none'], prompts, asked.new_tokens)}", flush=True)


def sampled(engine: NativeEngine, prompts: list[np.ndarray], length: int) -> tuple[float, list[Completion]]:
    requests = [GenerateRequest(p, SamplingParams(max_tokens=length, seed=i)) for i, p in enumerate(prompts)]
    engine.reset_prefix_cache()
    began = time.perf_counter()
    groups = engine.generate(requests)
    return time.perf_counter() - began, [group[0] for group in groups]


def beside(engine: NativeEngine, plain: NativeEngine, prompts: list[np.ndarray], length: int) -> str:
    """How far its logprobs are from those of `plain` for the tokens that it sampled."""
    _, found = sampled(engine, prompts, length - 1)
    whole = [np.concatenate([p, c.token_ids]).astype(np.int32) for p, c in zip(prompts, found, strict=True)]
    plain.reset_prefix_cache()
    scored = plain.generate([GenerateRequest(ids, SamplingParams(max_tokens=1, prompt_logprobs=True)) for ids in whole])
    own = np.concatenate([c.logprobs for c in found])
    theirs = np.concatenate([s[0].prompt_logprobs[len(p) :] for p, s in zip(prompts, scored, strict=True)])
    ratio = np.exp(np.float64(theirs) - own)
    return (
        f"logprobs of {len(own):,} sampled tokens off by {np.abs(own - theirs).mean():.1e} on average,"
        f" {np.abs(own - theirs).max():.1e} at most; KL {(ratio - 1 - np.log(ratio)).mean():.1e}"
    )


if __name__ == "__main__":
    main()
