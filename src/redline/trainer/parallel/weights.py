"""The weights of one network, as the processes of the trainer hold them. A step asks, in this order:

    micro_batch(last)   around forward and backward
    sum_gradients       after the last one
    sum_squares         for the norm of gradients that lie in several processes
    changed             after the optimizer or a checkpoint has written the weights

Because every token's weight in the mean is known for the whole batch, gradients are summed over processes, never averaged.
`Weights` is a single process, `ReplicatedWeights` one of several with the same weights; `sharding.py` divides each of them,
`stages.py` by layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.models.sizes.memory import ParameterBytes
from redline.trainer.checkpoints.tensors import OwnState, SavedTensors

BUCKET_BYTES = 64 * 2**20
"""Gradients sent at once: enough that sending, not starting to send, takes the time."""
MAX_IN_FLIGHT = 2
"""Buckets on their way while the next is packed; each is a copy of its gradients."""


class Weights:
    """All weights are in this process."""

    are_masters = False
    """The parameters are float32 masters, and the network makes its compute dtype of them as it goes. The optimizer is then
    made for float32, whatever that dtype."""

    def __init__(self, network: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(network.named_parameters())
        """What this process holds, by our names; those that are frozen too."""

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """What is trained of them."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def planned_bytes(self, dtype: torch.dtype, moments: int) -> ParameterBytes:
        """What a process that holds a part of the weights has on its device in a step, beside `moments` bytes of moments."""
        raise AssertionError("for weights that processes divide")

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward, `last` of the step. Afterwards the gradients are with `parameters`."""
        return nullcontext()

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Over all processes, in place; each process gives the same names."""

    def sum_squares(self, names: tuple[str, ...], squares_P: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """Every trained parameter of the network, and the squared norm of its whole gradient, from those of what is here."""
        return names, squares_P

    def changed(self) -> None:
        """Forget copies of the weights that were made before."""

    def full(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, one at a time, from what each process holds of them (`parameters`, masters, gradients).
        Every process must go through all of them."""
        for name, tensor in held.items():
            yield name, tensor.detach().to(dtype)

    def written(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What of its optimizer's state this process writes to a checkpoint: not what another one that has it too does."""
        return state

    def own_state(self, saved: SavedTensors) -> OwnState:
        """What this process holds of a saved optimizer's state."""
        whole = {name: len(parameter) for name, parameter in self.owned.items()}
        return OwnState(saved, {name: (0, rows) for name, rows in whole.items()}, whole)


class ReplicatedWeights(Weights):
    """All here, as in every other process: the same sums of gradients keep them equal to the bit."""

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        sum_over(None, gradients)


def sum_over(group: dist.ProcessGroup | None, gradients: Mapping[str, Tensor]) -> None:
    """Sum over the processes of a group, by default all, in place; each process gives the same names in the same order."""
    in_flight: deque[_Bucket] = deque()
    for bucket in _buckets(group, list(gradients.values())):
        in_flight.append(bucket)
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft().receive()
    for bucket in in_flight:
        bucket.receive()


@dataclass(slots=True)
class _Bucket:
    """Gradients that travel as one tensor."""

    gradients: list[Tensor]
    flat: Tensor
    work: dist.Work

    @classmethod
    def sent(cls, group: dist.ProcessGroup | None, gradients: list[Tensor]) -> _Bucket:
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0].view(-1) if alone else torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return cls([] if alone else gradients, flat, work)

    def receive(self) -> None:
        self.work.wait()
        sizes = [gradient.numel() for gradient in self.gradients]
        for gradient, part in zip(self.gradients, self.flat.split(sizes) if sizes else (), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(group: dist.ProcessGroup | None, gradients: list[Tensor]) -> Iterator[_Bucket]:
    """In order, each as full as it may be and on its way; a larger gradient goes alone, and is not copied."""
    together: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if together and size + gradient.nbytes > BUCKET_BYTES:
            yield _Bucket.sent(group, together)
            together, size = [], 0
        together.append(gradient)
        size += gradient.nbytes
    if together:
        yield _Bucket.sent(group, together)
