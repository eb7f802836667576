"""The result of a run: the trained policy as files that other programs read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
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
        with replacing_folder(folder.adapter) as saved:
            write_adapter(saved, config, model, masters, step)
    with replacing_folder(folder.model) as saved:
        write_model(saved, config, model, masters, step)


def write_model(folder: Path, config: Config, model: LoadedModel, masters: Mapping[str, Tensor] | None, step: int) -> None:
    """Fill a folder with the policy as Hugging Face has it, an adapter merged. `masters` are the trained weights, by default
    those of the network. Raises `OSError` where the disk does not take it."""
    decoder, tensors = model.decoder, masters
    if config.trainer.lora.rank:
        assert isinstance(decoder, Decoder), "only such a network takes an adapter"
        tensors = merged_tensors(decoder, masters)
    with _errors_of_the_disk(folder):
        save_folder(folder, decoder, model.folder, getattr(torch, config.model.dtype), tensors)
        record_step(folder, step)


def write_adapter(folder: Path, config: Config, model: LoadedModel, masters: Mapping[str, Tensor] | None, step: int) -> None:
    """Fill a folder with the adapter as PEFT has it. Raises `OSError` where the disk does not take it."""
    assert isinstance(model.decoder, Decoder), "only such a network takes an adapter"
    with _errors_of_the_disk(folder):
        save_adapter(folder, model.decoder, config.trainer.lora, str(model.folder), masters)
        record_step(folder, step)


@contextmanager
def _errors_of_the_disk(folder: Path) -> Iterator[None]:
    """safetensors has its own class for them, with the number in the text; a full disk is the OSError that it is."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
