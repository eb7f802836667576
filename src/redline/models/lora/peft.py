"""LoRA adapters as PEFT has them, in a folder or as tensors: for a projection W, two thin matrices with W + scale · B A.

Only that is read and written. Whatever else PEFT can put beside a network is refused: it would be silently computed wrongly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import ModelError
from redline.models.files.modes import give_usual_mode

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# fmt: off
KNOWN_KEYS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora",
))
# fmt: on
"""Keys of adapter_config.json that are read here, or say nothing that the tensors and their names do not."""
BASE_IS_KEPT = (None, True, False, "eva", "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the network's own weights as they were."""

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_MODULE = re.compile(rf"(?:model\.)?layers\.(\d+)\.(?:self_attn|mlp)\.({'|'.join(PROJECTIONS)})")


@dataclass(slots=True, frozen=True)
class LowRank:
    """What is added to one projection. Letters: R rank, I inputs, O outputs."""

    a_RI: Tensor
    b_OR: Tensor
    """The scale included."""


@dataclass(slots=True, frozen=True)
class LoraAdapter:
    """An adapter on the host."""

    parts: Mapping[tuple[int, str], LowRank]
    """Layer and projection, such as (3, "q_proj"), to what is added there."""

    @property
    def rank(self) -> int:
        """The largest of its parts."""
        return max(len(part.a_RI) for part in self.parts.values())


@dataclass(slots=True, frozen=True)
class _Scaling:
    alpha: float | None = None
    """None: the rank itself, so that the scale is 1."""
    use_rslora: bool = False
    """Divide by the square root of the rank, not by the rank (rank-stabilized LoRA)."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Ends of module names, as regular expressions, to their own alpha."""

    def of(self, module: str, rank: int) -> float:
        own = (alpha for end, alpha in self.alpha_pattern.items() if re.match(rf"(.*\.)?({end})$", module))
        alpha = next(own, rank if self.alpha is None else self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter(
    source: Path | str | Mapping[str, Tensor], *, alpha: float | None = None, use_rslora: bool = False
) -> LoraAdapter:
    """From a PEFT folder, which says its own alpha, or from tensors by PEFT's names. Raises ModelError."""
    if isinstance(source, Mapping):
        return _assemble(source, _Scaling(alpha, use_rslora), "the adapter")
    folder = Path(source)
    if alpha is not None or use_rslora:
        raise ModelError(f"{folder}: alpha and use_rslora are those of adapter_config.json", "give them with tensors only")
    scaling = _read_config(folder / "adapter_config.json")
    return _assemble(_read_tensors(folder), scaling, str(folder))


def _read_config(path: Path) -> _Scaling:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: unreadable: {error}", "give a folder that PEFT's save_pretrained wrote") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: not a LoRA adapter", "other methods of PEFT are not supported")
    _refuse_features(config, path)
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ModelError(f"{path}: lora_alpha is missing, or no number", "write the alpha that the adapter was trained with")
    return _Scaling(config["lora_alpha"], bool(config.get("use_rslora")), config.get("alpha_pattern") or {})


def _refuse_features(config: Mapping[str, Any], path: Path) -> None:
    extra = [key for key, value in config.items() if value and key not in KNOWN_KEYS and (key, value) != ("bias", "none")]
    if extra:
        raise ModelError(
            f"{path}: {', '.join(sorted(extra))}: not supported", "train plain LoRA, or merge the adapter into the model"
        )
    init = config.get("init_lora_weights")
    if init not in BASE_IS_KEPT:
        raise ModelError(
            f"{path}: init_lora_weights = {init!r} also changed the model's own weights",
            "convert it on saving: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / "adapter_model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: unreadable: {error}", "save the adapter again, as safetensors") from error


def _assemble(tensors: Mapping[str, Tensor], scaling: _Scaling, origin: str) -> LoraAdapter:
    sides: dict[str, dict[str, Tensor]] = {}
    for module, side, tensor in _sort(tensors, origin):
        if side in sides.setdefault(module, {}):
            raise ModelError(f"{origin}: {module} has two lora_{side}", "give the tensors of one adapter")
        sides[module][side] = tensor
    if not sides:
        raise ModelError(f"{origin}: there are no LoRA tensors", "give what peft.get_peft_model_state_dict returns")
    parts = {_place(module, origin): _low_rank(module, pair, scaling, origin) for module, pair in sides.items()}
    return LoraAdapter(parts)


def _sort(tensors: Mapping[str, Tensor], origin: str) -> Iterator[tuple[str, str, Tensor]]:
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"{origin}: {name} is not LoRA's A or B", "give what peft.get_peft_model_state_dict returns")
        yield match["module"], match["side"], tensor


def _place(module: str, origin: str) -> tuple[int, str]:
    match = _MODULE.fullmatch(module)
    if match is None:
        raise ModelError(f"{origin}: LoRA on {module} is not supported", f"target any of {', '.join(PROJECTIONS)}")
    return int(match[1]), match[2]


def _low_rank(module: str, pair: Mapping[str, Tensor], scaling: _Scaling, origin: str) -> LowRank:
    if len(pair) < 2:
        raise ModelError(f"{origin}: {module} has only one of lora_A and lora_B", "save the adapter again")
    # Copies, so that what the caller does to its tensors later changes nothing here.
    a_RI, b_OR = (pair[side].detach().to("cpu", copy=True).float() for side in "AB")
    if not (a_RI.ndim == b_OR.ndim == 2 and len(a_RI) == b_OR.shape[1] > 0):
        raise ModelError(
            f"{origin}: {module}: lora_A {list(a_RI.shape)} and lora_B {list(b_OR.shape)} do not fit", "save the adapter again"
        )
    return LowRank(a_RI, b_OR * scaling.of(module, len(a_RI)))


# ── out ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tensor_name(layer: int, projection: str, side: str) -> str:
    """What PEFT calls A or B of one projection."""
    block = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_{side}.weight"


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    use_rslora: bool,
    targets: Sequence[str],
    base: str,
) -> None:
    """A folder for `PeftModel.from_pretrained`: tensors by PEFT's names, in float32, and adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    # Copies: the tensors are views of stacked ones, which safetensors refuses.
    state = {name: tensor.detach().to("cpu", copy=True).float().contiguous() for name, tensor in tensors.items()}
    weights = folder / "adapter_model.safetensors"
    save_file(state, weights, metadata={"format": "pt"})
    give_usual_mode(weights)
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_rslora": use_rslora,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
