"""Engines of others, by `engine.kind`, as the engine of a run or by themselves.

kind          runs                     weights in training
transformers  in this process          the trainer's own tensors; a merged copy where an adapter is trained
vllm          in this process          loaded by vLLM at every version, under Hugging Face names
sglang        beside it, by SGLang     the same, by SGLang
openai        a server at engine.url   sent to `redline serve`, or written where SGLang or vLLM load them
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from redline.addresses import fits_header
from redline.config import Config, EngineRecipe
from redline.config.installation import how_to_install
from redline.config.processor import bfloat16_flags
from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.openai_server import OpenAIServerEngine
from redline.engine.adapters.pushed_weights import PushedWeights
from redline.engine.adapters.sglang import SglangEngine
from redline.engine.adapters.stepped import SteppedAdapter
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.engine.adapters.vllm import VllmEngine
from redline.errors import ConfigError
from redline.launch.models import LoadedModel
from redline.launch.sleeping import Sleeper
from redline.launch.stages import RunEngine
from redline.models.decoder import Decoder
from redline.models.files.hf import (
    AnyDecoder,
    hf_tensors,
    load_recompute_model,
    load_sharing_model,
    network_tensors,
    save_folder,
)
from redline.models.lora.trainable import merged_tensors
from redline.ports import Trainer
from redline.types import GenerateRequest, SamplingParams, WeightUpdate
from redline.weight_sync import SharedStorage, WeightProtocol
from redline.weight_sync.transport import Transport
from redline.weight_sync.transports.http import HttpWeights, WeightServer
from redline.weight_sync.transports.http_calls import HttpServer
from redline.weight_sync.transports.model_servers import SglangServer, VllmServer
from redline.weight_sync.transports.pushed import Named, PushedTensors
from redline.weight_sync.transports.redline_server import RedlineServer
from redline.weight_sync.transports.watched_servers import WatchedServers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGED: Mapping[str, type[VllmEngine] | type[SglangEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
"""Kinds that are packages of their own."""
SLEEP_MODE = {"vllm": "enable_sleep_mode", "sglang": "enable_memory_saver"}
"""Kind → the argument without which it cannot sleep."""

OtherEngine = TransformersEngine | SteppedAdapter
"""All that are not ours."""


@dataclass(slots=True, frozen=True)
class OtherSide:
    """An engine of others, and what brings the trainer's weights to it."""

    engine: RunEngine
    transport: Transport
    close: Callable[[], None] = lambda: None
    sleeper: Sleeper | None = None
    """The engine, where it sleeps while the trainer works."""
    join: Callable[[WeightProtocol], None] = lambda weight_sync: None
    """Says who brings an engine that was started again to the current version."""


def check_kind(config: Config) -> None:
    """Raise `ConfigError` where the engine that a recipe names cannot be trained with on this machine. Loads no model."""
    engine = config.engine
    if engine.kind == "openai":
        _check_server(config)
    check_package(engine)
    if engine.kind == "sglang" and config.run.device == "cpu":
        raise ConfigError("engine.kind = sglang: it needs a GPU, and run.device = cpu", "set engine.kind to vllm or native")
    _check_bfloat16(engine.kind, config.model.dtype, config.run.device)


def _check_bfloat16(kind: str, dtype: str, device: str) -> None:
    """Raise `ConfigError` where vLLM would end the process by an instruction that the CPU does not have."""
    if (kind, dtype, device) == ("vllm", "bfloat16", "cpu") and platform.machine() == "aarch64" and not bfloat16_flags():
        why = "model.dtype = bfloat16: vLLM's kernels for ARM need a CPU with instructions for it, and this one has none"
        raise ConfigError(why, "set model.dtype=float32, or engine.kind=native")


def _check_server(config: Config) -> None:
    """Raise `ConfigError` unless the server takes what is trained. Does not ask the server."""
    variable = config.engine.weights_token_env
    if variable is None and config.engine.weights_folder is None:
        raise ConfigError(
            "engine.kind = openai: a server with OpenAI's API takes no new weights, and would sample from the policy as it was"
            " before training",
            "start `redline serve MODEL --weights-token-env NAME` and set engine.weights_token_env=NAME, or set"
            " engine.weights_folder and engine.weights_server, or train with another engine.kind; `redline bench generate` and"
            " `env play` can use any server",
        )
    if variable is not None and not os.environ.get(variable):
        why = f"engine.weights_token_env = {variable}: the environment variable is not set"
        raise ConfigError(why, f"export {variable}=<the token that the server was started with>")
    if variable is not None and not fits_header(os.environ[variable]):
        why = f"engine.weights_token_env = {variable}: the token has a character that no HTTP header takes"
        raise ConfigError(why, f"has it a line break? export {variable} without it")


def check_package(engine: EngineConfig) -> None:
    """Raise `ConfigError` where the engine's package is not installed."""
    if engine.kind in PACKAGED and importlib.util.find_spec(engine.kind) is None:
        raise ConfigError(
            f"engine.kind = {engine.kind}: the package {engine.kind} is not installed", how_to_install(engine.kind)
        )


def load_other_engine(
    recipe: EngineRecipe, folder: Path, tokenizer: PreTrainedTokenizerBase, adapters: Mapping[str, Path]
) -> OtherEngine:
    """Make an engine that is not ours from the files of its model, for a verb that does not train."""
    engine, dtype = recipe.engine, recipe.model.dtype
    if engine.kind == "transformers":
        _refuse_adapters(adapters, "transformers", "leave the adapters out, or set engine.kind to native")
        network = load_recompute_model(folder, torch.device(recipe.run.device), getattr(torch, dtype))
        return TransformersEngine(network, engine, tokenizer)
    if engine.kind == "openai":
        _refuse_adapters(adapters, "openai", "start the server with them, and name one by the request's `model`")
        return _server(engine)
    _check_bfloat16(engine.kind, dtype, recipe.run.device)
    ranks = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}[engine.kind]
    divided = {ranks: engine.tensor_parallel_size} if engine.tensor_parallel_size > 1 else {}
    return _packaged(engine, folder, dtype, adapters=adapters, **divided)


def sample_from(
    decoder: AnyDecoder, folder: Path, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> OtherEngine:
    """Make an engine that is not ours beside a decoder that was loaded from a folder, in the same type."""
    if config.kind == "transformers":
        return TransformersEngine(load_sharing_model(folder, decoder), config, tokenizer)
    if config.kind == "openai":
        return _server(config)
    return _packaged(config, folder, str(decoder.output_weight.dtype).removeprefix("torch."))


def _packaged(config: EngineConfig, folder: Path, dtype: str, **settings: Any) -> VllmEngine | SglangEngine:
    check_package(config)
    return PACKAGED[config.kind](folder, config, dtype=dtype, **settings)


def _server(config: EngineConfig, push_weights: Callable[[WeightUpdate], None] | None = None) -> OpenAIServerEngine:
    return OpenAIServerEngine(
        str(config.url),
        model=config.served_model,
        api_key_env=config.api_key_env,
        max_concurrent=config.max_num_seqs,
        timeout_s=config.timeout_s,
        push_weights=push_weights,
    )


def _refuse_adapters(adapters: Mapping[str, Path], kind: str, hint: str) -> None:
    if adapters:
        raise ConfigError(f"engine.kind = {kind}: it loads no adapters ({', '.join(adapters)})", hint)


def make_other_engine(config: Config, model: LoadedModel, trainer: Trainer) -> OtherSide:
    """Make the engine of a run that is not ours, with a transport to it."""
    if config.engine.kind == "transformers":
        return _transformers(config, model, trainer)
    if config.engine.kind == "openai":
        return _trained_server(config, model, trainer)
    settings = {SLEEP_MODE[config.engine.kind]: True} if config.placement.sleep else {}
    engine = _packaged(config.engine, model.folder, config.model.dtype, **settings)
    sleeper = engine if config.placement.sleep else None
    return OtherSide(engine, _pushed(engine, model.decoder, trainer), engine.close, sleeper)


def _pushed(engine: TransformersEngine | VllmEngine | SglangEngine, decoder: AnyDecoder, trainer: Trainer) -> PushedTensors:
    """Make the transport to an engine that loads weights by their Hugging Face names."""
    trained, named = trainer.weights().tensors, named_for(engine, decoder)
    return PushedTensors(engine, trained, named, lambda tokens: own_logprobs(engine, tokens))


def own_logprobs(engine: TransformersEngine | PushedWeights, tokens: Sequence[int]) -> list[float] | None:
    """What an engine of others makes of each token of a prompt after the first; None where it cannot say now. For the thread
    that has the engine between two steps."""
    if engine.has_work:  # pieces of other requests would come with the probe's
        return None
    asked = GenerateRequest(np.array(tokens, np.int32), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=True))
    [[completion]] = engine.generate([asked])
    assert completion.prompt_logprobs is not None
    return completion.prompt_logprobs[1:].tolist()


def _trained_server(config: Config, model: LoadedModel, trainer: Trainer) -> OtherSide:
    """A server whose weights follow the trainer's. What it samples meanwhile says so by its versions. An adapter reaches it
    merged: of the weights only those that it changes are sent again. Raises `ConfigError` for a server that samples from an
    adapter of its own: what is sent are the weights of its base."""
    dtype = getattr(torch, config.model.dtype)

    def whole(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(dtype) for name, tensor in _whole(model.decoder, trained).items()}

    sender = _sender(config.engine, model, dtype)
    engine = _server(config.engine, push_weights=lambda update: None)  # the transport has brought them
    if (base := engine.base_of_adapter) is not None:
        why = f"engine.served_model = {config.engine.served_model}: the server has an adapter of {base} under this name"
        raise ConfigError(why, f"set engine.served_model to {base}, whose weights are trained, or leave it out")
    transport = HttpWeights([sender], trainer.weights().tensors, whole, engine)

    def join(weight_sync: WeightProtocol) -> None:
        engine.watch(WatchedServers(transport, weight_sync.at_rest))

    def close() -> None:
        engine.close()
        transport.close()

    return OtherSide(engine, transport, close, join=join)


def _sender(config: EngineConfig, model: LoadedModel, dtype: torch.dtype) -> WeightServer:
    token = os.environ[config.weights_token_env] if config.weights_token_env else None
    server = HttpServer(str(config.url).rstrip("/").removesuffix("/v1"), token, config.timeout_s)
    if config.weights_server is None:
        return RedlineServer(server)

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_folder(folder, model.decoder, model.folder, dtype, tensors)

    kinds = {"sglang": SglangServer, "vllm": VllmServer}
    return kinds[config.weights_server](server, Path(str(config.weights_folder)), write, model.folder)


def _transformers(config: Config, model: LoadedModel, trainer: Trainer) -> OtherSide:
    decoder, weight = model.decoder, model.decoder.output_weight
    if config.trainer.lora.rank:  # transformers' layers know nothing of our adapter
        network = load_recompute_model(model.folder, weight.device, weight.dtype)
        engine = TransformersEngine(network, config.engine, model.tokenizer)
        return OtherSide(engine, _pushed(engine, decoder, trainer))
    engine = TransformersEngine(load_sharing_model(model.folder, decoder), config.engine, model.tokenizer)
    read = dict(engine.network.named_parameters())

    def in_engine(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return network_tensors(decoder, trained)

    engine_tensors = {name: read[name].detach() for name in in_engine(trainer.weights().tensors)}
    return OtherSide(engine, SharedStorage(engine_tensors, in_engine))


def _whole(decoder: AnyDecoder, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every weight by our name, given those that are trained; an adapter is merged into those it belongs to."""
    values = {name: parameter.detach() for name, parameter in decoder.named_parameters()} | dict(trained)
    return merged_tensors(decoder, values) if isinstance(decoder, Decoder) else values


def named_for(engine: object, decoder: AnyDecoder) -> Callable[[Mapping[str, Tensor]], Named]:
    """Return a function that gives every weight the name by which this engine loads it, an adapter merged into those it belongs
    to: that of transformers' network for a `TransformersEngine`, else that of Hugging Face's checkpoints."""
    if isinstance(engine, TransformersEngine):
        return lambda trained: network_tensors(decoder, _whole(decoder, trained)).items()
    return lambda trained: hf_tensors(decoder, _whole(decoder, trained))
