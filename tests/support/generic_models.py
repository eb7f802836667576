"""Random networks of families that redline has no network of its own for, by what they need.

transformers makes the weights and is the oracle, as in `small_models`."""

from __future__ import annotations

from typing import Any

from support.small_models import SHAPE, VOCAB_SIZE, rope
from transformers import AutoConfig, PretrainedConfig

SMALL = {**SHAPE, "head_dim": 8}
OLDER = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}
LATENT = {**SHAPE, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
TWO_ROPES = {"full_attention": rope("linear", rope_theta=500.0, factor=4.0), "sliding_attention": rope("default")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def family(name: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(name, **changes)


ROUTED: dict[str, PretrainedConfig] = {
    "gpt2": family("gpt2", **OLDER),
    "gpt_neox": family("gpt_neox", **SHAPE),
    "phi, biased head": family("phi", **SHAPE),
    "phi3": family("phi3", **SHAPE),
    "gemma": family("gemma", **{**SMALL, "head_dim": 16}),
    "gemma2": family("gemma2", **SMALL, sliding_window=8, query_pre_attn_scalar=12, attn_logit_softcapping=2.0),
    "gemma2, no cap on scores": family("gemma2", **SMALL, sliding_window=24, attn_logit_softcapping=None),
    "gemma3_text": family(
        "gemma3_text",
        **SMALL,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=12,
        rope_parameters=TWO_ROPES,
    ),
    "olmo2": family("olmo2", **SHAPE),
    "granite, scaled head": family("granite", **SHAPE, logits_scaling=8.0, attention_multiplier=0.2, residual_multiplier=0.5),
    "starcoder2, tied": family("starcoder2", **SHAPE, tie_word_embeddings=True),
    "stablelm": family("stablelm", **SHAPE),
    "mixtral": family("mixtral", **SHAPE),
    "qwen2_moe": family("qwen2_moe", **SHAPE, **EXPERTS, shared_expert_intermediate_size=32),
    "cohere, scaled head": family("cohere", **SHAPE),
    "opt": family("opt", **{**SHAPE, "ffn_dim": 80, "word_embed_proj_dim": 24}, do_layer_norm_before=False),
    "deepseek_v3, other value size": family(
        "deepseek_v3",
        **LATENT,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
"""Attention is all their tokens see of each other, and `attend` does all of it."""

MORE_ROUTED: dict[str, PretrainedConfig] = {
    "arcee": family("arcee", **SHAPE),
    "apertus": family("apertus", **SHAPE),
    "biogpt": family("biogpt", **SHAPE),
    "bitnet": family("bitnet", **SHAPE),
    "cohere2": family("cohere2", **SHAPE, sliding_window=24),
    "ctrl": family("ctrl", **OLDER, dff=80),
    "ernie4_5": family("ernie4_5", **SMALL),
    "exaone4": family("exaone4", **SHAPE, sliding_window=24),
    "flex_olmo": family("flex_olmo", **SHAPE),
    "glm": family("glm", **SMALL),
    "glm4": family("glm4", **SMALL),
    "gpt_bigcode": family("gpt_bigcode", **OLDER),
    "granitemoe": family("granitemoe", **SHAPE),
    "helium": family("helium", **SMALL),
    "hunyuan_v1_dense": family("hunyuan_v1_dense", **SMALL),
    "llama4_text, chunks": family(
        "llama4_text", **SMALL, num_local_experts=2, intermediate_size_mlp=80, attention_chunk_size=32
    ),
    "minicpm3": family("minicpm3", **LATENT, qk_nope_head_dim=8, v_head_dim=12),
    "nemotron": family("nemotron", **SHAPE),
    "olmo": family("olmo", **SHAPE),
    "olmoe": family("olmoe", **SHAPE),
    "persimmon": family("persimmon", **SHAPE),
    "phi3, longrope": family(
        "phi3",
        **SHAPE,
        original_max_position_embeddings=32,
        rope_parameters=rope("longrope", factor=8.0, short_factor=[1.0] * 4, long_factor=[4.0, 3.0, 2.0, 1.5]),
    ),
    "seed_oss": family("seed_oss", **SMALL),
    "smollm3": family("smollm3", **SHAPE),
}

REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "gpt_oss": (
        family("gpt_oss", **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
        "takes s_aux",
    ),
    "falcon": (family("falcon", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=6), "0 times"),
    "bloom": (family("bloom", vocab_size=VOCAB_SIZE, hidden_size=48, n_layer=2, n_head=6), "0 times"),
    "gptj": (family("gptj", **OLDER, rotary_dim=4), "0 times"),
    "mamba": (family("mamba", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2), "0 times"),
    "rwkv": (
        family("rwkv", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, attention_hidden_size=48),
        "0 times",
    ),
    "lfm2": (family("lfm2", **SHAPE, layer_types=["conv", "full_attention"]), "1 times"),
}
"""Why they cannot run on `attend`."""

MORE_REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "codegen": (family("codegen", **{**OLDER, "n_head": 4}, rotary_dim=4), "0 times"),
    "diffllama": (family("diffllama", **SHAPE), "4 times"),
    "falcon, alibi": (
        family("falcon", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, alibi=True),
        "0 times",
    ),
    "falcon_mamba": (family("falcon_mamba", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2), "0 times"),
    "gpt_neo": (
        family(
            "gpt_neo",
            vocab_size=VOCAB_SIZE,
            hidden_size=48,
            num_layers=2,
            num_heads=6,
            attention_types=[[["global", "local"], 1]],
            window_size=24,
            max_position_embeddings=256,
        ),
        "0 times",
    ),
    "mamba2": (
        family("mamba2", vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2, num_heads=12, head_dim=8, n_groups=2),
        "0 times",
    ),
    "minimax": (family("minimax", **SHAPE), "1 times"),
    "mpt": (family("mpt", vocab_size=VOCAB_SIZE, d_model=48, n_layers=2, n_heads=6), "0 times"),
    "recurrent_gemma": (
        family(
            "recurrent_gemma",
            **{key: value for key, value in SHAPE.items() if key != "max_position_embeddings"},
            lru_width=48,
        ),
        "0 times",
    ),
    "xglm": (
        family(
            "xglm",
            vocab_size=VOCAB_SIZE,
            d_model=48,
            ffn_dim=80,
            num_layers=2,
            attention_heads=6,
            max_position_embeddings=256,
        ),
        "",
    ),
}
