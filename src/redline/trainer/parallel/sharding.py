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

from redline.errors import ConfigError, RunFolderError
from redline.models.decoder import DecoderLayer
from redline.trainer.parallel.place import Division
from redline.trainer.parallel.weights import Weights


class ShardedWeights(Weights):
    """A part of each, along its first dimension."""

    are_masters = True

    def __init__(self, network: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, division: Division) -> None:
        shards = mesh["shard"] if mesh.ndim > 1 else mesh
        self._rank, self._world, self._group = shards.get_local_rank(), shards.size(), shards.get_group()
        self._is_main = mesh.get_rank() == 0
        self._keep_whole = division.sharding == "grad_op"
        self._modules = _fully_shard(network, mesh, dtype, self._keep_whole)
        _prefetch(self._modules, division.prefetch_layers)
        self._sharded: dict[str, DTensor] = {}
        self.parameters = {}
        for name, parameter in network.named_parameters():
            assert isinstance(parameter, DTensor)
            self._sharded[name] = parameter
            with torch.no_grad():
                self.parameters[name] = nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)

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

    def sum_squares(self, squares_P: Tensor) -> Tensor:
        dist.all_reduce(squares_P, group=self._group)
        return squares_P

    def changed(self) -> None:
        for module in self._modules:
            module.reshard()

    def full(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, part in held.items():
            yield name, self._whole(name, part.detach().to(dtype))

    def full_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathered one tensor at a time, so that no device ever holds more than one."""
        gathered: dict[str, Tensor] = {}
        own_layout = self._kinds_of_own_layout(state)
        for key, value in state.items():
            kind, _, name = key.partition("/")
            if name not in self.parameters:
                whole = value
            elif kind in own_layout:
                whole = self._side_by_side(value)
            else:
                whole = self._whole(name, value)
            if self._is_main:
                gathered[key] = whole.to("cpu", copy=True)
        return gathered

    def local_state(self, state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        own_layout = self._kinds_of_own_layout(like)
        for key, value in state.items():
            kind, _, name = key.partition("/")
            if name not in self.parameters:
                parts[key] = value
            elif kind in own_layout:
                parts[key] = self._own_row(key, value)[: len(like[key])]
            else:
                parts[key] = self._part(name, value)
        return parts

    def _kinds_of_own_layout(self, state: Mapping[str, Tensor]) -> set[str]:
        """Kinds of a state that are not shaped like the parameters, such as the scales of 8-bit moments. Told by all parameters
        together: one alone may have the shape of its scales by chance, and on one process only."""
        split = {key: key.partition("/") for key in state}
        return {
            kind
            for key, (kind, _, name) in split.items()
            if name in self.parameters and state[key].shape != self.parameters[name].shape
        }

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """As FSDP2 cuts: the last parts may be shorter, or empty."""
        if whole.shape != self._sharded[name].shape:
            return whole  # of another model, which the optimizer will say
        parts = whole.chunk(self._world)
        return parts[self._rank] if self._rank < len(parts) else whole[:0]

    def _own_row(self, key: str, rows: Tensor) -> Tensor:
        if rows.dim() != 2 or len(rows) != self._world:
            raise RunFolderError(
                f"the checkpoint's {key} is not of {self._world} processes, and 8-bit states cannot be divided anew",
                "resume with as many processes as before and the same sharding",
            )
        return rows[self._rank]

    def _whole(self, name: str, part: Tensor) -> Tensor:
        like = self._sharded[name]
        shape, stride = like.shape, like.stride()
        local = part.to(like.device)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        ).full_tensor()

    def _side_by_side(self, value: Tensor) -> Tensor:
        """[processes, entries] of what has no place in the whole parameter, such as the scales of a part's blocks."""
        longest = torch.tensor(len(value))
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        rows = value.new_zeros(self._world, int(longest), device=next(iter(self._sharded.values())).device)
        rows[self._rank, : len(value)] = value
        dist.all_reduce(rows, group=self._group)
        return rows


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
