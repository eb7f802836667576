"""Rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redline.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STATIC_KINDS = ("linear", "llama3", "yarn")
"""Rope types whose frequencies do not change with the length of the sequence."""


def rotary_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Inverse frequencies float32[D / 2] and the factor on cos and sin, for any static rope type of transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        # As transformers has it, to the bit: at position 131,071 the last bit of a frequency is 0.008 of an angle.
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    if kind not in STATIC_KINDS:
        raise ModelError(f"rope type {kind!r} is not supported", f"one of default, {', '.join(STATIC_KINDS)}")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return frequencies.float(), float(factor)


def rotary_table(frequencies: Tensor, factor: float, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D / 2] for the given positions."""
    angles = positions_T.to(torch.float32)[:, None, None] * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(heads_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head: the half-split convention of Hugging Face checkpoints."""
    first, second = heads_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
