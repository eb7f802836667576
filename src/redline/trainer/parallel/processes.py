"""The processes that take a step together, as the trainer sees them.

`Parallel` is a single process: every method does what one process would do anyway, and nothing is sent. `Together` is one of
several, `stages.Staged` one of those that divide the layers. All give, for each network, its `Weights`, and for each
micro-batch this process's share.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from redline.models.attention.ulysses import check_heads
from redline.models.files.hf import AnyDecoder
from redline.models.files.stored import StoredWeights
from redline.models.value_head import ValueNetwork
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.checkpoints.parts import WholeCheckpoint
from redline.trainer.parallel.checkpoint_parts import RankCheckpoint
from redline.trainer.parallel.place import Division, Place, find_place, part_rows
from redline.trainer.parallel.ranks import join, own_rank, world_size
from redline.trainer.parallel.sequence_parallel import SequenceShare
from redline.trainer.parallel.weights import ReplicatedWeights, Weights

if TYPE_CHECKING:
    from redline.trainer.parallel.pipeline import Pipeline

PATIENCE_S = 600.0
"""How long a process waits for another inside a step, by default. Between steps it waits in `orders.py`, as long as rank 0
lives."""


class Parallel:
    """A trainer of one process."""

    def __init__(self, place: Place | None = None, division: Division | None = None) -> None:
        self.place = place or Place()
        self.division = division or Division()
        self.device: torch.device | None = None
        """Where several processes put their parts of a network; one leaves it where it lies."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the other stages."""
        return self.place.rank == 0

    @property
    def is_divided(self) -> bool:
        """Whether each process holds a part of the weights only."""
        return self.division.divides_weights

    @property
    def num_parts(self) -> int:
        """Processes that divide one set of weights: the stages of a pipeline, or world / replicate."""
        if self.place.stages > 1:
            return self.place.stages
        return self.place.world // self.division.replicate if self.is_divided else 1

    @property
    def part(self) -> int:
        """Which part of the weights is here: rank % num_parts."""
        return self.place.rank % self.num_parts

    def rows_of(self, part: int, name: str, num_rows: int, num_layers: int) -> tuple[int, int]:
        """First row and end of what a part of the weights has of a parameter, in a network of so many layers."""
        return part_rows(num_rows, part, self.num_parts)

    def cut(self, network: AnyDecoder) -> AnyDecoder:
        """What of the policy this process computes: all of it, or a stage."""
        return network

    def pipeline(self, dtype: torch.dtype) -> Pipeline | None:
        """What passes micro-batches through the stages, where this process has one. `dtype` is the compute dtype."""
        return None

    def wrap(self, network: AnyDecoder | ValueNetwork, dtype: torch.dtype, stored: StoredWeights | None = None) -> Weights:
        """Prepare a network in place, before its optimizer is made. `dtype` is the compute dtype; a network without weights
        gets what this process holds of them from `stored`."""
        return Weights(network)

    def checkpoint(self) -> WholeCheckpoint:
        """What this process writes of a checkpoint."""
        return WholeCheckpoint()

    def share(self, micro_batch: MicroBatch) -> SequenceShare:
        """What of it this process computes."""
        return SequenceShare(len(micro_batch.tokens), micro_batch.predicted_from_M)

    def sum_of(self, values: Tensor) -> Tensor:
        """Each summed over the micro-batches of all processes; those that share a micro-batch have the same values."""
        return values

    def max_of(self, values: Tensor) -> Tensor:
        """The largest of each over all processes."""
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite it with rank 0's."""

    def close(self) -> None:
        """Part from the others."""


class Together(Parallel):
    """One process of several."""

    def __init__(self, place: Place, device: torch.device, division: Division) -> None:
        super().__init__(place, division)
        self.device: torch.device = device
        mesh = init_device_mesh(device.type, (place.data_ranks, place.sequence_ranks), mesh_dim_names=("data", "sequence"))
        self._data_group = mesh["data"].get_group()
        self._sequence_group = mesh["sequence"].get_group() if place.sequence_ranks > 1 else None

    def wrap(self, network: AnyDecoder | ValueNetwork, dtype: torch.dtype, stored: StoredWeights | None = None) -> Weights:
        spec = network.trunk.spec if isinstance(network, ValueNetwork) else network.spec
        check_heads(spec.num_heads, self.place.sequence_ranks)
        if not self.is_divided:
            return ReplicatedWeights(network)
        from redline.trainer.parallel.sharding import ShardedWeights

        return ShardedWeights(network, self._shards(), dtype, self.division, stored)

    def _shards(self) -> DeviceMesh:
        """All processes, since those that share a micro-batch have different tokens, hence gradients to be summed as well. With
        `replicate`, groups of neighbours that each hold all weights."""
        groups, world = self.division.replicate, self.place.world
        if groups == 1:
            return init_device_mesh(self.device.type, (world,))
        return init_device_mesh(self.device.type, (groups, world // groups), mesh_dim_names=("replicate", "shard"))

    def checkpoint(self) -> WholeCheckpoint:
        return rank_checkpoint(self) if self.is_divided else WholeCheckpoint()

    def share(self, micro_batch: MicroBatch) -> SequenceShare:
        rank, ranks = self.place.sequence_rank, self.place.sequence_ranks
        return SequenceShare(len(micro_batch.tokens), micro_batch.predicted_from_M, rank, ranks, self._sequence_group)

    def sum_of(self, values: Tensor) -> Tensor:
        summed = values.detach().clone()
        dist.all_reduce(summed, dist.ReduceOp.SUM, self._data_group)
        return summed

    def max_of(self, values: Tensor) -> Tensor:
        largest = values.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def close(self) -> None:
        dist.destroy_process_group()


def rank_checkpoint(parallel: Parallel) -> RankCheckpoint:
    """What one of the processes that divide the weights writes of a checkpoint."""
    ranks, rank = join(), parallel.place.rank
    return RankCheckpoint(ranks.connection(), ranks.pulse, parallel.part, parallel.num_parts, rank, parallel.max_of)


def local_device(kind: str) -> torch.device:
    """The device of this process: a GPU for each process of a machine."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)


def connect(division: Division, device: torch.device, patience_s: float = PATIENCE_S) -> Parallel:
    """Meet the processes that were started with this one (torchrun), or stay alone where there are none. Inside a step nobody
    waits longer than `patience_s` for another."""
    place = find_place(own_rank(), world_size(), division)
    if place.world == 1:
        return Parallel()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Messages go over the host, whatever the tensors do.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=join().store, rank=place.rank, world_size=place.world, timeout=timedelta(seconds=patience_s)
        )
    if place.stages == 1:
        return Together(place, device, division)
    from redline.trainer.parallel.stages import Staged  # takes torch's pipelining along

    return Staged(place, device, division, timedelta(seconds=patience_s))
