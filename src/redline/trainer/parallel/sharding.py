"""Every process holds a part of each weight, in float32 (torch's FSDP2). The weights of a layer are put together, in the
compute dtype, while it is at work.

    sharding   weights are whole                            gradients and optimizer state
    grad_op    from the first forward of a step to its end   a part
    full       only while their layer computes               a part

With `replicate` (HSDP) there are several groups of processes. Each group holds all of the weights, divided inside it; gradients
are summed over the processes of a group first, then over the groups.

The parts are the master weights: the optimizer updates them in place and there is no other copy. Gradients leave every backward
pass summed over the processes in float32, each process with its part.

What belongs to no layer (embedding, last norm, head) stays whole from a forward pass until the end of its backward, so
`decoder.output_weight` may be used after `decoder(...)` as if nothing were divided, though not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from redline.errors import ConfigError
from redline.models.decoder import DecoderLayer
from redline.models.files.stored import StoredWeights
from redline.models.sizes.memory import FLOAT32, ParameterBytes
from redline.trainer.checkpoints.tensors import OwnState, SavedTensors
from redline.trainer.parallel.place import Division, part_rows
from redline.trainer.parallel.weights import Weights


class ShardedWeights(Weights):
    """A part of each, along its first dimension."""

    are_masters = True

    def __init__(
        self,
        network: nn.Module,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        division: Division,
        stored: StoredWeights | None = None,
    ) -> None:
        """Divides the network in place. Of parameters that have no values yet, this process allocates its part, in float32
        where they are trained, and reads its rows from `stored`: no process ever has a whole one."""
        shards = mesh["shard"] if mesh.ndim > 1 else mesh
        self._rank, self._world, self._group = shards.get_local_rank(), shards.size(), shards.get_group()
        self._keep_whole = division.sharding == "grad_op"
        self._prefetched = division.prefetch_layers
        self._layers = [name for name, module in network.named_modules() if isinstance(module, DecoderLayer)]
        self._modules = _fully_shard(network, mesh, dtype, self._keep_whole)
        _prefetch(self._modules, division.prefetch_layers)
        if stored is not None:
            _fill(network, stored, torch.device(mesh.device_type), self._rank, self._world)
        self._sharded: dict[str, DTensor] = {}
        self.parameters = {}
        for name, parameter in network.named_parameters():
            assert isinstance(parameter, DTensor)
            self._sharded[name] = parameter
            with torch.no_grad():
                self.parameters[name] = nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)

    def planned_bytes(self, dtype: torch.dtype, moments: int) -> ParameterBytes:
        """Parts are masters and have float32 gradients. Beside them are whole weights in the compute dtype: with `grad_op` all,
        with `full` the layer at work and its gradients, layers that were asked for ahead, and what belongs to no layer."""
        sizes = {name: parameter.numel() for name, parameter in self._sharded.items()}
        layers = [sum(size for name, size in sizes.items() if name.startswith(f"{layer}.")) for layer in self._layers]
        whole = sum(sizes.values())
        if not self._keep_whole:
            whole -= sum(layers) - max(layers) * min(len(layers), 2 + self._prefetched)
        return ParameterBytes(
            weights=dtype.itemsize * whole,
            masters=sum(parameter.nbytes for parameter in self.parameters.values()),
            gradients=FLOAT32 * sum(parameter.numel() for parameter in self.owned.values()),
            moments=moments,
        )

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        for module in self._modules:
            # What is whole may stay so until the weights change.
            module.set_reshard_after_backward(last or not self._keep_whole, recurse=False)
        yield
        for name, parameter in self.parameters.items():
            _move_gradient(self._sharded[name], parameter)

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """They come out of the backward pass summed."""

    def sum_squares(self, names: tuple[str, ...], squares_P: Tensor) -> tuple[tuple[str, ...], Tensor]:
        dist.all_reduce(squares_P, group=self._group)
        return names, squares_P

    def changed(self) -> None:
        for module in self._modules:
            module.reshard()

    def full(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, part in held.items():
            yield name, self._whole(name, part.detach().to(dtype))

    def own_state(self, saved: SavedTensors) -> OwnState:
        whole = {name: len(self._sharded[name]) for name in self.owned}
        return OwnState(saved, {name: part_rows(rows, self._rank, self._world) for name, rows in whole.items()}, whole)

    def _whole(self, name: str, part: Tensor) -> Tensor:
        like = self._sharded[name]
        shape, stride = like.shape, like.stride()
        local = part.to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        ).full_tensor()


def _fully_shard(network: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, keep_whole: bool) -> list[FSDPModule]:
    """The network itself and its layers, in the order in which they run."""
    layers = [module for module in network.modules() if isinstance(module, DecoderLayer)]
    if not layers:
        raise ConfigError("sharding: the layers of this model's family are not ours, and are not divided", "leave sharding out")
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    # Inputs need no cast: the embedding gives the compute dtype already.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep_whole, mp_policy=policy)
    fully_shard(network, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    modules: list[FSDPModule] = [module for module in (network, *layers) if isinstance(module, FSDPModule)]
    for module in modules:
        # A plain sum. A divisor of 1 alone would be a premultiplied sum, which gloo does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return modules


@torch.no_grad()
def _fill(network: nn.Module, stored: StoredWeights, device: torch.device, part: int, parts: int) -> None:
    """Allocate and read this process's part of every parameter that has no values."""
    missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
    network._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for name in missing:
        parameter = network.get_parameter(name)
        assert isinstance(parameter, DTensor)
        stored.fill(name, part_rows(len(parameter), part, parts)[0], parameter.to_local())


def _prefetch(modules: list[FSDPModule], count: int) -> None:
    """Ask for the weights of the next `count` layers while one computes, forward and backward; 0 leaves it to torch."""
    if not count:
        return
    root, *layers = modules
    for index, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + count])
    for index, layer in enumerate(layers):
        layer.set_modules_to_backward_prefetch(layers[max(0, index - count) : index][::-1])
    root.set_modules_to_backward_prefetch(layers[-count:][::-1])


@torch.no_grad()
def _move_gradient(sharded: DTensor, parameter: nn.Parameter) -> None:
    if sharded.grad is None:
        return
    assert isinstance(sharded.grad, DTensor)
    part = sharded.grad.to_local()
    parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
    sharded.grad = None
