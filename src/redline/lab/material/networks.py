"""The network under test, once for each side: from a folder, or drawn on the device in a given shape."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from redline.errors import ModelError
from redline.lab.material.workloads import RANDOM, SHAPES
from redline.models.files.hf import AnyDecoder, empty_decoder, hf_tensors, load_config, load_decoder, load_tokenizer
from redline.models.files.sources import model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

INIT_STD = 0.02


@dataclass(slots=True, frozen=True)
class Network:
    config: PretrainedConfig
    folder: Path | None
    """None for a shape."""
    decoder: AnyDecoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.folder is None:
            raise ModelError("a shape has no tokenizer", "give prompt_tokens")
        return load_tokenizer(self.folder)

    def as_transformers(self) -> PreTrainedModel:
        """The same weights as transformers would hold them, with the attention it chooses by itself. A copy, as a user of
        transformers alone would have one."""
        from transformers import AutoModelForCausalLM

        head = self.decoder.output_weight
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bars of others would cut through our own display
            if self.folder is not None:
                model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=head.dtype).to(head.device)
            else:
                with head.device:
                    model = AutoModelForCausalLM.from_config(self.config, dtype=head.dtype)
                _copy_weights(self.decoder, model)
        return model.eval()

    @contextlib.contextmanager
    def as_folder(self) -> Iterator[Path]:
        """What a program that only knows folders can be given; of a shape it holds config.json and no weights."""
        if self.folder is not None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="redline-bench-") as name:
            self.config.save_pretrained(name)
            yield Path(name)


def make_network(model: str, device: torch.device, dtype: torch.dtype, seed: int) -> Network:
    if model.startswith(RANDOM):
        config = shape_config(model.removeprefix(RANDOM))
        return Network(config, None, random_decoder(config, device, dtype, seed))
    folder = model_folder(model, seed)
    return Network(load_config(folder), folder, load_decoder(folder, device, dtype))


def random_decoder(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int) -> AnyDecoder:
    """Weights from a normal distribution, norms 1, biases 0, drawn where they stay."""
    decoder = empty_decoder(config, device, dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=INIT_STD, generator=generator)
    return decoder


def shape_config(name: str) -> PretrainedConfig:
    """The config of one of `SHAPES`."""
    from transformers import Qwen2Config

    return Qwen2Config(**SHAPES[name], architectures=["Qwen2ForCausalLM"], bos_token_id=None, eos_token_id=None)


@torch.no_grad()
def _copy_weights(decoder: AnyDecoder, model: PreTrainedModel) -> None:
    targets = dict(model.named_parameters())
    for name, tensor in hf_tensors(decoder):
        targets[name].copy_(tensor)
