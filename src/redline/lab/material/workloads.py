"""Whole settings by one word, and networks by their shape. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RANDOM = "random:"
"""`model=random:NAME` makes a network of that shape on the device, with weights drawn there; nothing is read from disk."""

_QWEN = {"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny-64k": {
        **_QWEN,
        "vocab_size": 49280,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Shapes of family qwen2, in the words of its config.json."""

_ON_GPU = {"device": "cuda", "dtype": "bfloat16", "engine": {"max_num_batched_tokens": 32768}}
_W5 = {"model": "random:qwen2.5-0.5b", "prompt_tokens": 128, "new_tokens": 512, **_ON_GPU}
_W4 = {"prompts": 512, "prompt_tokens": 256, "new_tokens": 548, "lengths": "long-tailed", "longest": 4096}
_T1 = {"model": "random:qwen2.5-0.5b", "device": "cuda", "dtype": "bfloat16"}
_C2 = {"model": "builtin:smollm2-135m-instruct", "device": "cpu", "dtype": "bfloat16"}

WORKLOADS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "generate": {
        "W1": {"model": "random:qwen2.5-0.5b", "prompts": 512, "prompt_tokens": 128, "new_tokens": 512, **_ON_GPU},
        "W2": {"model": "random:qwen2.5-0.5b", "prompts": 64, "prompt_tokens": 512, "n": 8, "new_tokens": 512, **_ON_GPU},
        "W3": {"model": "random:qwen2.5-7b", "prompts": 512, "prompt_tokens": 128, "new_tokens": 256, **_ON_GPU},
        "W4": {"model": "random:qwen2.5-0.5b", **_W4, **_ON_GPU},
        "W5-1": {"prompts": 1, **_W5},
        "W5-4": {"prompts": 4, **_W5},
        "W5-16": {"prompts": 16, **_W5},
        "C1": {
            "model": "builtin:smollm2-135m-instruct",
            "prompts": 64,
            "new_tokens": 128,
            "device": "cpu",
            "dtype": "bfloat16",
        },
    },
    "n-sampling": {
        "N1": {"model": "random:qwen2.5-0.5b", "prompts": 10, "prompt_tokens": 2048, "new_tokens": 128, **_ON_GPU},
    },
    "trainer": {
        "T1": {**_T1, "sequences": 32, "tokens": 512, "steps": 4},
        "T1-TAIL": {**_T1, "sequences": 32, "tokens": 512, "steps": 4, "lengths": "long-tailed", "longest": 4096},
        "E1-TRAIN": {**_T1, "sequences": 512, "tokens": 384, "prompt_tokens": 128, "group_size": 8},
        "C2-TRAIN": {
            **_C2,
            "sequences": 64,
            "tokens": 72,
            "lengths": "long-tailed",
            "longest": 112,
            "prompt_tokens": 48,
            "group_size": 8,
            "trainer": {"max_tokens_per_micro_batch": 2048},
        },
    },
    "memory": {
        "T1": {**_T1, "tokens": 512},
        "T1-LONG": {**_T1, "tokens": 4096},
        "C2-TRAIN": {**_C2, "tokens": 112, "limit_bytes": 4_000_000_000, "first_tokens": 2048},
    },
    "e2e": {
        "E1": {
            **_T1,
            "task": "words",
            "prompt_tokens": 128,
            "groups_per_step": 64,
            "group_size": 8,
            "max_new_tokens": 256,
            "lags": (0,),
            "pairs": 3,
            "steps": 6,
            "trainer": {"learning_rate": 1e-5},
            "engine": {"max_num_batched_tokens": 32768, "kv_cache_memory_bytes": 4 * 2**30},
        },
        "C2": {
            **_C2,
            "task": "sums",
            "groups_per_step": 8,
            "group_size": 8,
            "max_new_tokens": 64,
            "trainer": {"learning_rate": 1e-5, "max_tokens_per_micro_batch": 4096},
            "engine": {"kv_cache_memory_bytes": 2**30},
        },
    },
    "serialize": {"S1": {}},
}
"""Case → name → settings. Whatever else the command line says comes on top."""

QUICK: Mapping[str, Sequence[str]] = {
    "generate": ("model=builtin:small", "prompts=16", "new_tokens=32", "pairs=6", "warmup_s=5"),
    "n-sampling": ("model=builtin:small", "prompt_tokens=256", "new_tokens=16", "n=1,4", "pairs=6", "warmup_s=5"),
    "rollout": ("pairs=6", "warmup_s=5", "groups_per_step=4", "max_new_tokens=32"),
    "trainer": ("model=builtin:small", "sequences=8", "tokens=128", "pairs=6", "warmup_s=5"),
    "e2e": ("lags=0,1", "groups_per_step=4", "group_size=4", "max_new_tokens=16", "warmup_steps=2", "steps=3"),
    "weight-sync": ("model=builtin:small", "pairs=6", "warmup_s=5"),
    "memory": (
        "model=builtin:small",
        "tokens=256",
        "first_tokens=2048",
        "most_tokens=4096",
        "tolerance=0.5",
        "limit_bytes=1_000_000_000",
    ),
    "transfer": ("sizes=65536,16777216", "overlap_bytes=67108864", "pairs=6"),
    "serialize": ("trajectories=1000", "warmup_s=2", "handed_over=8,32"),
    "telemetry": ("samples=30", "pairs=6", "steps=2", "whole_steps=10"),
}
"""Case → what `redline bench all --quick` asks of it: a few seconds each, the set-up not counted."""
