"""The policy of a checkpoint, as the trainer and its engine had it at that step.

    base model ──► network ──► adapter, where one was trained ──► the checkpoint's weights, in the network's type

A checkpoint holds float32 weights of what was trained, under our names: an adapter's alone, or all of them. The rest comes from
the model that the run began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from redline.config import Config, read_recorded
from redline.errors import RunFolderError
from redline.launch.models import LoadedModel, load_policy
from redline.launch.resume.began_with import refuse_another_base
from redline.models.files.hf import AnyDecoder
from redline.models.lora.trainable import add_adapter
from redline.telemetry import RunFolder
from redline.trainer.checkpoints.folder import load_checkpoint

MASTER = "master/"
"""What the names of trained weights begin with in a checkpoint."""


@dataclass(slots=True, frozen=True)
class CheckpointedPolicy:
    """A policy as a run had it after some steps."""

    config: Config
    """The run's own."""
    model: LoadedModel
    """The network with the checkpoint's weights, to sample from."""
    masters: Mapping[str, Tensor]
    """The float32 weights that were trained, by our parameter names."""
    step: int
    """Steps taken."""


def load_checkpointed(run: RunFolder, checkpoint: Path, device: str, dtype: str | None = None) -> CheckpointedPolicy:
    """Load the policy of a checkpoint in `dtype`, by default that of the run. Reads every file of the checkpoint, and raises
    `RedlineError` where one is damaged, or where the run began with another model than is there now."""
    config = read_recorded(run.config)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"device": device}),
            "model": config.model.model_copy(update={"dtype": dtype or config.model.dtype}),
        }
    )
    saved = load_checkpoint(checkpoint)
    model, network_dtype = load_policy(config), getattr(torch, config.model.dtype)
    if config.trainer.lora.rank:
        refuse_another_base(config, run, model.folder)
        add_adapter(model.decoder, config.trainer.lora, network_dtype, config.run.seed)
        model.decoder.to(network_dtype)
    masters = {key.removeprefix(MASTER): saved.tensors[key] for key in saved.tensors if key.startswith(MASTER)}
    _fill(model.decoder, masters, checkpoint)
    return CheckpointedPolicy(config, model, masters, saved.version)


@torch.no_grad()
def _fill(decoder: AnyDecoder, masters: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Overwrite what was trained, in place. Raises `RunFolderError` where that is not what the checkpoint holds."""
    trained = {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    for name in sorted(trained.keys() | masters.keys()):
        if name not in trained or name not in masters or trained[name].shape != masters[name].shape:
            raise RunFolderError(
                f"{checkpoint}: the checkpoint is of another model: {name} differs",
                "bring back the model that the run began with (model.path in its config.json)",
            )
        trained[name].copy_(masters[name])
