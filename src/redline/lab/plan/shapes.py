"""The shape of a model without its weights: from config.json, the header of a .gguf file, or a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import ConfigError, ModelError
from redline.lab.material.workloads import RANDOM, SHAPES
from redline.lab.plan.gguf_header import config_from_header
from redline.models.files.hf import check_foreign, load_config
from redline.models.files.sources import fetched, packaged_smollm2
from redline.models.files.tiny import SMALL, TINY, shape_config
from redline.models.lora.per_token import refuse_experts
from redline.models.mixture import mixture_of
from redline.models.sizes.memory import adapter_parameters, num_parameters
from redline.models.spec import DecoderSpec, ModelShape, fixed_positions, is_ours, refuse_quantized, spec_from_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_QWEN = {"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "tie_word_embeddings": False,
}


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        **_QWEN,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


NAMED: Mapping[str, Mapping[str, Any]] = {
    **SHAPES,
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-14b": _qwen(5120, 13824, 48, 40, 8, 152064, tied=False),
    "qwen2.5-32b": _qwen(5120, 27648, 64, 40, 8, 152064, tied=False),
    "qwen2.5-72b": _qwen(8192, 29568, 80, 64, 8, 152064, tied=False),
    "llama-3-8b": _LLAMA3
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3-70b": _LLAMA3
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""`model.path: random:NAME` plans for the shape alone. In the words of config.json; family qwen2 unless it says otherwise."""


@dataclass(slots=True, frozen=True)
class Model:
    """Enough of a model to count its bytes and its products."""

    path: str
    shape: ModelShape
    parameters: int
    tied: bool
    """The head is the embedding."""

    @property
    def head_parameters(self) -> int:
        """Parameters of the language-model head: products where a token is predicted."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def body_parameters(self) -> int:
        """Parameters of the layers: products for every token. An embedding that is only looked up has none."""
        return self.parameters - self.head_parameters * (1 if self.tied else 2)

    @property
    def takes_adapter(self) -> bool:
        """Whether a LoRA adapter can stand beside its layers: they are ours, and without experts."""
        return isinstance(self.shape, DecoderSpec) and self.shape.experts is None

    def adapter(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of a LoRA adapter. Raises `ModelError` where the model takes none."""
        if not isinstance(self.shape, DecoderSpec):
            raise ModelError(f"trainer.lora: model family {self.shape.family!r} takes no adapter", "set trainer.lora.rank=0")
        refuse_experts(self.shape, "trainer.lora", "set trainer.lora.rank=0")
        return adapter_parameters(self.shape, rank, targets)


def describe_model(path: str) -> Model:
    """Reads a few kilobytes at most; hub ids are asked for their config.json alone."""
    config = _config(path)
    refuse_quantized(config)
    if is_ours(config):
        spec = spec_from_config(config)
        return Model(path, spec, num_parameters(spec), spec.tied_embeddings)
    return _foreign(path, config)


def classifier_parameters(path: str) -> int:
    """Parameters of a reward model, of any family that transformers has a classifier of."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = _config(path)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ModelError(f"{path}: model family {config.model_type!r} is no classifier", "give the folder of a reward model")
    with torch.device("meta"):
        network = AutoModelForSequenceClassification.from_config(config)
    return sum(parameter.numel() for parameter in network.parameters())


def _config(path: str) -> PretrainedConfig:
    if path.startswith(RANDOM):
        return _named(path.removeprefix(RANDOM))
    if path in ("builtin:tiny", "builtin:small"):
        return shape_config(**(TINY if path == "builtin:tiny" else SMALL))
    if path == "builtin:smollm2-135m-instruct":
        return _demo_config()
    local = Path(path).expanduser()
    if local.is_dir():
        return load_config(local)
    if path.endswith(".gguf"):
        return config_from_header(local)
    return _hub_config(path)


@cache
def _demo_config() -> PretrainedConfig:
    """Its vocabulary has to be stepped over twice."""
    return config_from_header(packaged_smollm2())


def _named(name: str) -> PretrainedConfig:
    from transformers import LlamaConfig, Qwen2Config

    if name not in NAMED:
        raise ConfigError(
            f"model.path = {RANDOM + name!r}: no such shape", f"one of {', '.join(RANDOM + known for known in NAMED)}"
        )
    words = dict(NAMED[name])
    return LlamaConfig(**words) if words.pop("model_type", "qwen2") == "llama" else Qwen2Config(**words)


def _hub_config(hub_id: str) -> PretrainedConfig:
    try:
        folder = fetched(hub_id, ("config.json",))
    except ModelError as error:
        raise ModelError(
            f"{hub_id}: its config.json cannot be fetched",
            f"give a local folder, or a shape that is known here: {', '.join(RANDOM + name for name in NAMED)}",
        ) from error
    return load_config(folder)


def _foreign(path: str, config: PretrainedConfig) -> Model:
    """A family that transformers runs: counted on the meta device, which holds no weights."""
    import torch
    from transformers import AutoModelForCausalLM

    check_foreign(config)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config(decoder=True)  # a family with images has more than one
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise ModelError(f"{path}: model family {config.model_type!r} has no attention", "give a model with attention")
    shape = ModelShape(
        family=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_positions=fixed_positions(text),
        mixture=mixture_of(network),
    )
    tied = network.get_output_embeddings() is None or bool(getattr(config, "tie_word_embeddings", False))
    if tied:
        network.tie_weights()
    return Model(path, shape, sum(parameter.numel() for parameter in network.parameters()), tied)
