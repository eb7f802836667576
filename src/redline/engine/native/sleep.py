"""Lending the engine's memory to somebody else, the trainer as a rule, and taking it back.

The KV cache is simply dropped: sequences under way are computed again when the engine wakes. Weights go to the host and come
back to the same tensors, so other references to those tensors stay valid.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True, frozen=True)
class MemoryMoved:
    """What going to sleep freed, or waking took."""

    kv_bytes: int
    weight_bytes: int
    seconds: float


class Stopwatch:
    """Seconds since it was made, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._now() - self._start


class OffloadedWeights:
    """The parameters of a network, moved to the host; the tensors on the device stay, without storage."""

    def __init__(self, network: nn.Module) -> None:
        self._on_host: list[tuple[Tensor, Tensor]] = []
        self._storages = []
        for parameter in network.parameters():
            host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
            host.copy_(parameter.detach())
            self._on_host.append((parameter, host))
        for tensor, _ in self._on_host:
            storage = tensor.untyped_storage()
            self._storages.append((storage, storage.nbytes()))
            storage.resize_(0)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._storages)

    @torch.no_grad()
    def restore(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
        for parameter, host in self._on_host:
            parameter.copy_(host)
