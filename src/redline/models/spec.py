"""The shape of a decoder, read from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from redline.errors import ConfigError, ModelError
from redline.models.layers.rope import STATIC_KINDS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those of `FAMILIES` whose every token goes through all weights of a layer: LoRA adapters can stand beside them."""
FAMILIES = (*DENSE_FAMILIES, "qwen3_moe")
"""Values of `model_type` that `Decoder` implements."""
NO_LIMIT = 2**31 - 1
"""Positions of a network that has none, such as a state-space model."""


@dataclass(slots=True, frozen=True)
class Mixture:
    """The experts of a network that transformers runs."""

    parameters: int
    """Of all experts of all layers."""
    share: float | None
    """Experts that a token goes to over all of its layer; None where that cannot be told."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """What engine and trainer must know about a network: enough to size a KV cache and to refuse what does not fit."""

    family: str
    """`model_type` of config.json."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    """Layers with attention."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest sequence the positions were made for, or the sliding window where that is shorter."""
    mixture: Mixture | None = field(default=None, kw_only=True)
    """The experts, where transformers runs the layers; None without."""
    windows: tuple[int, ...] = field(default=(), kw_only=True)
    """Of each layer that has a window: the tokens that a token sees, itself the last."""


@dataclass(slots=True, frozen=True)
class ExpertsSpec:
    """The MLPs of a mixture of experts: each token goes through some of them."""

    count: int
    per_token: int
    """Experts that a token goes to."""
    intermediate_size: int
    """Inner columns of one expert."""
    normalized: bool
    """The weights of a token's experts add up to 1; else they are what the softmax over all experts gave them."""
    layers: tuple[int, ...]
    """The layers that have experts. Others have an MLP that every token goes through."""


@dataclass(slots=True, frozen=True)
class DecoderSpec(ModelShape):
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP, or experts in its place."""

    intermediate_size: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm on each query and key head before rotation (Qwen 3)."""
    experts: ExpertsSpec | None = None
    """None: every layer has a single MLP."""

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of a layer; None where it has a single MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """Inner columns of an MLP, of an expert, or of both where only some layers have experts."""
        if self.experts is None:
            return (self.intermediate_size,)
        of_layers = () if len(self.experts.layers) == self.num_layers else (self.intermediate_size,)
        return (*of_layers, self.experts.intermediate_size)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections inside the fused one."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim


def is_ours(config: PretrainedConfig) -> bool:
    """Whether `Decoder` computes this model."""
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    return (config.rope_parameters or {}).get("rope_type", "default") in ("default", *STATIC_KINDS)


def refuse_undivided(family: object, setting: str) -> None:
    """Raise `ConfigError` for a family whose layers transformers runs: nothing divides these."""
    if family not in FAMILIES:
        raise ConfigError(
            f"{setting}: model family {family!r} is run by transformers, and its layers are not divided",
            f"leave {setting.partition(' ')[0]} out",
        )


def refuse_quantized(config: PretrainedConfig) -> None:
    if getattr(config, "quantization_config", None):
        raise ModelError("the weights are quantized", "give the folder of the unquantized model; training needs its precision")


def spec_from_config(config: PretrainedConfig) -> DecoderSpec:
    """The shape of a model of one of `FAMILIES`. Raises `ModelError` for what `Decoder` would compute wrongly."""
    family = config.model_type
    if family not in FAMILIES:
        raise ModelError(f"model family {family!r} is not supported", f"use a model of one of: {', '.join(FAMILIES)}")
    refuse_quantized(config)
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
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=_experts(config) if family == "qwen3_moe" else None,
    )


def _experts(config: PretrainedConfig) -> ExpertsSpec | None:
    sparse = tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in (config.mlp_only_layers or ()) and config.num_experts and (layer + 1) % config.decoder_sparse_step == 0
    )
    if not sparse:
        return None
    return ExpertsSpec(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalized=bool(config.norm_topk_prob),
        layers=sparse,
    )


def position_limit(config: PretrainedConfig) -> int:
    """Longest sequence that a network of any family has positions for."""
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((limit for limit in named if limit), NO_LIMIT)


def fixed_positions(config: PretrainedConfig) -> int:
    """Longest sequence whose rotary frequencies do not depend on how long it is. LongRoPE has other ones beyond the length the
    model was first trained for, so that keys already in a cache would be wrong."""
    ropes = dict(getattr(config, "rope_parameters", None) or {})
    each = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    originals = [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]
    return min([position_limit(config), *originals])


def _max_positions(config: PretrainedConfig) -> int:
    """Inside its window, sliding attention is full attention; beyond it we would be wrong, so we stop there."""
    window = getattr(config, "sliding_window", None)
    slides = window is not None and (
        "sliding_attention" in (getattr(config, "layer_types", None) or []) or config.model_type in ("mistral", "qwen3_moe")
    )
    return min(config.max_position_embeddings, window) if slides else config.max_position_embeddings
