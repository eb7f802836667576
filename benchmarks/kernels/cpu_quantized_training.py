"""What training in whole numbers brings on a CPU, and what it costs: `trainer.quantization` none and int16, in turn.

    PYTHONPATH=src python benchmarks/kernels/cpu_quantized_training.py [--sequences 64] [--tokens 46] [--rounds 5]

Steps of two trainers with a network each, in float32, on the same batches of random tokens, in groups of 8 that share a prompt
of 16; who is first changes from round to round, and ratios are of the same round. Then how far gradients of one micro-batch are
from those that float64 gives, by parameter: the cosine, and the difference's norm in units of the gradient's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import numpy as np
import torch
from torch import Tensor

from redline.config.sections.trainer import TrainerConfig
from redline.lab.material.networks import make_network
from redline.lab.material.train_batches import random_batch
from redline.models.decoder import Decoder
from redline.models.whole_numbers import in_whole_numbers
from redline.trainer.batches.micro_batches import plan_micro_batches
from redline.trainer.passes.forward import chosen_logprobs, network_inputs, whole
from redline.trainer.sampling import Sampling
from redline.trainer.trainer import PolicyTrainer
from redline.types import TrainBatch

KINDS = ("none", "int16")
BUDGET = 16384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=46)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(f"{asked.model}, {asked.sequences} sequences of {asked.tokens} tokens, {torch.get_num_threads()} threads")
    trainers = {kind: trainer(asked.model, kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(-1, asked.rounds):
        batch = a_batch(asked.sequences, asked.tokens, number + 1)
        for kind in KINDS if number % 2 else KINDS[::-1]:
            began = time.perf_counter()
            trainers[kind].step(batch)
            if number >= 0:  # the first round warms up
                seconds[kind].append(time.perf_counter() - began)
    ratios = [plain / own for plain, own in zip(seconds["none"], seconds["int16"], strict=True)]
    for kind in KINDS:
        print(f"{kind:5}  a step {statistics.median(seconds[kind]):.2f} s")
    print(f"int16 {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    del trainers
    beside_float64(asked.model, a_batch(8, asked.tokens, 0))


def trainer(model: str, kind: str) -> PolicyTrainer:
    config = TrainerConfig(quantization=kind, max_tokens_per_micro_batch=BUDGET)  # type: ignore[arg-type]
    network = make_network(model, torch.device("cpu"), torch.float32, seed=0)
    return PolicyTrainer(network.decoder, torch.float32, config, Sampling())


def a_batch(sequences: int, tokens: int, number: int) -> TrainBatch:
    lengths = np.full(sequences, tokens, dtype=np.int64)
    return random_batch(lengths, prompt_tokens=16, group_size=8, vocab_size=49152, key=(0, number))


def beside_float64(model: str, batch: TrainBatch) -> None:
    decoder = make_network(model, torch.device("cpu"), torch.float32, seed=0).decoder
    assert isinstance(decoder, Decoder)
    exact = gradients(copy.deepcopy(decoder).double(), batch)
    for kind in KINDS:
        found = gradients(decoder if kind == "none" else in_whole_numbers(decoder, "int16"), batch)
        off = {name: float((found[name].double() - each).norm() / each.norm()) for name, each in exact.items()}
        cosines = [float(torch.cosine_similarity(found[n].double().flatten(), exact[n].flatten(), 0)) for n in exact]
        worst = max(off, key=lambda name: off[name])
        print(
            f"{kind:5}  gradients off by {statistics.median(off.values()):.1e} of their norm (median of {len(off)}),"
            f" {off[worst]:.1e} at most ({worst}); cosine {min(cosines):.8f} at least"
        )


def gradients(decoder: Decoder, batch: TrainBatch) -> dict[str, Tensor]:
    """Of the sum of advantage times logprob, as one micro-batch."""
    decoder.requires_grad_(True)
    decoder.zero_grad(set_to_none=True)
    [micro] = plan_micro_batches(batch, BUDGET).of_rank(0)
    share = whole(micro)
    inputs = {name: torch.as_tensor(np.asarray(values)) for name, values in network_inputs(micro, share).items()}
    logprobs_M, _ = chosen_logprobs(decoder, micro, share, inputs, 1.0)
    advantages_M = torch.as_tensor(batch.advantages)[torch.as_tensor(micro.sequence_M)]
    (logprobs_M * advantages_M).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in decoder.named_parameters() if parameter.grad is not None}


if __name__ == "__main__":
    main()
