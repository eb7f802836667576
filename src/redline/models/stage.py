"""A decoder in stages: each process has some neighbouring layers, and passes the residual stream on to the next.

    stage 0    tokens ─► embedding ─► layers 0 … 5 ─┐ the residual stream [T, E]
    stage 1                 ┌───────────────────────┘
                            └─► layers 6 … 10 ─► norm ─► hidden states, head

Parameters keep the names that they have in the whole network. Where the embedding is the head too, both ends have it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from redline.errors import ConfigError, ModelError
from redline.models.decoder import AnyAttend, Decoder, add_rms_norm
from redline.models.files.hf import AnyDecoder
from redline.models.layers.gradient_sums import embedding
from redline.models.layers.routes import Routes
from redline.models.lora.per_token import ActiveLora
from redline.models.spec import FAMILIES, is_ours

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBED = "embed"


def stage_layers(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as they go. Earlier stages have one more: the last has the head besides. Raises
    `ConfigError` where there are fewer layers than stages."""
    if num_layers < stages:
        raise ConfigError(
            f"trainer.pipeline_parallel_size = {stages}: the model has {num_layers} layers, and every stage needs one",
            f"set it to {num_layers} or less",
        )
    ends = [-(-num_layers * stage // stages) for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


class Stage(Decoder):
    """Stage `index` of `count`: shares the parameters of the whole network that are its own, and refers to no others."""

    def __init__(self, whole: Decoder, index: int, count: int) -> None:
        nn.Module.__init__(self)
        self.spec = whole.spec
        self.index, self.count = index, count
        self.rotary_factor = whole.rotary_factor
        self.checkpointing = whole.checkpointing
        self.register_buffer("rotary_frequencies", whole.rotary_frequencies, persistent=False)
        has_embed = self.is_first or (self.is_last and whole.lm_head is None)
        self.register_parameter(EMBED, whole.embed if has_embed else None)
        self.register_parameter("norm", whole.norm if self.is_last else None)
        self.register_parameter("lm_head", whole.lm_head if self.is_last else None)
        divided = stage_layers(whole.spec.num_layers, count)
        self.layers = nn.ModuleList()
        for number in divided[index]:  # under its number in the whole network, which gives its parameters their names
            self.layers.add_module(str(number), whole.layers[number])
        parameters = dict(whole.named_parameters())
        self.owners: dict[str, int] = {name: stage_of(name, divided) for name in parameters}
        """Every parameter of the whole network → the stage that answers for it."""
        self.shapes: dict[str, torch.Size] = {name: parameter.shape for name, parameter in parameters.items()}
        self.trained: tuple[str, ...] = tuple(name for name, parameter in parameters.items() if parameter.requires_grad)
        """Names of the whole network's trained parameters, in its order."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def forward(
        self,
        given: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        lora: ActiveLora | None = None,
        only_M: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Tokens [T] of the first stage, the residual stream [T, E] of the others → the residual stream for the next, of the
        last stage the hidden states after the final norm. Nothing is sampled from a stage, so that it computes all tokens."""
        assert only_M is None
        x_TE = embedding(given, self.embed) if self.is_first else given
        x_TE, delta_TE = self._through_layers(x_TE, positions_T, attend, lora, routes=routes)
        assert delta_TE is not None, "a stage has a layer"
        return add_rms_norm(x_TE, delta_TE, self.norm, self.spec.norm_eps)[1] if self.is_last else x_TE + delta_TE


def cut_stage(network: AnyDecoder, index: int, count: int) -> Stage:
    """Stage `index` of `count`. Raises `ModelError` for a network whose layers are not ours."""
    if not isinstance(network, Decoder):
        raise _not_ours(network.spec.family)
    return Stage(network, index, count)


def check_stages(config: PretrainedConfig, count: int) -> None:
    """Raise what `cut_stage` would, for a model that is not loaded yet."""
    if not is_ours(config):
        raise _not_ours(config.model_type)
    stage_layers(config.num_hidden_layers, count)


def _not_ours(family: str) -> ModelError:
    return ModelError(
        f"trainer.pipeline_parallel_size: model family {family!r} is run by transformers, and is not cut into stages",
        f"set it to 1, or train a model of one of: {', '.join(FAMILIES)}",
    )


def stage_of(name: str, divided: list[range]) -> int:
    """The stage that answers for a parameter, out of stages with these layers: the first for an embedding that is the head
    too."""
    part, _, rest = name.partition(".")
    if part == EMBED:
        return 0
    if part != "layers":
        return len(divided) - 1
    number = int(rest.partition(".")[0])
    return next(stage for stage, layers in enumerate(divided) if number in layers)
