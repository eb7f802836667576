"""Host arrays → device tensors, in one copy for all arrays of a micro-batch.

    arrays   tokens_T  targets_M  weights_M                     numpy
    bytes    [tokens_T · · |targets_M|weights_M · ]             pinned, each array at a multiple of 16
    device   [tokens_T · · |targets_M|weights_M · ]  ──views──► tensors

The copy runs on a stream of its own, while the device computes the micro-batch before. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; the widest loads of kernels need it."""

Item = TypeVar("Item")
Arrays = Mapping[str, np.ndarray]


class Staging:
    """The way to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self, items: Iterable[tuple[Item, Arrays]]) -> Iterator[tuple[Item, dict[str, Tensor]]]:
        """Each item with its tensors. The next one's are on their way before an item is handed out."""
        waiting: tuple[Item, dict[str, Tensor]] | None = None
        for item, arrays in items:
            coming = item, self._send(arrays)
            if waiting is not None:
                yield waiting[0], self._arrived(waiting[1])
            waiting = coming
        if waiting is not None:
            yield waiting[0], self._arrived(waiting[1])

    def _send(self, arrays: Arrays) -> dict[str, Tensor]:
        if self._stream is None:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._stream.synchronize()  # until then the copy before reads the buffer
        num_bytes = packed_size(arrays)
        if len(self._pinned) < num_bytes:
            self._pinned = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        pack(arrays, self._pinned)
        with torch.cuda.stream(self._stream):
            return views(arrays, self._pinned[:num_bytes].to(self._device, non_blocking=True))

    def _arrived(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the current stream does from here on finds the tensors there."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in tensors.values():
                tensor.record_stream(current)  # else their memory would be taken again while the device still reads it
        return tensors


def packed_size(arrays: Arrays) -> int:
    """Bytes of all arrays end to end, each at a multiple of `ALIGNMENT`."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


def pack(arrays: Arrays, buffer: Tensor) -> None:
    """Write the arrays into uint8[packed_size] or more on the host."""
    for array, room in zip(arrays.values(), _rooms(arrays, buffer), strict=True):
        room.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(arrays: Arrays, buffer: Tensor) -> dict[str, Tensor]:
    """The same arrays as tensors that lie in a packed buffer, on whatever device it is."""
    return {
        name: room.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        for (name, array), room in zip(arrays.items(), _rooms(arrays, buffer), strict=True)
    }


def _rooms(arrays: Arrays, buffer: Tensor) -> Iterator[Tensor]:
    start = 0
    for array in arrays.values():
        yield buffer[start : start + array.nbytes]
        start += _aligned(array.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
