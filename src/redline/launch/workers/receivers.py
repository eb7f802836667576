"""What brings new weights to the engine of a worker process.

our engine                 its own tensors and a second set                                  weight_sync/second_set.py
ours, divided              each rank's part of them, as rank 0 hears of it                   weight_sync/divided.py
an engine of others        a copy in host memory, from which it loads by its own names       weight_sync/loading_set.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from redline.config import EngineRecipe
from redline.config.sections.lora import LoraConfig
from redline.engine import EngineSession, NativeEngine
from redline.engine.adapters.pushed_weights import PushedWeights
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.engine.native.tensor_parallel import TensorParallelEngine
from redline.errors import ConfigError
from redline.launch.kinds import named_for, own_logprobs
from redline.launch.workers.engine_rank import part_of
from redline.models.files.hf import load_decoder
from redline.models.files.sources import model_folder
from redline.models.lora.trainable import add_adapter
from redline.models.prompt_logprobs import prompt_logprobs
from redline.weight_sync.divided import DividedSet
from redline.weight_sync.loading_set import LoadingSet
from redline.weight_sync.receiver import WeightReceiver
from redline.weight_sync.transports.pushed import OTHER_KERNELS


def receiver_of(engine: object, session: EngineSession, recipe: EngineRecipe, lora: LoraConfig | None) -> WeightReceiver:
    """Make the receiver of an engine that was loaded from this recipe, with `lora` for a trainer that trains such an adapter.
    Raises `ConfigError` for an engine that takes no weights."""
    if isinstance(engine, TensorParallelEngine):
        return _divided(engine, session)
    if isinstance(engine, NativeEngine):
        decoder = engine.decoder
        tensors = dict(decoder.named_parameters())
        return WeightReceiver(tensors, session, lambda tokens: prompt_logprobs(decoder, tokens), engine.version)
    if isinstance(engine, PushedWeights | TransformersEngine):
        return _loading(engine, session, recipe, lora)
    raise ConfigError(f"{type(engine).__name__} takes no weights over a connection", "set engine.kind=native")


def _divided(engine: TensorParallelEngine, session: EngineSession) -> WeightReceiver:
    def logprobs(tokens: Sequence[int]) -> Sequence[float]:
        engine.order({"weights": "probe", "tokens": list(tokens)})
        return prompt_logprobs(engine.decoder, tokens)

    return WeightReceiver(DividedSet(part_of(engine, engine.ranks.shard), engine), session, logprobs)


def _loading(
    engine: PushedWeights | TransformersEngine, session: EngineSession, recipe: EngineRecipe, lora: LoraConfig | None
) -> WeightReceiver:
    dtype = getattr(torch, recipe.model.dtype)
    decoder = load_decoder(model_folder(recipe.model.path, recipe.run.seed), torch.device("cpu"), dtype)
    if lora is not None:
        add_adapter(decoder, lora, dtype, recipe.run.seed)
        decoder.to(dtype)
    tensors, named = dict(decoder.named_parameters()), named_for(engine, decoder)
    weights = LoadingSet(tensors, lambda: engine.update_weights(named({})), engine.version)
    return WeightReceiver(weights, session, lambda tokens: own_logprobs(engine, tokens), rounding=OTHER_KERNELS)
