"""The processes that take a step together, as the trainer sees them.

`Parallel` is a single process: every method does what one process would do anyway, and nothing is sent. `Several` is what
processes have in common however they divide the work; `Together` is one of those that compute whole networks, `stages.Staged`
one of those that divide the layers. All give, for each network, its `Weights`, and for each micro-batch this process's share.

Nobody waits longer than the patience of `connect` for another, whichever group they are in: torch gives every group that it is
not told about half an hour.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from redline.addresses import loopback_interface
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
    def meets_in_layers(self) -> bool:
        """Whether processes wait for each other inside the layers of a network."""
        return self.division.sharding != "none" or self.place.sequence_ranks > 1

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


class Several(Parallel):
    """One process of several, that knows how to talk to the others."""

    def __init__(self, place: Place, device: torch.device, division: Division, patience: timedelta) -> None:
        super().__init__(place, division)
        self.device: torch.device = device
        self._patience = patience

    def checkpoint(self) -> WholeCheckpoint:
        if not self.is_divided:
            return WholeCheckpoint()
        ranks = join()
        return RankCheckpoint(ranks.connection(), ranks.pulse, self.part, self.num_parts, self.place.rank, self.max_of)

    def max_of(self, values: Tensor) -> Tensor:
        largest = values.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def close(self) -> None:
        dist.destroy_process_group()

    def _own_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make groups of ranks, and return the one that this process is in, if any. All processes must make all groups, in the
        same order."""
        made = [(ranks, dist.new_group(list(ranks), timeout=self._patience)) for ranks in groups]
        return next((group for ranks, group in made if self.place.rank in ranks), None)

    def _neighbours(self, size: int) -> list[range]:
        """All ranks in groups of `size` that follow each other."""
        return [range(first, first + size) for first in range(0, self.place.world, size)]

    def _across(self, size: int) -> list[range]:
        """Those at the same place in their groups of neighbours."""
        return [range(first, self.place.world, size) for first in range(size)]


class Together(Several):
    """One process of several that each compute with the whole network."""

    def __init__(self, place: Place, device: torch.device, division: Division, patience: timedelta) -> None:
        super().__init__(place, device, division, patience)
        self._data_group: dist.ProcessGroup | None = None  # all of them
        self._sequence_group: dist.ProcessGroup | None = None
        if place.sequence_ranks > 1:
            self._data_group = self._own_group(self._across(place.sequence_ranks))
            self._sequence_group = self._own_group(self._neighbours(place.sequence_ranks))

    def wrap(self, network: AnyDecoder | ValueNetwork, dtype: torch.dtype, stored: StoredWeights | None = None) -> Weights:
        spec = network.trunk.spec if isinstance(network, ValueNetwork) else network.spec
        check_heads(spec.num_heads, self.place.sequence_ranks)
        if not self.is_divided:
            return ReplicatedWeights(network)
        from redline.trainer.parallel.sharding import ShardedWeights

        return ShardedWeights(network, self._shards, dtype, self.division, stored)

    @cached_property
    def _shards(self) -> DeviceMesh:
        """All processes, since those that share a micro-batch have different tokens, hence gradients to be summed as well. With
        `replicate`, groups of neighbours that each hold all weights. The first time all processes must ask at once."""
        groups, world = self.division.replicate, self.place.world
        assert dist.group.WORLD is not None
        if groups == 1:
            return DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        size = world // groups
        made = [group for group in (self._own_group(self._across(size)), self._own_group(self._neighbours(size))) if group]
        ranks = torch.arange(world).view(groups, size)
        return DeviceMesh.from_group(made, self.device.type, ranks, mesh_dim_names=("replicate", "shard"))

    def share(self, micro_batch: MicroBatch) -> SequenceShare:
        rank, ranks = self.place.sequence_rank, self.place.sequence_ranks
        return SequenceShare(len(micro_batch.tokens), micro_batch.predicted_from_M, rank, ranks, self._sequence_group)

    def sum_of(self, values: Tensor) -> Tensor:
        summed = values.detach().clone()
        dist.all_reduce(summed, dist.ReduceOp.SUM, self._data_group)
        return summed


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
    patience = timedelta(seconds=patience_s)
    if not dist.is_initialized():
        # Messages go over the host, whatever the tensors do.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        _stay_on_loopback(place.world)
        dist.init_process_group(backend, store=join().store, rank=place.rank, world_size=place.world, timeout=patience)
    if place.stages == 1:
        return Together(place, device, division, patience)
    from redline.trainer.parallel.stages import Staged  # takes torch's pipelining along

    return Staged(place, device, division, patience)


def _stay_on_loopback(world: int) -> None:
    """Have gloo listen on loopback alone where all processes are on this machine, unless the environment says otherwise."""
    name = loopback_interface()
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world) and name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
