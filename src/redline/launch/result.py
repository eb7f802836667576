"""The result of a run: the trained policy as files that other programs read."""

from __future__ import annotations

from collections.abc import Mapping

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
    dtype, decoder, tensors = getattr(torch, config.model.dtype), model.decoder, masters
    if config.trainer.lora.rank:
        assert isinstance(decoder, Decoder), "only such a network takes an adapter"
        with replacing_folder(folder.adapter) as adapter:
            save_adapter(adapter, decoder, config.trainer.lora, str(model.folder), tensors)
            record_step(adapter, step)
        tensors = merged_tensors(decoder, tensors)
    with replacing_folder(folder.model) as saved:
        save_folder(saved, decoder, model.folder, dtype, tensors)
        record_step(saved, step)
