"""What runs where: refused here, before anything loads, if it cannot be."""

import os

from redline.config import Config
from redline.errors import ConfigError


def check_placement(config: Config) -> None:
    """Refuse what needs more than one process, or another device."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("several processes were started, but this version trains a run with one", "start it without torchrun")
    if config.trainer.offload_optimizer and config.run.device == "cpu":
        raise ConfigError(
            "trainer.offload_optimizer: on the CPU the optimizer's state is in host memory already",
            "set trainer.offload_optimizer=false; trainer.optimizer_states=int8 makes it smaller",
        )


def check_device(config: Config) -> None:
    import torch

    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = cuda: there is an NVIDIA device, but torch cannot use it",
            "install a torch built for CUDA and a driver that fits it, or set run.device=cpu",
        )
