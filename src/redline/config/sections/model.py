"""Section `model`: the policy."""

from __future__ import annotations

from typing import Literal

from redline.config.section import Section


class ModelConfig(Section):
    path: str
    """A Hugging Face folder, a run folder, a .gguf file, a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or a built-in:
    `builtin:smollm2-135m-instruct`, `builtin:tiny`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of engine and trainer; `auto` is bfloat16 where the device has it. Master weights are always float32."""
