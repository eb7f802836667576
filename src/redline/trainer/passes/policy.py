"""The policy, as the passes of a step need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from redline.errors import ConfigError
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.layer_code import Checkpointing
from redline.trainer.parallel.processes import Parallel
from redline.trainer.parallel.weights import Weights

if TYPE_CHECKING:
    from redline.trainer.parallel.pipeline import Pipeline


@dataclass(slots=True, frozen=True)
class TrainedPolicy:
    """The network that is trained, as this process holds it."""

    decoder: AnyDecoder
    """All of it, or a stage."""
    num_parameters: int
    """Parameters of the whole network, an adapter's included."""
    dtype: torch.dtype
    """What it computes in."""
    weights: Weights
    parallel: Parallel
    pipeline: Pipeline | None
    """Passes micro-batches through the stages, where this process has one."""
    temperature: float
    """At which its tokens are sampled."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.weights.parameters.values())).device


def recompute_in_backward(decoder: AnyDecoder, kind: Checkpointing) -> None:
    """Have layers make again in the backward pass what they do not keep of the forward pass. Raises `ConfigError` for a network
    whose layers are not ours."""
    if isinstance(decoder, Decoder):
        decoder.recompute_in_backward(kind)
    elif kind != "none":
        raise ConfigError(
            f"trainer.gradient_checkpointing = {kind}: model family {decoder.spec.family!r} is run by transformers",
            "set trainer.gradient_checkpointing=none",
        )
