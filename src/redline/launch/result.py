"""The result of a run: the trained policy as files that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from redline.config import Config
from redline.config.trained_step import record_step
from redline.launch.models import LoadedModel
from redline.models.decoder import Decoder
from redline.models.files.hf import save_folder
from redline.models.lora.trainable import merged_tensors, save_adapter
from redline.telemetry import RunFolder
from redline.telemetry.files.durable import replacing_folder


def save_model(config: Config, model: LoadedModel, masters: Mapping[str, Tensor] | None, folder: RunFolder, step: int) -> None:
    """Write the policy as a Hugging Face folder; an adapter also by itself, as PEFT has it. Each says the
    `step` that it is of. Blocks until both are written."""
    if config.trainer.lora.rank:
        write_adapter(folder.adapter, config, model, masters, step)
    write_model(folder.model, config, model, masters, step)


def write_model(path: Path, config: Config, model: LoadedModel, masters: Mapping[str, Tensor] | None, step: int) -> None:
    """Write the policy as a Hugging Face folder, an adapter merged, in place of what is at `path`. `masters` are the trained
    weights, by default those of the network."""
    decoder, tensors = model.decoder, masters
    if config.trainer.lora.rank:
        assert isinstance(decoder, Decoder), "only such a network takes an adapter"
        tensors = merged_tensors(decoder, masters)
    with replacing_folder(path) as saved:
        save_folder(saved, decoder, model.folder, getattr(torch, config.model.dtype), tensors)
        record_step(saved, step)


def write_adapter(path: Path, config: Config, model: LoadedModel, masters: Mapping[str, Tensor] | None, step: int) -> None:
    """Write the adapter as PEFT has it, in place of what is at `path`."""
    assert isinstance(model.decoder, Decoder), "only such a network takes an adapter"
    with replacing_folder(path) as saved:
        save_adapter(saved, model.decoder, config.trainer.lora, str(model.folder), masters)
        record_step(saved, step)
