"""The models of a recipe, loaded once: the policy, and a model that judges its answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from redline.config import Config
from redline.errors import ModelError
from redline.models.files.hf import AnyDecoder, load_decoder, load_tokenizer, stop_token_ids, unloaded_decoder
from redline.models.files.sources import model_folder
from redline.models.files.stored import StoredWeights
from redline.telemetry import span
from redline.trainer.parallel.place import Division

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from redline.rollouts.rewards.reward_model import RewardModel


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A policy in memory, and the folder that it came from."""

    decoder: AnyDecoder
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    stored: StoredWeights | None = None
    """Where the decoder has no weights yet, because ranks divide them: what each reads its part from."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A reply ends after any of these tokens."""
        return stop_token_ids(self.folder, self.tokenizer)


def load_policy(config: Config) -> LoadedModel:
    """Load the policy of a recipe to sample from it, in its compute dtype."""
    return _load(config, getattr(torch, config.model.dtype))


def load_trainable_policy(config: Config) -> LoadedModel:
    """Load the policy of a recipe to train it, in float32; where ranks divide its weights, the network without them. Raises
    `ModelError` where the trainer cannot compute its loss."""
    if Division.of(config.trainer).divides_weights:
        return _load_for_ranks(config)
    model = _load(config, torch.float32)
    if not model.decoder.plain_head and model.decoder.logit_cap is None:
        raise ModelError(
            f"{config.model.path}: its logits are more than a product with the output weights and a soft cap, which training"
            " assumes",
            "train a model whose head has no bias or scale",
        )
    return model


def _load(config: Config, dtype: torch.dtype) -> LoadedModel:
    with span("models.load"):
        folder = model_folder(config.model.path, config.run.seed)
        tokenizer = load_tokenizer(folder)
        return LoadedModel(load_decoder(folder, torch.device(config.run.device), dtype), tokenizer, folder)


def _load_for_ranks(config: Config) -> LoadedModel:
    with span("models.load"):
        folder = model_folder(config.model.path, config.run.seed)
        decoder = unloaded_decoder(folder, torch.device(config.run.device))
        return LoadedModel(decoder, load_tokenizer(folder), folder, StoredWeights(folder, decoder.spec))


def load_reward_model(config: Config) -> RewardModel | None:
    """Load the model that scores attempts, where the recipe names one."""
    wanted, device = config.rollouts.reward_model, torch.device(config.run.device)
    if wanted.path is None:
        return None
    from redline.rollouts.rewards.reward_model import RewardModel  # a rank that follows loads policies alone

    with span("models.load"):
        folder, dtype = model_folder(wanted.path, config.run.seed), getattr(torch, config.model.dtype)
        return RewardModel(folder, device, dtype, wanted.max_tokens_per_batch)
