"""Hugging Face folders in and out: config.json, safetensors, tokenizer files.

Our fused parameters are the row-wise concatenation of theirs; `stored.py` knows which. Families that we do
not have a network for are read, and named on the way out, by transformers."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from redline.errors import ModelError, boundary
from redline.models.decoder import Decoder
from redline.models.files.modes import give_usual_mode
from redline.models.files.stored import MISMATCH, StoredTensors, layout_of
from redline.models.generic import GenericDecoder
from redline.models.layers.rope import rotary_frequencies
from redline.models.spec import fixed_positions, is_ours, refuse_quantized, spec_from_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

AnyDecoder = Decoder | GenericDecoder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)


VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
"""Of which a folder with a tokenizer has one."""


def load_config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    with boundary() as caught:  # each family checks its own values, and raises what it likes
        return AutoConfig.from_pretrained(folder)
    raise ModelError(f"{folder}: unreadable config.json: {caught.error}", "give a Hugging Face model folder") from caught.error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with boundary() as caught:
        return AutoTokenizer.from_pretrained(folder)
    raise ModelError(
        f"{folder}: {_no_tokenizer(folder, caught.error)}", "the folder needs tokenizer.json beside the weights"
    ) from caught.error


def _no_tokenizer(folder: Path, error: Exception | None) -> str:
    """Why it cannot be loaded: that there is none takes transformers three lines to say."""
    is_there = any((folder / name).exists() for name in VOCABULARIES)
    return f"unreadable tokenizer: {error}" if is_there else "no tokenizer"


def empty_decoder(config: PretrainedConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """The network with uninitialised weights."""
    spec = spec_from_config(config)
    frequencies, factor = rotary_frequencies(config)
    with torch.device("meta"):
        decoder = Decoder(spec, torch.empty(0), factor)
    decoder = decoder.to(dtype).to_empty(device=device)
    decoder.rotary_frequencies = frequencies.to(device)
    return decoder


def load_decoder(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> AnyDecoder:
    """The network with the folder's weights, converted to `dtype`: ours where we have the family, else transformers'."""
    config = load_config(folder)
    refuse_quantized(config)
    if not is_ours(config):
        return GenericDecoder(load_recompute_model(folder, device, dtype))
    decoder = empty_decoder(config, device, dtype)
    weights = StoredTensors(folder)
    weights.refuse_more_layers(decoder.spec.num_layers)
    with torch.no_grad():
        for name, source in layout_of(decoder.spec).items():
            ours, filled = decoder.get_parameter(name), 0
            for rows in weights.rows(source, 0, len(ours), ours.shape[1:]):
                ours[filled : filled + len(rows)].copy_(rows)
                filled += len(rows)
    return decoder


def unloaded_decoder(folder: Path, device: torch.device | str = "cpu") -> Decoder:
    """The network in float32, without weights: for processes that divide it among them before each reads its part
    (`stored.StoredWeights`). `device` is where they will compute. Raises `ModelError` for a family that transformers runs."""
    config = load_config(folder)
    refuse_quantized(config)
    if not is_ours(config):
        raise ModelError(
            f"model family {config.model_type!r} is run by transformers, and ranks cannot divide its layers",
            "leave trainer.sharding and trainer.pipeline_parallel_size out",
        )
    decoder = empty_decoder(config, "meta")
    decoder.rotary_frequencies = rotary_frequencies(config)[0].to(device)
    return decoder


def check_folder(folder: Path, *, with_weights: bool = True) -> int:
    """Read a model folder without its weights, and refuse what could not be trained from it; of the weights, where they must be
    there, only the names and the first dimensions. Returns the longest sequence that the model has positions for."""
    config = load_config(folder)
    refuse_quantized(config)
    if not is_ours(config):
        check_foreign(config)
        if with_weights:
            StoredTensors(folder)
        return fixed_positions(config.get_text_config(decoder=True))
    spec = spec_from_config(config)
    if with_weights:
        weights = StoredTensors(folder)
        weights.refuse_more_layers(spec.num_layers)
        for source in layout_of(spec).values():
            weights.check(source)
    return spec.max_positions


def check_foreign(config: PretrainedConfig) -> None:
    """Check a model of a family that transformers runs. Whether it runs on our attention is known only once it has."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"model family {config.model_type!r} is no causal language model", "give the folder of a causal language model"
        )
    text = config.get_text_config()
    changed = {name: getattr(text, name, None) for name in ("logit_scale", "logits_scaling")}
    for name, value in changed.items():
        if value not in (None, 1):
            raise ModelError(
                f"model family {config.model_type!r} has {name} = {value}: its logits are more than a product with the output"
                " weights and a soft cap, which training assumes",
                "train a model whose head has no bias or scale",
            )


def load_recompute_model(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The folder as transformers has it, for `TransformersEngine`. Eager attention: other kinds leave out what some families
    need, such as a cap on the scores, without a word."""
    from transformers import AutoModelForCausalLM

    load_config(folder)
    StoredTensors(folder)
    options = {"dtype": dtype, "attn_implementation": "eager", "use_safetensors": True, "output_loading_info": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bars of others would cut through our own display
            model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(
            f"{folder}: transformers cannot load it: {error}", "give the folder of a causal language model"
        ) from error
    if report["missing_keys"]:
        raise ModelError(
            f"{folder}: the weights lack {', '.join(sorted(report['missing_keys']))}",
            MISMATCH,
        )
    return model.to(device).eval()


def load_sharing_model(folder: Path, decoder: AnyDecoder) -> PreTrainedModel:
    """The folder as transformers has it, on the tensors of a decoder that was loaded from it: what is written to the decoder's
    weights in place is written to both."""
    weight = decoder.output_weight
    network = load_recompute_model(folder, weight.device, weight.dtype)
    for name, tensor in network_tensors(decoder).items():
        module, _, parameter = name.rpartition(".")
        setattr(network.get_submodule(module), parameter, torch.nn.Parameter(tensor, requires_grad=False))
    network.tie_weights()
    return network


def network_tensors(decoder: AnyDecoder, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every parameter by its name in transformers' network, as views; `tensors` replaces some of the decoder's own values."""
    values = {name: parameter.detach() for name, parameter in decoder.named_parameters()} | dict(tensors or {})
    if isinstance(decoder, GenericDecoder):
        return {name.removeprefix("network."): value for name, value in values.items()}
    named: dict[str, Tensor] = {}
    for name, source in layout_of(decoder.spec).items():
        if source.stacked is None:
            named |= zip(source.names, values[name].split(source.rows), strict=True)
        else:  # transformers' network holds together what checkpoints hold apart
            named[source.stacked] = values[name].unflatten(0, (_experts_of(decoder), -1))
    return named


def _experts_of(decoder: Decoder) -> int:
    assert decoder.spec.experts is not None, "only weights of experts are stacked"
    return decoder.spec.experts.count


def hf_tensors(decoder: AnyDecoder, tensors: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, rows of our storage) for every weight; `tensors` replaces the decoder's own values."""
    values = dict(decoder.named_parameters()) if tensors is None else tensors
    if isinstance(decoder, GenericDecoder):
        yield from _checkpoint_tensors(decoder, values)
        return
    for name, source in layout_of(decoder.spec).items():
        yield from zip(source.names, values[name].detach().split(source.rows), strict=True)


def _checkpoint_tensors(decoder: GenericDecoder, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that checkpoints hold. Tied weights have one name; transformers keeps some weights of a layer
    stacked that checkpoints hold apart, and knows how to take them apart again."""
    from transformers.core_model_loading import revert_weight_conversion

    network = decoder.network
    kept = network.state_dict().keys() & {name for name, _ in network.named_buffers()}
    state = {name.removeprefix("network."): value.detach() for name, value in values.items()}
    state |= {name: network.get_buffer(name) for name in kept}
    yield from revert_weight_conversion(network, state).items()


def save_folder(
    folder: Path, decoder: AnyDecoder, template: Path, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write an ordinary model folder; config and tokenizer come from `template`, the folder the model was loaded from."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    # Copies: safetensors refuses views into our fused storage. Buffers keep their dtype, which may be an integer one.
    buffers = {name.removeprefix("network.") for name, _ in decoder.named_buffers()}
    state = {
        name: tensor.to(device="cpu", dtype=tensor.dtype if name in buffers else dtype, copy=True)
        for name, tensor in hf_tensors(decoder, tensors)
    }
    save_torch_state_dict(state, str(folder), metadata={"format": "pt"})
    give_usual_mode(*folder.glob("*.safetensors"))
    config = json.loads((template / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (template / name).is_file():
            shutil.copyfile(template / name, folder / name)


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Everything that ends an answer: the tokenizer's end token and those of generation_config.json, in whose absence
    transformers goes by those of config.json."""
    found = {tokenizer.eos_token_id} - {None}
    path = folder / "generation_config.json"
    path = path if path.is_file() else folder / "config.json"
    if path.is_file():
        found |= _listed_stop_tokens(path)
    return tuple(sorted(found))


def _listed_stop_tokens(path: Path) -> set[int]:
    try:
        listed = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path}: unreadable: {error}", "download it again, or delete it") from error
    tokens = set(listed if isinstance(listed, list) else [listed]) - {None}
    if not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"{path}: eos_token_id = {listed!r}: no token ids", "write whole numbers")
    return tokens
