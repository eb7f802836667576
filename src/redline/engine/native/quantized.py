"""A second network that samples in fewer bits (`engine.quantization`): every linear layer multiplies by a copy of its weight,
made anew for every version. Norms, biases, adapters and the embedding are the first one's. In whole numbers of 8 or 16 bits on
a CPU, where the head has a copy, too; in 8-bit floating point on a GPU (`fp8.py`).

Prompts, decode steps and guesses all go through it. Where they round differently between its products, as they do in float32, a
number may fall on another whole one, and a draw near a border change. Logprobs are those of its distribution; how far that is
from the trainer's is `trainer/mismatch_kl`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from redline.config.sections.engine import Quantization
from redline.errors import ConfigError, ModelError
from redline.kernels.available import has_triton
from redline.kernels.cpu.compiled import why_none
from redline.kernels.cpu.quantized import LINE, QuantizedProducts, quantized_products
from redline.models.copies import second_network
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.lora.trainable import AdaptedLinear
from redline.models.spec import DecoderSpec, ModelShape
from redline.telemetry import span

KEY = "engine.quantization"
HINT = f"set {KEY}=none"
HEAD_SIZES = (16, 32, 64, 128, 256)
"""Those of `kernels/decode/attention.py`, which asks for triton."""
FP8_CAPABILITY = (8, 9)
"""The first devices whose tensor cores take such numbers: Ada, then Hopper."""


class QuantizedLinear(nn.Module):
    """A linear layer in whole numbers, with the adapter that is trained beside it, where there is one."""

    def __init__(self, source: nn.Linear, products: QuantizedProducts) -> None:
        super().__init__()
        self._source = (source,)
        """In a tuple: no part of this network."""
        self.products = products
        self.packed = products.room(source.weight)

    @property
    def source(self) -> nn.Linear:
        return self._source[0]

    @property
    def bias(self) -> Tensor | None:
        return self.source.bias

    def renew(self) -> None:
        """Take the weight as it is now."""
        self.products.pack(self.source.weight, self.packed)

    def forward(self, x_TI: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        y_TO = self.products.product(x_TI.float(), self.packed, self.source.out_features, bias).to(x_TI.dtype)
        return self.source.add(x_TI, y_TO) if isinstance(self.source, AdaptedLinear) else y_TO


class QuantizedCopy(ABC):
    """A second network with other linear layers. Its weights are those of the first only after `renew`."""

    network: Decoder

    def __init__(self, first: Decoder) -> None:
        self._first = first
        self._take_layers()
        self._is_current = False

    def forget(self) -> None:
        """The weights of the first network are others."""
        self._is_current = False

    def renew(self) -> None:
        """Make it the first network as it is now, after `forget`."""
        if self._is_current:
            return
        with span("engine.quantize"):
            self._take_layers()
            self.write()
        self._is_current = True

    @abstractmethod
    def linear(self, source: nn.Linear) -> nn.Module:
        """What stands in the place of a linear layer; it has the layer as its `source`."""

    @abstractmethod
    def write(self) -> None:
        """Write all weights anew."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Of its own weights."""

    def _take_layers(self) -> None:
        """An adapter may have been put beside a projection since the last time."""
        for layer, copy in zip(self._first.layers, self.network.layers, strict=True):
            for name, source in layer.named_children():
                if getattr(copy.get_submodule(name), "source", None) is not source:
                    assert isinstance(source, nn.Linear)
                    setattr(copy, name, self.linear(source))


class WholeNumbers(QuantizedCopy):
    """On a CPU, in 8 or 16 bits."""

    def __init__(self, decoder: AnyDecoder, quantization: Quantization) -> None:
        """Raises `ConfigError` and `ModelError` where there is none on this machine, or of this network."""
        check_shape(decoder.spec, quantization)
        if not decoder.output_weight.is_cpu:
            raise ConfigError(
                f"{KEY} = {quantization}: it is for CPUs, and the model is on {decoder.output_weight.device}", HINT
            )
        self.products = products_of(quantization)
        assert isinstance(decoder, Decoder)
        self.network = second_network(decoder)
        head = nn.Linear(decoder.spec.hidden_size, decoder.spec.vocab_size, bias=False, device="meta")
        head.weight = decoder.output_weight
        self.network.head = QuantizedLinear(head, self.products)
        super().__init__(decoder)

    def linear(self, source: nn.Linear) -> QuantizedLinear:
        return QuantizedLinear(source, self.products)

    def write(self) -> None:
        for linear in self._linears():
            linear.renew()

    @property
    def bytes(self) -> int:
        return sum(linear.packed.numel() for linear in self._linears())

    def _linears(self) -> Iterator[QuantizedLinear]:
        return (module for module in self.network.modules() if isinstance(module, QuantizedLinear))


def products_of(quantization: Quantization) -> QuantizedProducts:
    """Compile the products. Raises `ConfigError` where they cannot be compiled here."""
    products = quantized_products(quantization)
    if products is None:
        why = why_none() or "that takes gcc on Linux, and torch with GNU's threads"
        raise ConfigError(f"{KEY} = {quantization}: its products cannot be compiled here: {why}", HINT)
    return products


def refuse_without_fp8(device: torch.device, dtype: torch.dtype, block_size: int) -> None:
    """Raise `ConfigError` where a device does not multiply in 8-bit floating point, or the kernels around that do not serve."""
    if device.type != "cuda":
        raise ConfigError(f"{KEY} = fp8: it is for GPUs, and the model is on {device}", HINT)
    if not has_triton():
        raise ConfigError(f"{KEY} = fp8: its kernels need triton, which is not installed", f"install triton, or {HINT}")
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{KEY} = fp8: {name} has no such products; GPUs since Ada have", HINT)
    check_fp8_types(dtype, block_size)


def check_fp8_types(dtype: torch.dtype, block_size: int | None) -> None:
    """Raise `ConfigError` for a network, or a cache, that the kernels around such products do not know on any device."""
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{KEY} = fp8: the rest is in bfloat16, and the dtype is {name}", f"choose bfloat16, or {HINT}")
    if block_size is not None and block_size & (block_size - 1):
        raise ConfigError(f"{KEY} = fp8: engine.block_size = {block_size} is no power of two", "leave engine.block_size out")


def check_shape(shape: ModelShape | None, quantization: Quantization) -> None:
    """Raise `ModelError` for a network that has no such copy; None is one that redline does not run itself."""
    if not isinstance(shape, DecoderSpec):
        raise ModelError(f"{KEY}: the model runs on transformers' layers, which multiply as they do", HINT)
    if shape.experts is not None:
        raise ModelError(f"{KEY}: model family {shape.family!r} has experts, whose products it does not know", HINT)
    if quantization == "fp8" and shape.head_dim not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        raise ModelError(f"{KEY} = fp8: heads of {shape.head_dim}; the kernels know those of {known}", HINT)
    sizes = (shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size)
    if any(size % LINE for size in sizes):
        raise ModelError(
            f"{KEY}: weights have rows of {', '.join(map(str, sizes))}, which have to be multiples of {LINE}", HINT
        )
