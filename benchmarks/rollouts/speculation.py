"""What guessed tokens bring, and that they change nothing: `engine.speculation` off and auto, in turn, on W4's lengths.

    PYTHONPATH=src python benchmarks/rollouts/speculation.py [--model random:qwen2.5-0.5b] [--prompts 512] [--rounds 2]

Networks of random weights say nothing twice. So one token is made likely: a direction that all hidden states have in common is
added to its row of the head, as strongly as makes it the share `p` of what is sampled. A text then goes on as its own last
tokens did with probability p, whatever the seed, which is what acceptance is made of; p = 0 is the network as it was drawn.
Each round has new prompts, and every engine its own texts.

First, in float32 and with a clock that always says yes (`always`), completions with and without guesses are compared, at
temperature 0.05 and where every text comes a second time. At temperature 1 a network of random weights is so flat that each of
150,000 tokens is 7e-6 wide, and of a hundred draws one falls within float32's rounding of the border of two (`--temperature 1`
shows it). It also says by how much the logprobs differ up to the first other token: 1e-5 is rounding, 1e-3 would be TF32.
Leaves out: siblings and earlier attempts, whose texts are longer matches than a text's own; and real texts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch

from redline.config.sections.engine import EngineConfig, SpeculationMode
from redline.engine import NativeEngine
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.lab.material.train_batches import long_tailed_lengths
from redline.lab.measure.machine import synchronize
from redline.launch.engines import make_engine
from redline.models.decoder import Decoder
from redline.types import Completion, EngineStats, GenerateRequest, SamplingParams

TOKEN = 17
"""The one that is made likely."""
PROMPT_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--mean", type=int, default=548, help="tokens of a completion")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shares", type=lambda text: [float(p) for p in text.split(",")], default=[0.0, 0.8, 0.95])
    parser.add_argument("--compared", type=int, default=300, help="completions that are compared in float32; 0 for none")
    parser.add_argument("--temperature", type=float, default=0.05, help="of those")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.compared:
        compare(asked.model, device, asked.compared, asked.temperature)
    names = {"p": 5, "likely": 6, "off": 9, "auto": 9, "times": 6, "drafted": 9, "accepted": 8, "saved, said": 12, "saved": 7}
    lines = [" ".join(f"{name:>{width}}" for name, width in names.items())]
    for share in asked.shares:
        lines += measure(asked, device, share)
    print("\n".join(lines))


def compare(model: str, device: torch.device, count: int, temperature: float) -> None:
    """Say how many of the completions differ."""
    decoder = make_network(model, device, torch.float32, seed=0).decoder
    more = {"n": 4, "stop_token_ids": (5, 6), "temperature": temperature}
    requests = [
        replace(request, sampling=replace(request.sampling, **more, top_p=0.95 if i % 3 else 1.0))
        for i, request in enumerate(requests_of(decoder, count // 4, 48, 192, 1, 32))
    ]
    found: dict[str, list[Completion]] = {}
    stats = {}
    for mode in ("off", "always"):
        engine = engine_of(decoder, mode, len(requests) * 4)  # type: ignore[arg-type]
        for _ in range(2):
            found[mode] = [completion for group in engine.generate(requests) for completion in group]
        stats[mode] = engine.stats
        del engine
    pairs = list(zip(found["off"], found["always"], strict=True))
    other = sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in pairs)
    tokens = sum(len(a.token_ids) for a, _ in pairs)
    off = max(float(np.abs(a.logprobs[:same] - b.logprobs[:same]).max()) for a, b in pairs if (same := _in_common(a, b)))
    guessed = stats["always"]
    print(
        f"float32: {other} of {len(pairs)} completions ({tokens} tokens) differ, logprobs up to there by at most {off:.1e}; "
        f"{guessed.accepted_tokens} of {guessed.drafted_tokens} drafts accepted",
        flush=True,
    )


def _in_common(a: Completion, b: Completion) -> int:
    """Tokens up to the first that differs."""
    count = min(len(a.token_ids), len(b.token_ids))
    differs = np.flatnonzero(a.token_ids[:count] != b.token_ids[:count])
    return int(differs[0]) if len(differs) else count


def measure(asked: argparse.Namespace, device: torch.device, share: float) -> list[str]:
    decoder = make_network(asked.model, device, getattr(torch, asked.dtype), seed=0).decoder
    if share:
        make_likely(decoder, share, device)
    engines = {mode: engine_of(decoder, mode, asked.prompts) for mode in ("off", "auto")}  # type: ignore[arg-type]
    for engine in engines.values():  # kernels are compiled, graphs captured
        run(engine, requests_of(decoder, asked.prompts, asked.mean // 4, asked.longest // 4, 99, PROMPT_TOKENS), device)
    lines = []
    for number in range(asked.rounds):
        requests = requests_of(decoder, asked.prompts, asked.mean, asked.longest, number, PROMPT_TOKENS)
        seconds, gained = {}, EngineStats()
        for mode in ("off", "auto") if number % 2 == 0 else ("auto", "off"):
            before = engines[mode].stats
            seconds[mode], likely = run(engines[mode], requests, device)
            if mode == "auto":
                gained = _between(before, engines[mode].stats)
        tokens = sum(request.sampling.max_tokens for request in requests)
        drafted, accepted = gained.drafted_tokens, gained.accepted_tokens
        lines.append(
            f"{share:5.2f} {likely:6.2f} {tokens / seconds['off']:9,.0f} {tokens / seconds['auto']:9,.0f} "
            f"{seconds['off'] / seconds['auto']:6.3f} {drafted:9,} {accepted / max(1, drafted):8.2f} "
            f"{gained.speculation_saved_s:10.2f} s {seconds['off'] - seconds['auto']:5.2f} s"
        )
        print(lines[-1], flush=True)
    return lines


def _between(before: EngineStats, after: EngineStats) -> EngineStats:
    return EngineStats(
        drafted_tokens=after.drafted_tokens - before.drafted_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        speculation_saved_s=after.speculation_saved_s - before.speculation_saved_s,
    )


def engine_of(decoder: Decoder, mode: SpeculationMode, rows: int) -> NativeEngine:
    config = EngineConfig(max_num_seqs=rows, max_num_batched_tokens=32768, speculation=mode)
    if decoder.output_weight.is_cuda:
        config = config.model_copy(update={"kv_cache_memory_bytes": 12 * 2**30})
    return make_engine(decoder, config)


def requests_of(
    decoder: Decoder, count: int, mean: int, longest: int, number: int, prompt_tokens: int
) -> list[GenerateRequest]:
    prompts = random_prompts(count, prompt_tokens, decoder.spec.vocab_size, (7, number))
    lengths = long_tailed_lengths(count, count * mean, 1, longest, 0)
    return [
        GenerateRequest(prompt, SamplingParams(max_tokens=int(length), seed=1000 * number + i))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def run(engine: NativeEngine, requests: list[GenerateRequest], device: torch.device) -> tuple[float, float]:
    """Seconds, and the share of the likely token in what was sampled."""
    engine.reset_prefix_cache()
    synchronize(device)
    began = time.perf_counter()
    groups = engine.generate(requests)
    synchronize(device)
    seconds = time.perf_counter() - began
    return seconds, float((np.concatenate([group[0].token_ids for group in groups]) == TOKEN).mean())


@torch.no_grad()
def make_likely(decoder: Decoder, share: float, device: torch.device) -> Decoder:
    """Add a common direction to all hidden states, and as much of it to one row of the head as makes its token the share of
    what is sampled. The head gets weights of its own where it had the embedding's."""
    if decoder.lm_head is None:
        decoder.lm_head = torch.nn.Parameter(decoder.embed.detach().clone())
    drawn = torch.randn(decoder.spec.hidden_size, device=device, dtype=decoder.embed.dtype)
    direction = torch.nn.functional.normalize(drawn, dim=0)
    decoder.embed += 50 * decoder.embed.norm(dim=1).mean() * direction
    row, engine = decoder.lm_head[TOKEN].clone(), engine_of(decoder, "off", 16)
    request = GenerateRequest(np.arange(20, 30, dtype=np.int32), SamplingParams(max_tokens=100, n=16, seed=3))
    low, high = 0.0, 16.0  # a hidden state is about 30 long, so that 0.1 is three nats
    for _ in range(16):
        middle = (low + high) / 2
        decoder.lm_head[TOKEN] = row + middle * direction
        engine.reset_prefix_cache()
        [found] = engine.generate([request])
        if np.mean([(completion.token_ids == TOKEN).mean() for completion in found]) < share:
            low = middle
        else:
            high = middle
    return decoder


if __name__ == "__main__":
    main()
