"""Which process of the trainer this is: the mesh (data, sequence), or (data, stage).

Neighbouring ranks work on one micro-batch together, since what they exchange in every layer, or of every micro-batch, is more
than what others exchange once a step:

    sequence_parallel_size = 2     sequence 0   sequence 1
                      data 0         rank 0       rank 1
                      data 1         rank 2       rank 3

    pipeline_parallel_size = 2     stage 0      stage 1
                      data 0         rank 0       rank 1
                      data 1         rank 2       rank 3
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.config.sections.trainer import Sharding, TrainerConfig
from redline.errors import ConfigError

TORCHRUN, TRAINERS = "torchrun --nproc-per-node", "placement.trainers"
"""What gives a run several trainer processes: on a machine, and on a cluster."""


@dataclass(slots=True, frozen=True)
class Division:
    """How the trainer's processes divide its work: the keys of the recipe's section `trainer`, which say what each means."""

    sharding: Sharding = "none"
    replicate: int = 1
    prefetch_layers: int = 1
    sequence_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @classmethod
    def of(cls, config: TrainerConfig) -> Division:
        return cls(
            config.sharding,
            config.replicate,
            config.prefetch_layers,
            config.sequence_parallel_size,
            config.pipeline_parallel_size,
        )

    @property
    def divides_weights(self) -> bool:
        """Whether no process has all weights to itself."""
        return self.sharding != "none" or self.pipeline_parallel_size > 1


@dataclass(slots=True, frozen=True)
class Place:
    rank: int = 0
    data_ranks: int = 1
    """Groups of processes that get micro-batches of their own."""
    sequence_ranks: int = 1
    """Processes that divide the tokens of a micro-batch."""
    stages: int = 1
    """Processes that divide the layers, and pass each micro-batch on; 1 wherever `sequence_ranks` is more."""

    @property
    def world(self) -> int:
        """data_ranks x sequence_ranks x stages."""
        return self.data_ranks * self.sequence_ranks * self.stages

    @property
    def data_rank(self) -> int:
        """rank // (sequence_ranks x stages)."""
        return self.rank // (self.sequence_ranks * self.stages)

    @property
    def stage(self) -> int:
        """rank % stages."""
        return self.rank % self.stages

    @property
    def sequence_rank(self) -> int:
        """rank % sequence_ranks."""
        return self.rank % self.sequence_ranks


def refuse_offloads(config: TrainerConfig, division: Division) -> None:
    """Raise `ConfigError` for what the recipe wants in host memory where the processes divide the weights."""
    if not division.divides_weights:
        return
    key = "trainer.sharding" if division.sharding != "none" else "trainer.pipeline_parallel_size"
    if config.reference_offload:
        raise ConfigError(
            f"trainer.reference_offload: with {key} the reference is divided among the devices, and stays there",
            f"set trainer.reference_offload=false, or leave {key} out",
        )
    if config.offload_optimizer:
        raise ConfigError(
            f"trainer.offload_optimizer: with {key} the state is divided among the devices, and stays there",
            f"set trainer.offload_optimizer=false, or leave {key} out",
        )


def part_rows(rows: int, part: int, parts: int) -> tuple[int, int]:
    """First row and end of one part of a tensor that is divided along its first dimension as FSDP2 does (`torch.chunk`): the
    last parts may be shorter, or empty."""
    size = -(-rows // parts)
    return min(rows, part * size), min(rows, (part + 1) * size)


def find_place(rank: int, world: int, division: Division, starts: str = TORCHRUN) -> Place:
    """The place of process `rank` among `world`. Raises `ConfigError` for a division that so many processes cannot make; by its
    hint, `starts` gives a run several."""
    sequence = division.sequence_parallel_size
    if world % sequence:
        raise ConfigError(
            f"trainer.sequence_parallel_size = {sequence} does not divide the trainer's {_processes(world)}",
            f"start a multiple of {sequence} processes ({starts}), or set it to 1",
        )
    stages = division.pipeline_parallel_size
    if stages > 1:
        _check_stages(world, division, starts)
    if world == 1 and division.sharding != "none":
        raise ConfigError(
            f"trainer.sharding = {division.sharding!r}: there is one process, and no other to share the parameters with",
            f"start several ({starts}), or leave it out",
        )
    if division.replicate > 1 and division.sharding == "none":
        raise ConfigError(
            f"trainer.replicate = {division.replicate}: without trainer.sharding every process holds all weights already",
            f"set trainer.sharding=full or grad_op with several processes ({starts}), or leave trainer.replicate out",
        )
    if world % division.replicate or division.replicate == world > 1:
        raise ConfigError(
            f"trainer.replicate = {division.replicate} makes no groups of several out of the trainer's {_processes(world)}",
            f"set it to the number of nodes, of several processes each ({starts}), or leave it out",
        )
    return Place(rank, world // (sequence * stages), sequence, stages)


def _check_stages(world: int, division: Division, starts: str) -> None:
    stages, key = division.pipeline_parallel_size, "trainer.pipeline_parallel_size"
    if world % stages:
        raise ConfigError(
            f"{key} = {stages} does not divide the trainer's {_processes(world)}",
            f"start a multiple of {stages} processes ({starts}), or set it to 1",
        )
    if division.sequence_parallel_size > 1:
        raise ConfigError(
            f"{key} = {stages}: stages pass whole micro-batches on, and trainer.sequence_parallel_size divides their tokens",
            f"set one of the two to 1; with several processes ({starts}) either divides the memory of long contexts",
        )
    if division.sharding != "none":
        raise ConfigError(
            f"{key} = {stages}: stages divide the weights already, and trainer.sharding = {division.sharding!r} would again",
            f"set trainer.sharding=none; further processes ({starts}) get micro-batches of their own",
        )


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"
