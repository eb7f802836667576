"""A second network that samples in whole numbers (`engine.quantization`): every linear layer and the head multiply by a copy of
their weight in 8 or 16 bits, made anew for every version. Norms, biases, adapters and the embedding are the first one's.

Prompts, decode steps and guesses all go through it. Where they round differently between its products, as they do in float32, a
number may fall on another whole one, and a draw near a border change. Logprobs are those of its distribution; how far that is
from the trainer's is `trainer/mismatch_kl`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from redline.config.sections.engine import Quantization
from redline.errors import ConfigError, ModelError
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


class QuantizedCopy:
    """The second network. Its weights are those of the first only after `renew`."""

    def __init__(self, decoder: AnyDecoder, quantization: Quantization) -> None:
        """Raises `ConfigError` and `ModelError` where there is none on this machine, or of this network."""
        assert quantization != "none"
        check_shape(decoder.spec)
        if not decoder.output_weight.is_cpu:
            raise ConfigError(
                f"{KEY} = {quantization}: it is for CPUs, and the model is on {decoder.output_weight.device}", HINT
            )
        self.products = products_of(quantization)
        assert isinstance(decoder, Decoder)
        self._first = decoder
        self.network = second_network(decoder)
        head = nn.Linear(decoder.spec.hidden_size, decoder.spec.vocab_size, bias=False, device="meta")
        head.weight = decoder.output_weight
        self.network.head = QuantizedLinear(head, self.products)
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
            for linear in self._linears():
                linear.renew()
        self._is_current = True

    @property
    def bytes(self) -> int:
        """Of the weights in whole numbers."""
        return sum(linear.packed.numel() for linear in self._linears())

    def _take_layers(self) -> None:
        """An adapter may have been put beside a projection since the last time."""
        for layer, copy in zip(self._first.layers, self.network.layers, strict=True):
            for name, source in layer.named_children():
                there = copy.get_submodule(name)
                if not isinstance(there, QuantizedLinear) or there.source is not source:
                    assert isinstance(source, nn.Linear)
                    setattr(copy, name, QuantizedLinear(source, self.products))

    def _linears(self) -> Iterator[QuantizedLinear]:
        return (module for module in self.network.modules() if isinstance(module, QuantizedLinear))


def products_of(quantization: Quantization) -> QuantizedProducts:
    """Compile the products. Raises `ConfigError` where they cannot be compiled here."""
    products = quantized_products(quantization)
    if products is None:
        why = why_none() or "that takes gcc on Linux, and torch with GNU's threads"
        raise ConfigError(f"{KEY} = {quantization}: its products cannot be compiled here: {why}", HINT)
    return products


def check_shape(shape: ModelShape | None) -> None:
    """Raise `ModelError` for a network that has no copy in whole numbers; None is one that redline does not run itself."""
    if not isinstance(shape, DecoderSpec):
        raise ModelError(f"{KEY}: the model runs on transformers' layers, which multiply as they do", HINT)
    if shape.experts is not None:
        raise ModelError(f"{KEY}: model family {shape.family!r} has experts, whose products it does not know", HINT)
    sizes = (shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size)
    if any(size % LINE for size in sizes):
        raise ModelError(
            f"{KEY}: weights have rows of {', '.join(map(str, sizes))}, which have to be multiples of {LINE}", HINT
        )
