"""Forward and backward of layers with experts: redline's network beside transformers' grouped path, in turns.

    python benchmarks/kernels/moe_training.py

On a GPU 12 layers of Qwen3-30B-A3B's shape in bfloat16, 4 sequences of 2,048 tokens (45 GiB); on a CPU 2 layers of a small
shape in float32, 8 of 128. Without the head and without an optimizer. First one layer of each with the same weights: output and
gradients are compared, with experts that no token goes to, on memory that is dirty. The bound counts 6 operations of a token
for each parameter that it meets, at 989 TFLOP/s; a CPU has none here."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from redline.kernels.segments import Segments
from redline.models.attention.flash import packed_attention
from redline.models.decoder import Decoder
from redline.models.files.hf import empty_decoder, network_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LAYERS, SEQUENCES, LENGTH, PAIRS = (12, 4, 2048, 5) if ON_GPU else (2, 8, 128, 7)
BUDGET_S = 55
PEAK = 989e12
LARGE = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SMALL = {"hidden_size": 512, "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
EXPERTS, CHOICES = (128, 8) if ON_GPU else (32, 4)


def config(layers: int) -> Qwen3MoeConfig:
    shape = LARGE if ON_GPU else SMALL
    return Qwen3MoeConfig(
        **shape,
        vocab_size=1024,
        num_hidden_layers=layers,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        norm_topk_prob=True,
    )


@torch.no_grad()
def ours(layers: int) -> Decoder:
    decoder = empty_decoder(config(layers), DEVICE, DTYPE)
    torch.manual_seed(0)
    for name, parameter in decoder.named_parameters():
        parameter.fill_(1.0) if name.endswith("norm") else parameter.normal_(std=0.02)
    return decoder


def theirs(layers: int) -> nn.Module:
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config(layers), attn_implementation="sdpa", dtype=DTYPE)
    model.set_experts_implementation("grouped_mm")
    return model.train()


def run_ours(decoder: nn.Module, tokens: Tensor) -> Tensor:
    attend = packed_attention(Segments.independent([LENGTH] * SEQUENCES), DEVICE)
    return decoder(tokens.flatten(), attend.positions_T, attend)


def run_theirs(model: Any, tokens: Tensor) -> Tensor:
    return model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


RUNS = {"redline": run_ours, "transformers": run_theirs}


def loss(hidden: Tensor) -> Tensor:
    """The hidden states along a direction. Their square would be that of the norm's weight, with no gradient before it."""
    return (hidden.float() @ torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)).mean()


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def step(name: str, network: nn.Module, tokens: Tensor) -> float:
    """Seconds."""
    wait()
    began = time.perf_counter()
    loss(RUNS[name](network, tokens)).backward()
    wait()
    took = time.perf_counter() - began
    network.zero_grad(set_to_none=True)
    return took


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())


def compare() -> dict[str, float]:
    """The largest relative differences, and the largest gradient of an expert without a token, which must be 0."""
    decoder, model, few = ours(1), theirs(1), EXPERTS * 3 // 4
    with torch.no_grad():
        decoder.embed += 0.5
        decoder.layers[0].experts.router[few:] = -1.0  # away from what all inputs have in common
        own = dict(model.named_parameters())
        for name, tensor in network_tensors(decoder).items():
            own[name].copy_(tensor)
    tokens, outputs = torch.randint(0, 1024, (SEQUENCES, LENGTH), device=DEVICE), {}
    for name, network in (("redline", decoder), ("transformers", model)):
        del_me = [torch.full_like(parameter, torch.nan) for parameter in network.parameters()]
        del del_me
        outputs[name] = RUNS[name](network, tokens)
        loss(outputs[name]).backward()
    grads = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    named = network_tensors(decoder, {**dict(decoder.named_parameters()), **grads})
    differences = {
        name: error(named[name], parameter.grad)
        for name, parameter in model.named_parameters()
        if name in named and parameter.grad is not None and parameter.grad.any()
    }
    print(json.dumps({"gradients": differences}), flush=True)
    idle = grads["layers.0.experts.down"].view(EXPERTS, -1)[few:]
    return {
        "output": error(outputs["redline"], outputs["transformers"]),
        "gradients": max(differences.values()),
        "idle experts": float(idle.abs().max()),
    }


def main() -> None:
    began = time.time()
    errors = compare()
    print(json.dumps({"errors": errors}), flush=True)
    networks = {"redline": ours(LAYERS), "transformers": theirs(LAYERS)}
    tokens = torch.randint(0, 1024, (SEQUENCES, LENGTH), device=DEVICE)
    for name, network in networks.items():
        print(json.dumps({"warm-up": name, "seconds": [step(name, network, tokens) for _ in range(2)]}), flush=True)
    times: dict[str, list[float]] = {name: [] for name in networks}
    for pair in range(PAIRS):
        if pair and time.time() - began > BUDGET_S:
            break
        for name in sorted(networks, reverse=pair % 2 == 1):
            times[name].append(step(name, networks[name], tokens))
        print(json.dumps({"pair": pair, "seconds": {name: found[-1] for name, found in times.items()}}), flush=True)
    shape = config(LAYERS)
    attention = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim * shape.hidden_size
    met = LAYERS * (CHOICES * 3 * shape.hidden_size * shape.moe_intermediate_size + attention)
    print("| | tokens/s | of the bound |\n| --- | ---: | ---: |")
    for name, found in times.items():
        speed = SEQUENCES * LENGTH / min(found)
        print(f"| {name} | {speed:,.0f} | {f'{6 * met * speed / PEAK:.0%}' if ON_GPU else ''} |")
    ratios = sorted(theirs_s / ours_s for ours_s, theirs_s in zip(times["redline"], times["transformers"], strict=True))
    print(f"| ratio of pairs, median | {ratios[len(ratios) // 2]:.2f}x | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
    print(f"| largest difference of gradients | {errors['gradients']:.1e} | output {errors['output']:.1e} |")
    print(f"| gradient of experts without tokens | {errors['idle experts']} | must be 0 |")


if __name__ == "__main__":
    main()
