"""The shape of a decoder, read from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from redline.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that `Decoder` implements."""


@dataclass(slots=True, frozen=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    """Longest sequence the positions were made for, or the sliding window where that is shorter."""
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm on each query and key head before rotation (Qwen 3)."""

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections inside the fused one."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim


def spec_from_config(config: PretrainedConfig) -> DecoderSpec:
    """Refuses what we would silently compute wrongly."""
    family = config.model_type
    if family not in FAMILIES:
        raise ModelError(f"model family {family!r} is not supported", f"use a model of one of: {', '.join(FAMILIES)}")
    if getattr(config, "quantization_config", None):
        raise ModelError("the weights are quantized", "give the folder of the unquantized model; training needs its precision")
    if config.hidden_act != "silu":
        raise ModelError(f"activation {config.hidden_act!r} is not supported", "models of the supported families use silu")
    # Llama and Mistral have one switch for all four projections; Qwen 2 has biases on q, k and v only, without a switch.
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        max_positions=_max_positions(config),
        tied_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def _max_positions(config: PretrainedConfig) -> int:
    """Inside its window, sliding attention is full attention; beyond it we would be wrong, so we stop there."""
    window = getattr(config, "sliding_window", None)
    slides = window is not None and (
        "sliding_attention" in (getattr(config, "layer_types", None) or []) or config.model_type == "mistral"
    )
    return min(config.max_position_embeddings, window) if slides else config.max_position_embeddings
