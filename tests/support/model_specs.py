"""Specs of models that no test loads."""

from __future__ import annotations

from redline.models.spec import DecoderSpec

QWEN_HALF_BILLION = DecoderSpec(
    family="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_positions=32_768,
    intermediate_size=4864,
    norm_eps=1e-6,
    tied_embeddings=True,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
