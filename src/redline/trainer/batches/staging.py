"""Host arrays → device tensors, in one copy for all arrays of a micro-batch.

    files    tokens ▒▒▓▓▓▒▒▓▓▒▒  logprobs ▒▒▓▓▓▒▒▓▓▒▒           mapped; a micro-batch takes some of it
    bytes    [tokens · · |targets|old_logprobs_M · ]            pinned, each array at a multiple of 16
    device   [tokens · · |targets|old_logprobs_M · ]  ──views──► tensors

What a micro-batch takes of its batch (`Taken`) is written to the pinned bytes straight from where it lies: there is no other
copy on the host. The copy to the device runs on a stream of its own, while the device computes the micro-batch before. On the
CPU the tensors are views of the bytes, which are new ones each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from redline.types import Flat, take

ALIGNMENT = 16
"""Bytes; the widest loads of kernels need it."""

Item = TypeVar("Item")


@dataclass(slots=True, frozen=True)
class Taken:
    """Values of a batch at some places: written once, to where they are wanted."""

    values: Flat
    index: np.ndarray
    """int64[N]."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: slice | np.ndarray) -> Taken:
        """Fewer of them; nothing is read yet."""
        return Taken(self.values, self.index[key])

    @property
    def shape(self) -> tuple[int]:
        return (len(self.index),)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return len(self.index) * self.dtype.itemsize

    def write(self, out: np.ndarray) -> None:
        take(self.values, self.index, out)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = np.empty(len(self.index), self.dtype)
        self.write(out)
        return out.astype(dtype or self.dtype, copy=False)


Values = np.ndarray | Taken
Arrays = Mapping[str, Values]


class Staging:
    """The way to one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def sent(self, items: Iterable[tuple[Item, Arrays]]) -> Iterator[tuple[Item, dict[str, Tensor]]]:
        """Each item with its tensors. One is packed and sent when it is asked for: the host gets there while the device still
        computes what it was given before, and before the first it would only keep the device waiting longer."""
        for item, arrays in items:
            yield item, self.send(arrays)

    def send(self, arrays: Arrays) -> dict[str, Tensor]:
        """What the current stream does from here on finds the tensors there."""
        return self._arrived(self._copied(arrays))

    def _copied(self, arrays: Arrays) -> dict[str, Tensor]:
        num_bytes = packed_size(arrays)
        if self._stream is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            pack(arrays, buffer)
            return views(arrays, buffer)
        self._stream.synchronize()  # until then the copy before reads the buffer
        if len(self._pinned) < num_bytes:
            self._pinned = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        pack(arrays, self._pinned)
        with torch.cuda.stream(self._stream):
            return views(arrays, self._pinned[:num_bytes].to(self._device, non_blocking=True))

    def _arrived(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
        if isinstance(array, Taken):
            array.write(room.numpy().view(array.dtype))
        else:
            room.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(arrays: Arrays, buffer: Tensor) -> dict[str, Tensor]:
    """The same arrays as tensors that lie in a packed buffer, on whatever device it is. Values that are runs of bytes (NumPy's
    void) become rows of uint8."""
    return {name: _tensor(room, array) for (name, array), room in zip(arrays.items(), _rooms(arrays, buffer), strict=True)}


def _tensor(room: Tensor, array: Values) -> Tensor:
    if array.dtype.kind == "V":
        return room.view(*array.shape, array.dtype.itemsize)
    return room.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)


def _rooms(arrays: Arrays, buffer: Tensor) -> Iterator[Tensor]:
    start = 0
    for array in arrays.values():
        yield buffer[start : start + array.nbytes]
        start += _aligned(array.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
