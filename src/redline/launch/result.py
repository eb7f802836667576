"""The result of a run: the trained policy as files that other programs read."""

from __future__ import annotations

import torch

from redline.config import Config
from redline.launch.stages import Stages
from redline.models.decoder import Decoder
from redline.models.files.hf import save_folder
from redline.models.lora.trainable import merged_tensors, save_adapter
from redline.telemetry import RunFolder
from redline.telemetry.files.durable import replacing_folder


def save_model(config: Config, stages: Stages, folder: RunFolder) -> None:
    """Write the policy as a Hugging Face folder; an adapter also by itself, as PEFT has it. Blocks until both are written."""
    dtype, tensors = getattr(torch, config.model.dtype), stages.trainer.masters
    if config.trainer.lora.rank:
        assert isinstance(stages.decoder, Decoder)
        with replacing_folder(folder.adapter) as adapter:
            save_adapter(adapter, stages.decoder, config.trainer.lora, str(stages.source), tensors)
        tensors = merged_tensors(stages.decoder, tensors)
    with replacing_folder(folder.model) as model:
        save_folder(model, stages.decoder, stages.source, dtype, tensors)
