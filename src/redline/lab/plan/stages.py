"""Devices that divide the layers of the trainer's networks (`trainer.pipeline_parallel_size`): what is in the fullest stage,
and what a step waits for.

    memory    the first stage keeps the activations of as many micro-batches as there are stages, of its own layers; the last
              those of one, and the logits
    time      a stage has 1 / stages of the products, and of a step's m + stages - 1 slots computes in m: the bubble
"""

from __future__ import annotations

import operator

from redline.errors import ConfigError
from redline.lab.plan.shapes import Model
from redline.models.sizes.memory import layer_parameters
from redline.models.spec import DecoderSpec
from redline.models.stage import stage_layers

KEY = "trainer.pipeline_parallel_size"


def check_stages(model: Model, stages: int, gpus: int) -> None:
    """Raise `ConfigError` where so many devices cannot divide the model's layers."""
    if stages == 1:
        return
    if gpus % stages:
        raise ConfigError(
            f"{KEY} = {stages}: does not divide {'the one device' if gpus == 1 else f'the {gpus} devices'}",
            f"give a multiple of {stages} with --gpus",
        )
    if not isinstance(model.shape, DecoderSpec):
        raise ConfigError(f"{KEY}: model family {model.shape.family!r} is not cut into stages", f"set {KEY}=1")
    stage_layers(model.shape.num_layers, stages)


def layers_of(model: Model, stages: int) -> tuple[int, int]:
    """Layers of the first stage, which has no fewer than the others, and of the last."""
    divided = stage_layers(model.shape.num_layers, stages)
    return len(divided[0]), len(divided[-1])


def parameters_of(model: Model, stages: int) -> int:
    """Parameters of the fullest stage: its layers, the first with the embedding, the last with norm and head."""
    if stages == 1:
        return model.parameters
    shape = model.shape
    assert isinstance(shape, DecoderSpec), "others are not cut into stages"
    around = [model.head_parameters, *[0] * (stages - 2), shape.hidden_size + model.head_parameters]
    of_layers = (layer_parameters(shape, layers) for layers in stage_layers(shape.num_layers, stages))
    return max(map(operator.add, of_layers, around))


def time_share(stages: int, micro_batches: float) -> float:
    """Seconds of a stage over those of one device with all layers: (m + stages - 1) / (m stages)."""
    return (micro_batches + stages - 1) / (micro_batches * stages)
