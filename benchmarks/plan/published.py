"""What the planner says for GPUs that we have not, beside what others published for them.

    python benchmarks/plan/published.py

TensorRT-LLM's figures are of its own documents: docs/source/performance.md of v0.6.1 (and v0.5, for the L40S), and
docs/source/performance/perf-overview.md of v1.0. Its weights and keys have 8 or 4 bits where its tables say so, and are
planned so here: fewer bytes, more products a second. Where a table names no batch, as many sequences run as there is memory
for. The efficiencies are ours, measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from redline.lab.plan.calibration import rates_of
from redline.lab.plan.devices import DEVICES
from redline.lab.plan.shapes import NAMED, Model, describe_model
from redline.lab.plan.timing import decode_cost, network_cost, prompt_cost, read_context

LLAMA_7B: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}
BATCHED = 8192
"""Prompt tokens at once."""
MOST_ROWS = 2048
ROOM = 0.9
"""Of a device's memory, that weights and cache may have."""


@dataclass(slots=True, frozen=True)
class Published:
    device: str
    model: str
    bits: int
    prompt: int
    new: int
    tokens_per_s: float
    rows: int | None = None
    version: str = "1.0"


PUBLISHED = [
    Published("a100", "llama-7b", 16, 128, 128, 5586, 384, "0.6.1"),
    Published("a100", "llama-7b", 16, 128, 2048, 1928, 60, "0.6.1"),
    Published("a100", "llama-7b", 16, 2048, 128, 591, 52, "0.6.1"),
    Published("l40s", "llama-7b", 8, 128, 128, 3240, 64, "0.5"),
    Published("l40s", "llama-7b", 8, 128, 2048, 1622, 64, "0.5"),
    Published("l40s", "llama-7b", 8, 2048, 128, 581, 32, "0.5"),
    Published("h100", "llama-3-8b", 8, 128, 2048, 22714),
    Published("h100", "llama-3-8b", 8, 1000, 1000, 15220),
    Published("h100", "llama-3-8b", 8, 2048, 128, 3450),
    Published("h200", "llama-3-70b", 8, 128, 2048, 4336),
    Published("h200", "llama-3-70b", 8, 1000, 1000, 2909),
    Published("h200", "llama-3-70b", 8, 2048, 128, 442),
    Published("b200", "llama-3-70b", 4, 128, 2048, 9922),
    Published("b200", "llama-3-70b", 4, 1000, 1000, 7007),
    Published("b200", "llama-3-70b", 4, 2048, 128, 1339),
]


def main() -> None:
    print("| device, TensorRT-LLM | model, bits | prompt → new | rows | published | planned | planned / published |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for case in PUBLISHED:
        rows, planned = plan(case)
        print(
            f"| {case.device}, {case.version} | {case.model}, {case.bits} | {case.prompt} → {case.new} | {rows} "
            f"| {case.tokens_per_s:,.0f} | {planned:,.0f} | {planned / case.tokens_per_s:.2f} |"
        )


def plan(case: Published) -> tuple[int, float]:
    """Rows, and tokens a second."""
    device, model = DEVICES[case.device], model_of(case.model)
    rates = rates_of(device)
    rates = replace(rates, flops=rates.flops * 16 / case.bits)
    wide = network_cost(model, torch.bfloat16)
    # Keys keep 8 bits where weights have 4.
    kv_bytes = wide.kv_bytes_per_token * max(case.bits, 8) // 16
    cost = replace(wide, bytes_per_param=case.bits / 8, kv_bytes_per_token=kv_bytes)
    left = ROOM * device.memory_bytes - cost.weight_bytes(math.inf)
    rows = case.rows or min(MOST_ROWS, int(left / cost.kv_bytes_per_token / (case.prompt + case.new)))
    layers, vocabulary = model.shape.num_layers, model.shape.vocab_size
    step = decode_cost(cost, layers, vocabulary, rows, read_context(case.prompt, case.new, 1), rates)
    whole = prompt_cost(cost, layers, rows, case.prompt, BATCHED, rates) + step.times(case.new - 1)
    return rows, rows * case.new / whole.seconds(rates.generation)


def model_of(name: str) -> Model:
    return describe_model(f"random:{name}")


if __name__ == "__main__":
    NAMED["llama-7b"] = LLAMA_7B  # type: ignore[index]
    main()
