"""Random networks of every family as Hugging Face folders, small enough to make and run in milliseconds.

transformers makes the weights and is the oracle; redline only ever reads the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 131
"""A prime: neither a power of two nor a multiple of any block size."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}


def llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**{**SHAPE, **changes})


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **parameters}


CONFIGS: dict[str, PretrainedConfig] = {
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, untied": llama(tie_word_embeddings=False),
    "llama, attention biases": llama(attention_bias=True),
    "llama, all biases": llama(attention_bias=True, mlp_bias=True),
    "llama, one head each": llama(num_attention_heads=2, num_key_value_heads=2),
    "llama, one key head": llama(num_key_value_heads=1),
    "llama, another eps and theta": llama(rms_norm_eps=1e-2, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama, llama3 rope": llama(
        rope_parameters=rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        )
    ),
    "llama, linear rope": llama(rope_parameters=rope("linear", factor=4.0)),
    "mistral, own head size": MistralConfig(**SHAPE, head_dim=16, tie_word_embeddings=False),
    "qwen2, untied": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2, yarn rope": Qwen2Config(**SHAPE, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3, own head size": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3, biases": Qwen3Config(**SHAPE, head_dim=16, attention_bias=True, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe, some layers": Qwen3MoeConfig(
        **{**SHAPE, "num_hidden_layers": 4}, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True
    ),
}


def random_model(config: PretrainedConfig, seed: int = 0, std: float = 0.1) -> PreTrainedModel:
    """Every weight drawn, norms and biases included, so that nothing is where its neutral value would hide a mistake."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, seed, std)
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int, std: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * drawn if name.endswith("norm.weight") else std * drawn)


def write_model(folder: Path, config: PretrainedConfig, seed: int = 0, std: float = 0.1) -> PreTrainedModel:
    """A folder, and the model that transformers wrote there."""
    model = random_model(config, seed, std)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary]: one sequence, by transformers."""
    return model(tokens[None].long()).logits[0]


def random_tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))
