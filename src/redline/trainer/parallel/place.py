"""Which process of the trainer this is: the mesh (data, sequence).

Neighbouring ranks work on one micro-batch together, since what they exchange in every layer is more than what others exchange
once a step:

    trainer.sequence_parallel_size = 2     sequence 0   sequence 1
                              data 0         rank 0       rank 1
                              data 1         rank 2       rank 3
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError


@dataclass(slots=True, frozen=True)
class Place:
    rank: int = 0
    data_ranks: int = 1
    """Groups of processes that get micro-batches of their own."""
    sequence_ranks: int = 1
    """Processes that divide the tokens of a micro-batch."""

    @property
    def world(self) -> int:
        """data_ranks x sequence_ranks."""
        return self.data_ranks * self.sequence_ranks

    @property
    def data_rank(self) -> int:
        """rank // sequence_ranks."""
        return self.rank // self.sequence_ranks

    @property
    def sequence_rank(self) -> int:
        """rank % sequence_ranks."""
        return self.rank % self.sequence_ranks


def find_place(rank: int, world: int, config: TrainerConfig) -> Place:
    """The place of process `rank` among `world`. Raises ConfigError for sizes that cannot be arranged."""
    sequence = config.sequence_parallel_size
    if world % sequence:
        raise ConfigError(
            f"trainer.sequence_parallel_size = {sequence} does not divide the trainer's {_processes(world)}",
            f"start a multiple of {sequence} processes (torchrun --nproc-per-node), or set it to 1",
        )
    data = config.data_parallel_size or world // sequence
    if data * sequence != world:
        raise ConfigError(
            f"trainer.data_parallel_size = {data} times trainer.sequence_parallel_size = {sequence} is {data * sequence},"
            f" but the trainer has {_processes(world)}",
            f"start {data * sequence} (torchrun --nproc-per-node), or leave trainer.data_parallel_size to us: null",
        )
    if world == 1 and config.sharding != "none":
        raise ConfigError(
            f"trainer.sharding = {config.sharding!r}: there is one process, and no other to share the parameters with",
            "start several (torchrun --nproc-per-node), or set trainer.sharding=none",
        )
    return Place(rank, data, sequence)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"
