"""What runs where: which stage in which process and thread, on which device. A recipe that cannot be placed is refused here,
before anything loads and before there is a run folder. Importing this file loads no torch.

    buffer.max_lag: 0     main: rollouts ─► engine ─► buffer ─► trainer ─► weight_sync, in turn
    buffer.max_lag: 1…    main: buffer ─► trainer ─► weight_sync        rollouts: rollouts ─► engine, beside it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.config import Config, EngineRecipe
from redline.errors import ConfigError
from redline.launch.ranks import check_ranks

MAIN = "main"
"""The thread of the loop."""
BESIDE = "rollouts"
"""The thread of rollouts that run beside the trainer."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where a stage runs."""

    thread: str
    """The thread's lane in the ledger."""
    device: str
    """`cpu` or `cuda`: where its tensors are."""
    cpu_threads: int
    """Threads of its CPU kernels."""
    process: int = 0
    """0 is the process of the loop."""

    def __str__(self) -> str:
        kernels = f", {self.cpu_threads} CPU thread{'s' if self.cpu_threads > 1 else ''}" if self.device == "cpu" else ""
        return f"process {self.process}, thread {self.thread} ({self.device}{kernels})"


@dataclass(slots=True, frozen=True)
class Placement:
    """Every stage of a run and its place."""

    stages: Mapping[str, Place]
    """Name of the stage → its place."""

    @property
    def num_processes(self) -> int:
        return 1 + max(place.process for place in self.stages.values())

    @property
    def is_lockstep(self) -> bool:
        """Whether engine and trainer take turns in one thread."""
        return self.stages["engine"].thread == self.stages["trainer"].thread

    def __str__(self) -> str:
        """`rollouts, engine: process 0, thread rollouts (cpu, 1 CPU thread); buffer, …`."""
        there: dict[Place, list[str]] = {}
        for stage, place in self.stages.items():
            there.setdefault(place, []).append(stage)
        return "; ".join(f"{', '.join(stages)}: {place}" for place, stages in there.items())


def place(config: Config) -> Placement:
    """Place the stages of a resolved recipe. Raises `ConfigError` for one that needs what this version or machine lacks."""
    check_ranks(config)
    _refuse_offload_on_cpu(config)
    threads = config.run.num_threads or 1
    main = Place(MAIN, config.run.device, threads)
    beside = main
    if config.buffer.max_lag:
        # On a CPU the two threads divide the cores; on a GPU their kernels run there, and each may use all cores meanwhile.
        halves = (threads - threads // 2, threads // 2) if config.run.device == "cpu" else (threads, threads)
        main, beside = (Place(thread, config.run.device, max(1, n)) for thread, n in zip((MAIN, BESIDE), halves, strict=True))
    return Placement({"rollouts": beside, "engine": beside, "buffer": main, "trainer": main, "weight_sync": main})


def _refuse_offload_on_cpu(config: Config) -> None:
    if config.trainer.offload_optimizer and config.run.device == "cpu":
        raise ConfigError(
            "trainer.offload_optimizer: on the CPU the optimizer's state is in host memory already",
            "set trainer.offload_optimizer=false; trainer.optimizer_states=int8 makes it smaller",
        )


def check_engine_place(recipe: EngineRecipe) -> None:
    """Raise `ConfigError` where this machine has no place for an engine that runs alone. Imports torch."""
    import torch

    check_device(recipe.run.device)
    size, devices = recipe.engine.tensor_parallel_size, torch.cuda.device_count()
    if recipe.run.device == "cuda" and size > devices:
        raise ConfigError(
            f"engine.tensor_parallel_size = {size}: each process needs a GPU of its own, and there {_are(devices)}",
            f"set it to {devices}" if devices == 1 else f"set it to {devices} or less",
        )


def _are(devices: int) -> str:
    return "is 1" if devices == 1 else f"are {devices}"


def check_device(device: str) -> None:
    """Raise `ConfigError` where torch cannot use the device. Imports torch."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = cuda: there is an NVIDIA device, but torch cannot use it",
            "install a torch built for CUDA and a driver that fits it, or set run.device=cpu",
        )
