"""A transport that moves bytes, for the contract suite: engine and trainer have tensors of their own, in one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan


class CopiedTensors:
    """Copies to one side, compares, and copies to where the engine reads. Implements `Transport`."""

    shares_storage = False

    def __init__(self, engine_tensors: Mapping[str, Tensor]) -> None:
        self.engine_tensors = dict(engine_tensors)
        self._arrived: dict[str, Tensor] = {}
        self.lost: str | None = None
        """A tensor whose bytes do not arrive."""
        self.ends_before: str | None = None
        """A tensor at which the connection ends."""

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        self._arrived = {}
        for name in plan.names:
            if name == self.ends_before:
                raise ConnectionError(f"the connection ended before {name}")
            self._arrived[name] = weights.tensors[name].clone() if name != self.lost else self.engine_tensors[name].clone()
        return sum(tensor.nbytes for tensor in self._arrived.values())

    def verify(self, weights: WeightSet) -> None:
        assert weights.tensors.keys() == self.engine_tensors.keys(), "other tensors"
        for name, there in (self.engine_tensors | self._arrived).items():
            sent, read = weights.tensors[name], self.engine_tensors[name]
            assert (sent.shape, sent.dtype) == (read.shape, read.dtype), f"{name}: another form"
            assert torch.equal(there, sent), f"{name}: other bytes"

    def adopt(self) -> None:
        for name, tensor in self._arrived.items():
            self.engine_tensors[name].copy_(tensor)
        self._arrived = {}
