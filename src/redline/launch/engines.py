"""The one way to make an engine: of a decoder that is loaded, or of the files that a recipe names.

a decoder       ──make_engine──► NativeEngine            training, the lab
EngineRecipe    ──load_engine──► LoadedEngine            redline serve, redline.Engine
                                   ├ NativeEngine            the model in this process
                                   ├ TensorParallelEngine    engine.tensor_parallel_size > 1: divided among processes
                                   ├ engines of others       any other engine.kind (`kinds.py`)
                                   └ TransformersEngine      a family that does not run on our attention
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from redline.config import EngineRecipe
from redline.config.sections.engine import EngineConfig
from redline.config.sections.lora import LoraConfig
from redline.engine import EngineSession, NativeEngine
from redline.engine.adapters.stepped import SteppedAdapter
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.engine.native.cache.sizing import block_size_for
from redline.engine.native.lora import make_bank
from redline.engine.native.quantized import check_shape, products_of, refuse_without_fp8
from redline.engine.native.tensor_parallel import PROGRAM, STEP_TIMEOUT_S, TensorParallelEngine
from redline.errors import ConfigError, ModelError
from redline.kernels.cpu.compiled import tell_why_none
from redline.launch.kinds import OtherEngine, load_other_engine, sample_from
from redline.launch.models import LoadedModel
from redline.launch.placement import check_engine_place
from redline.models.files.hf import AnyDecoder, load_config, load_decoder, load_recompute_model, load_tokenizer, stop_token_ids
from redline.models.files.sources import model_folder
from redline.models.layers import few_rows
from redline.models.lora.trainable import add_adapter
from redline.models.spec import is_ours, spec_from_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, frozen=True)
class LoadedEngine:
    """An engine, and what its model's files say beside the weights."""

    engine: NativeEngine | OtherEngine
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    why_broken: Callable[[], str | None] | None = None
    """Returns why the engine can never end its step; None where nothing but the process itself can break it."""
    close: Callable[[], None] = lambda: None
    """Ends the processes that the engine has started."""

    @property
    def max_positions(self) -> int:
        """The most tokens of one sequence: what the model has positions for, and the KV cache room."""
        return min(self.engine.limits.max_len, self.engine.limits.cache_tokens)

    def session(self) -> EngineSession:
        """The owner of the engine; `start` gives it a thread."""
        return EngineSession(self.engine, self.why_broken, _wait_for_devices)


def _wait_for_devices() -> None:
    """Block until the GPUs have done what they were given: who holds an engine may write its weights."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def make_engine(
    decoder: AnyDecoder,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    shares_device: bool = False,
) -> NativeEngine:
    """Make an engine of ours that samples from a decoder where it lies, without a copy; with `shares_device`, while a trainer
    computes there. It needs a tokenizer for stop strings only. Raises `ConfigError` for a recipe that names another engine."""
    refuse_other_kinds(config)
    return NativeEngine(decoder, config, tokenizer, shares_device=shares_device)


def tell_what_is_missing(decoder: AnyDecoder, tell: Callable[[str], None]) -> None:
    """Tell, once in a process, why our engine is slower on this CPU than it could be. Compiles what its steps would compile."""
    weight = decoder.output_weight
    if weight.is_cpu:
        few_rows.products_of(weight)
    tell_why_none(tell)


def refuse_other_kinds(config: EngineConfig) -> None:
    """Raise `ConfigError` for a recipe that names another engine than ours, where only ours will do."""
    if config.kind != "native":
        why = f"engine.kind = {config.kind}: only redline's own engine does what is asked here"
        raise ConfigError(why, "leave engine.kind out")


def check_quantization(config: EngineConfig, folder: Path | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `RedlineError` for a machine, or a model, that cannot be sampled in fewer bits as `engine.quantization` says; of a
    model whose folder is still to be made only the machine is looked at. Compiles the products of whole numbers."""
    if config.quantization == "none":
        return
    if folder is not None:
        described = load_config(folder)
        check_shape(spec_from_config(described) if is_ours(described) else None, config.quantization)
    if config.quantization == "fp8":
        refuse_without_fp8(device, dtype, block_size_for(config, device))
    else:
        products_of(config.quantization)


def engine_of(model: LoadedModel, config: EngineConfig) -> NativeEngine | OtherEngine:
    """Make the engine that `engine.kind` names for a policy that is loaded and not trained; a server has its own weights."""
    if config.kind == "native":
        return make_engine(model.decoder, config, model.tokenizer)
    return sample_from(model.decoder, model.folder, config, model.tokenizer)


def load_engine(
    recipe: EngineRecipe,
    adapters: Mapping[str, Path] | None = None,
    *,
    lora: LoraConfig | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
    rank_program: Sequence[str] = PROGRAM,
    tell: Callable[[str], None] = lambda text: None,
) -> LoadedEngine:
    """Load the model of a resolved recipe into the fastest engine that runs it, with LoRA adapters by name. With `lora` the
    network itself has an adapter, as the trainer's has that trains one. A step of an engine of several processes may take
    `step_timeout_s`, and its other processes run `rank_program`. Raises `RedlineError` for a model that there is not, or that
    none runs."""
    check_engine_place(recipe)
    folder = model_folder(recipe.model.path, recipe.run.seed)
    tokenizer = load_tokenizer(folder)
    ends = stop_token_ids(folder, tokenizer)
    device, dtype = torch.device(recipe.run.device), getattr(torch, recipe.model.dtype)
    if recipe.engine.kind != "native":
        other = load_other_engine(recipe, folder, tokenizer, adapters or {})
        close = other.close if isinstance(other, SteppedAdapter) else lambda: None
        return LoadedEngine(other, tokenizer, ends, close=close)
    if recipe.engine.tensor_parallel_size > 1:
        divided = TensorParallelEngine(
            folder, recipe.engine, device, dtype, step_timeout_s=step_timeout_s, program=rank_program
        )
        return LoadedEngine(divided, tokenizer, ends, divided.why_broken, divided.close)
    check_quantization(recipe.engine, folder, device, dtype)
    try:
        decoder = load_decoder(folder, device, dtype)
        if lora is not None:
            add_adapter(decoder, lora, dtype, recipe.run.seed)
            decoder.to(dtype)
        native = NativeEngine(decoder, recipe.engine, tokenizer, bank=make_bank(decoder, recipe.engine))
    except ModelError as error:
        if is_ours(load_config(folder)):
            raise
        if adapters:
            why = f"{recipe.model.path}: LoRA needs a model of the Llama or Qwen families"
            raise ModelError(why, "leave the adapters out") from error
        tell(f"{error.message}; it runs on transformers' own attention, slowly")
        return LoadedEngine(
            TransformersEngine(load_recompute_model(folder, device, dtype), recipe.engine, tokenizer), tokenizer, ends
        )
    for name, adapter in (adapters or {}).items():
        native.load_adapter(name, adapter)
    tell_what_is_missing(decoder, tell)
    return LoadedEngine(native, tokenizer, ends)
