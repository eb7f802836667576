"""What a plan is held against: runs small enough to measure in a few minutes, and unlike each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

HALF, SEVEN, DEMO, SMALL = "random:qwen2.5-0.5b", "random:qwen2.5-7b", "builtin:smollm2-135m-instruct", "builtin:small"


@dataclass(slots=True, frozen=True)
class Point:
    """One run. Those that calibrate give the plan its efficiencies, and are not held against it."""

    name: str
    phase: Literal["training", "generation"]
    settings: Mapping[str, Any]
    calibrates: bool = False
    limit_s: float = 240.0

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "phase": self.phase, "settings": dict(self.settings), "calibrates": self.calibrates}


def training(
    name: str,
    model: str,
    sequences: int,
    tokens: int,
    *,
    prompt: int = 1,
    group: int = 1,
    calibrates: bool = False,
    **trainer: Any,
) -> Point:
    """A step on sequences of so many tokens, prompts included; in one micro-batch unless the trainer's section has another."""
    section = {"max_tokens_per_micro_batch": sequences * tokens, **trainer}
    settings = {
        "model": model,
        "dtype": "bfloat16",
        "sequences": sequences,
        "tokens": tokens,
        "prompt_tokens": prompt,
        "group_size": group,
        "trainer": section,
    }
    return Point(name, "training", settings, calibrates)


def generation(
    name: str, model: str, prompts: int, prompt: int, new: int, *, n: int = 1, calibrates: bool = False, **engine: Any
) -> Point:
    section = {"max_num_seqs": prompts * n, "max_num_batched_tokens": 8192, "max_model_len": prompt + new, **engine}
    settings = {
        "model": model,
        "dtype": "bfloat16",
        "prompts": prompts,
        "n": n,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "engine": section,
    }
    return Point(name, "generation", settings, calibrates)


LORA: dict[str, Any] = {"lora": {"rank": 16}}

CUDA_POINTS = (
    training("0.5B, 32 x 512", HALF, 32, 512, calibrates=True),
    training("0.5B, 32 x 512 in 8 micro-batches", HALF, 32, 512, calibrates=True, max_tokens_per_micro_batch=2048),
    training("7B, 8 x 512, LoRA", SEVEN, 8, 512, calibrates=True, **LORA),
    generation("0.5B, 128 x 128 → 128", HALF, 128, 128, 128, calibrates=True),
    training("0.5B, 8 x 512", HALF, 8, 512),
    training("0.5B, 32 x 512, selective", HALF, 32, 512, gradient_checkpointing="selective"),
    training("0.5B, 32 x 512, full", HALF, 32, 512, gradient_checkpointing="full"),
    training("0.5B, 32 x 512, LoRA", HALF, 32, 512, **LORA),
    training("0.5B, 32 x 512, offload", HALF, 32, 512, offload_optimizer=True),
    training("0.5B, 32 x 512, int8 states", HALF, 32, 512, optimizer_states="int8"),
    training("0.5B, 4 x 4096", HALF, 4, 4096),
    training("0.5B, 8 groups of 8 x (128 + 256)", HALF, 64, 384, prompt=128, group=8),
    training("7B, 16 x 512, int8 states", SEVEN, 16, 512, optimizer_states="int8"),
    training("7B, 16 x 512, int8 states, full", SEVEN, 16, 512, optimizer_states="int8", gradient_checkpointing="full"),
    training("7B, 8 x 512, int8 states, offload", SEVEN, 8, 512, optimizer_states="int8", offload_optimizer=True),
    training("7B, 32 x 512, LoRA", SEVEN, 32, 512, **LORA),
    training("7B, 32 x 512, LoRA, full", SEVEN, 32, 512, gradient_checkpointing="full", **LORA),
    generation("0.5B, 256 x 128 → 128", HALF, 256, 128, 128),
    generation("0.5B, 32 x 512, n = 8 → 128", HALF, 32, 512, 128, n=8),
    generation("7B, 64 x 128 → 64", SEVEN, 64, 128, 64),
    generation("7B, 512 x 128 → 64", SEVEN, 512, 128, 64),
)

CPU_POINTS = (
    training("135M, 4 x 64", DEMO, 4, 64, calibrates=True),
    training("135M, 8 x 32 in 8 micro-batches", DEMO, 8, 32, calibrates=True, max_tokens_per_micro_batch=32),
    training("135M, 6 x 128", DEMO, 6, 128, calibrates=True),
    generation("135M, 16 x 16 → 16", DEMO, 16, 16, 16, calibrates=True),
    generation("135M, 2 x 16 → 16", DEMO, 2, 16, 16, calibrates=True),
    training("135M, 8 x 64", DEMO, 8, 64),
    training("135M, 8 x 64, selective", DEMO, 8, 64, gradient_checkpointing="selective"),
    training("135M, 8 x 64, full", DEMO, 8, 64, gradient_checkpointing="full"),
    training("135M, 8 x 64, LoRA", DEMO, 8, 64, **LORA),
    training("13M, 8 x 64, int8 states", SMALL, 8, 64, optimizer_states="int8"),
    training("135M, 4 x 256", DEMO, 4, 256),
    training("135M, 2 groups of 8 x (64 + 32)", DEMO, 16, 96, prompt=64, group=8),
    generation("135M, 32 x 32 → 16", DEMO, 32, 32, 16),
    generation("135M, 4 x 64, n = 4 → 16", DEMO, 4, 64, 16, n=4),
)
