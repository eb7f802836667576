"""A second network on the same parameters that multiplies in whole numbers, forward and backward (`trainer.quantization`)."""

from __future__ import annotations

from torch import nn

from redline.config.sections.trainer import TrainingQuantization
from redline.errors import ConfigError, ModelError
from redline.kernels.cpu.compiled import why_none
from redline.kernels.cpu.quantized_training import training_products
from redline.models.copies import second_network
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.layers import whole_numbers
from redline.models.lora.trainable import AdaptedLinear
from redline.models.spec import DecoderSpec, ModelShape

KEY = "trainer.quantization"
HINT = f"set {KEY}=none"


def in_whole_numbers(decoder: AnyDecoder, quantization: TrainingQuantization) -> Decoder:
    """The network whose linear layers and head multiply so; adapters, norms, biases and the embedding are in float32. Raises
    `ConfigError` and `ModelError` where there is none on this machine, or of this network."""
    assert quantization != "none"
    refuse_without_whole_numbers(decoder.spec)
    device = decoder.output_weight.device
    if device.type != "cpu":
        raise ConfigError(f"{KEY} = {quantization}: it is for CPUs, and the model is on {device}", HINT)
    assert isinstance(decoder, Decoder)
    network = second_network(decoder)
    network.quantization = quantization
    for layer in network.layers:
        for name, source in layer.named_children():
            if isinstance(source, AdaptedLinear):
                source.multiply = whole_numbers.linear
            elif isinstance(source, nn.Linear):
                setattr(layer, name, whole_numbers.WholeNumberLinear(source))
    return network


def refuse_without_whole_numbers(shape: ModelShape | None) -> None:
    """Raise `ModelError` for a network that is not trained so, None being one that redline does not run itself, and
    `ConfigError` where the products cannot be compiled. Compiles them."""
    if not isinstance(shape, DecoderSpec):
        raise ModelError(f"{KEY}: the model runs on transformers' layers, which multiply as they do", HINT)
    if shape.experts is not None:
        raise ModelError(f"{KEY}: model family {shape.family!r} has experts, whose products it does not know", HINT)
    if training_products("int16") is None:
        why = why_none() or "that takes gcc on Linux, and torch with GNU's threads"
        raise ConfigError(f"{KEY}: its products cannot be compiled here: {why}", HINT)
