"""The weights of a model by its size alone, on the device: whole where they fit, else some of its layers, all alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from redline.errors import ConfigError
from redline.lab.bench.settings import WeightSyncSettings
from redline.lab.material.networks import INIT_STD, make_network
from redline.lab.plan.shapes import describe_model
from redline.models.decoder import Decoder
from redline.models.spec import DecoderSpec

SIZES: Mapping[str, str] = {
    "0.5b": "random:qwen2.5-0.5b",
    "7b": "random:qwen2.5-7b",
    "32b": "random:qwen2.5-32b",
    "70b": "random:llama-3-70b",
}
"""`model_size` → the shape that it stands for."""
USABLE = 0.85
"""The part of free memory that is taken: buckets, and what others allocate meanwhile, need some."""


@dataclass(slots=True, frozen=True)
class SizedWeights:
    """Tensors that stand for a model."""

    tensors: Mapping[str, Tensor]
    num_layers: int
    """Layers that are here."""
    whole_layers: int
    """Layers of the model."""
    whole_bytes: int
    """Bytes of the model."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def scale(self) -> float:
        """Bytes of the model over bytes that are here: what is measured takes so many times as long."""
        return self.whole_bytes / self.num_bytes

    @property
    def note(self) -> str:
        """What the reader must know of a part; empty where all is here."""
        if self.num_layers == self.whole_layers:
            return ""
        return (
            f"{self.num_layers} of {self.whole_layers} layers were measured; the rest is by count, × {self.scale:.2f} by bytes"
        )


def make_weights(settings: WeightSyncSettings, num_sets: int) -> SizedWeights:
    """Make the trainer's weights, so small that `num_sets` sets of them fit on the device. Raises ConfigError where not even
    one layer does."""
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    if settings.model_size is None:
        decoder = make_network(settings.model, device, dtype, settings.seed).decoder
        tensors = {name: tensor.detach() for name, tensor in decoder.named_parameters()}
        layers = decoder.spec.num_layers
        return SizedWeights(tensors, layers, layers, sum(tensor.nbytes for tensor in tensors.values()))
    spec = describe_model(SIZES[settings.model_size]).shape
    assert isinstance(spec, DecoderSpec)
    whole = _num_bytes(spec, dtype)
    layers = _layers_that_fit(spec, dtype, USABLE * _free_bytes(device) / num_sets)
    tensors = _draw(replace(spec, num_layers=layers), device, dtype, settings.seed)
    return SizedWeights(tensors, layers, spec.num_layers, whole)


def _layers_that_fit(spec: DecoderSpec, dtype: torch.dtype, limit: float) -> int:
    none, one = (_num_bytes(replace(spec, num_layers=layers), dtype) for layers in (0, 1))
    layers = int((limit - none) // (one - none))
    if layers < 1:
        raise ConfigError("redline bench weight-sync: not even one layer of this size fits", "take a smaller model_size")
    return min(layers, spec.num_layers)


def _num_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    return sum(tensor.nbytes for tensor in _undrawn(spec, dtype).values())


def _undrawn(spec: DecoderSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors without memory."""
    with torch.device("meta"):
        decoder = Decoder(spec, torch.zeros(spec.head_dim // 2)).to(dtype)
    return {name: tensor.detach() for name, tensor in decoder.named_parameters()}


def _draw(spec: DecoderSpec, device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.empty(tensor.shape, dtype=dtype, device=device).normal_(std=INIT_STD, generator=generator)
        for name, tensor in _undrawn(spec, dtype).items()
    }


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
