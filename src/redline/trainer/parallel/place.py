"""Which process of the trainer this is: the mesh (data, sequence).

Neighbouring ranks work on one micro-batch together, since what they exchange in every layer is more than what others exchange
once a step:

    sequence_parallel_size = 2     sequence 0   sequence 1
                      data 0         rank 0       rank 1
                      data 1         rank 2       rank 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from redline.errors import ConfigError

Sharding = Literal["none", "grad_op", "full"]


@dataclass(slots=True, frozen=True)
class Division:
    """How the trainer's processes divide its work. No key of a recipe: `redline train` is one process."""

    sharding: Sharding = "none"
    """`none`: each process holds all weights. `grad_op`: masters, gradients and optimizer state are divided. `full`: the
    weights of layers that are not at work as well."""
    prefetch_layers: int = 1
    """Layers whose weights are fetched ahead of their turn where they are sharded; 0 leaves it to torch. More hides slower
    links and takes the memory of as many layers."""
    data_parallel_size: int | None = None
    """Groups of processes that get micro-batches of their own; by default processes / sequence_parallel_size."""
    sequence_parallel_size: int = 1
    """Processes that divide the tokens of a micro-batch, for contexts too long for one device; must divide the number of
    attention heads. The token budget of a micro-batch grows with it."""


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


def find_place(rank: int, world: int, division: Division) -> Place:
    """The place of process `rank` among `world`. Raises `ConfigError` for a division that so many processes cannot make."""
    sequence = division.sequence_parallel_size
    if world % sequence:
        raise ConfigError(
            f"sequence_parallel_size = {sequence} does not divide the trainer's {_processes(world)}",
            f"start a multiple of {sequence} processes (torchrun --nproc-per-node), or set it to 1",
        )
    data = division.data_parallel_size or world // sequence
    if data * sequence != world:
        raise ConfigError(
            f"data_parallel_size = {data} times sequence_parallel_size = {sequence} is {data * sequence},"
            f" but the trainer has {_processes(world)}",
            f"start {data * sequence} (torchrun --nproc-per-node), or leave data_parallel_size out",
        )
    if world == 1 and division.sharding != "none":
        raise ConfigError(
            f"sharding = {division.sharding!r}: there is one process, and no other to share the parameters with",
            "start several (torchrun --nproc-per-node), or leave sharding out",
        )
    return Place(rank, data, sequence)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"
