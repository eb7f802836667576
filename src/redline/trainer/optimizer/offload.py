"""Where the optimizer's state lies between steps: on the device, or in host memory with a passage through the device.

    incoming   in 0 │ in 1 │ in 2   │ in 3   │
    compute         │ 0    │ 1      │ 2      │ …
    outgoing               │ out 0  │ out 1  │

Two slots on the device hold a stretch each. A slot is filled while the other is worked on, and both directions of the bus are
busy at once: the step takes as long as the slower of them, not as their sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from redline.kernels.flat_state import Stretch
from redline.trainer.optimizer.flat_layout import part
from redline.trainer.optimizer.quantized_states import Kept

STRETCH_ELEMENTS = 16 * 2**20
"""Elements worked on at once: 192 MiB of float32 masters and moments. Copying them takes about 4 ms, far longer than starting
the copies."""

ALIGNMENT = 512
"""Bytes; of every tensor in a host buffer."""


class StateMemory(Protocol):
    """Flat tensors by name, worked on one stretch at a time."""

    tensors: Mapping[str, Tensor]
    """Where they lie. Wait with `settle` before reading."""

    def visit(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, dict[str, Tensor]]]:
        """Each stretch with its entries on the device, which the caller may overwrite. To be run to the end."""
        ...

    def settle(self) -> None:
        """Wait until everything overwritten is where it lies."""
        ...


class DeviceMemory:
    """State that stays on the device."""

    def __init__(self, kept: Kept, num_elements: int, device: torch.device) -> None:
        self.tensors: Mapping[str, Tensor] = {
            name: torch.zeros(num_elements // per_entry, dtype=dtype, device=device)
            for name, (dtype, per_entry) in kept.items()
        }
        self._num_elements = num_elements

    def visit(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, dict[str, Tensor]]]:
        for stretch in stretches:
            yield stretch, {name: part(tensor, stretch, self._num_elements) for name, tensor in self.tensors.items()}

    def settle(self) -> None:
        pass


class HostMemory:
    """State in pinned host memory. For a CPU device, which does not need it, the same without streams."""

    def __init__(self, kept: Kept, num_elements: int, device: torch.device) -> None:
        shapes = {name: (dtype, torch.Size([num_elements // per_entry])) for name, (dtype, per_entry) in kept.items()}
        self.tensors: Mapping[str, Tensor] = host_tensors(shapes, device)
        self._num_elements = num_elements
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._incoming, self._outgoing = self._streams.Stream(), self._streams.Stream()

    def visit(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, dict[str, Tensor]]]:
        compute = self._streams.current_stream()
        # The slots may be memory that the compute stream has not done with, and the last visit may still be on its way out.
        slots = [self._slot(stretches), self._slot(stretches)]
        self._incoming.wait_stream(compute)
        self._incoming.wait_stream(self._outgoing)
        if stretches:
            self._fetch(stretches[0], slots[0])
        for index, stretch in enumerate(stretches):
            slot = slots[index % 2]
            compute.wait_event(slot.arrived)
            if index + 1 < len(stretches):
                self._fetch(stretches[index + 1], slots[(index + 1) % 2])
            here = slot.parts(stretch, self.tensors, self._num_elements)
            yield stretch, here
            self._send(stretch, slot, here)

    def settle(self) -> None:
        if self._device.type == "cuda":
            self._outgoing.synchronize()

    def _slot(self, stretches: Sequence[Stretch]) -> _Slot:
        longest = max((stretch.length for stretch in stretches), default=0)
        tensors = {
            name: torch.empty(longest * len(tensor) // self._num_elements, dtype=tensor.dtype, device=self._device)
            for name, tensor in self.tensors.items()
        }
        if self._device.type == "cuda":
            for tensor in tensors.values():
                tensor.record_stream(self._incoming)
                tensor.record_stream(self._outgoing)
        return _Slot(tensors, self._streams.Event(), self._streams.Event())

    def _fetch(self, stretch: Stretch, slot: _Slot) -> None:
        self._incoming.wait_event(slot.left)
        with self._streams.stream(self._incoming):
            for name, here in slot.parts(stretch, self.tensors, self._num_elements).items():
                here.copy_(part(self.tensors[name], stretch, self._num_elements), non_blocking=True)
        slot.arrived.record(self._incoming)

    def _send(self, stretch: Stretch, slot: _Slot, here: Mapping[str, Tensor]) -> None:
        self._outgoing.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._outgoing):
            for name, tensor in here.items():
                part(self.tensors[name], stretch, self._num_elements).copy_(tensor, non_blocking=True)
        slot.left.record(self._outgoing)


class _Slot:
    """Room for one stretch on the device."""

    def __init__(self, tensors: dict[str, Tensor], arrived: Any, left: Any) -> None:
        self.tensors = tensors
        self.arrived = arrived
        """Event: the stretch is here."""
        self.left = left
        """Event: the stretch before it is back in host memory."""

    def parts(self, stretch: Stretch, whole: Mapping[str, Tensor], num_elements: int) -> dict[str, Tensor]:
        return {name: tensor[: stretch.length * len(whole[name]) // num_elements] for name, tensor in self.tensors.items()}


class HostTensors(dict[str, Tensor]):
    """Tensors by name that share pinned memory. It is pinned for as long as this object lives; the views of a tensor do not
    keep the tensor."""


def host_tensors(shapes: Mapping[str, tuple[torch.dtype, torch.Size]], device: torch.device) -> HostTensors:
    """Zeros in host memory that `device` can read and write by itself.

    One buffer for all, since a page of memory can be pinned but once. Registered with CUDA by hand: torch's own pinned
    allocator would round its size up to a power of two."""
    sizes: list[int] = [-(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for dtype, shape in shapes.values()]
    num_bytes: int = sum(sizes)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    rooms = zip(shapes.items(), buffer.split(sizes), strict=True)
    tensors = HostTensors(
        {name: room[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for (name, (dtype, shape)), room in rooms}
    )
    if device.type == "cuda" and num_bytes:
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        weakref.finalize(tensors, _unregister, buffer)
    return tensors


def _unregister(buffer: Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(buffer.data_ptr())
