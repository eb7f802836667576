"""One-dimensional arrays that may lie in several places, and are read as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


class Pieces:
    """A flat array that lies in several places, such as two files, and is read as one. Only what is taken of it is copied."""

    __slots__ = ("arrays", "offsets")

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(arrays)
        """One-dimensional, of one dtype, at least one."""
        self.offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
        """int64[pieces + 1]."""

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.arrays[0].dtype

    def __getitem__(self, key: slice | np.ndarray) -> np.ndarray:
        """A slice that lies within one piece is a view of it, everything else a copy: slices, places, or a mask."""
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            piece = int(np.searchsorted(self.offsets, start, side="right")) - 1
            if step == 1 and start <= end and piece < len(self.arrays) and end <= self.offsets[piece + 1]:
                return self.arrays[piece][start - self.offsets[piece] : end - self.offsets[piece]]
            key = np.arange(start, end, step)
        index = np.flatnonzero(key) if key.dtype == np.bool_ else key
        out = np.empty(index.size, self.dtype)
        self.take(index.ravel(), out)
        return out.reshape(index.shape)

    def take(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write the values at these places into `out`, in their order."""
        piece_N = np.searchsorted(self.offsets, index, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(piece_N)) + 1).tolist(), len(index)]
        for start, end in pairwise(cuts):
            if start < end:
                piece = int(piece_N[start])
                take(self.arrays[piece], index[start:end] - self.offsets[piece], out[start:end])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, copied together."""
        return np.concatenate(self.arrays).astype(dtype or self.dtype, copy=False)


Flat = np.ndarray | Pieces
"""One-dimensional, in one place or several."""


def records(values: Flat, width: int) -> Flat:
    """Bytes in runs of `width`, each read as one value. Nothing is copied."""
    if isinstance(values, Pieces):
        return Pieces([array.view(f"V{width}") for array in values.arrays])
    return values.view(f"V{width}")


def take(values: Flat, index: np.ndarray, out: np.ndarray) -> None:
    """Write the values at these places straight into `out`, which has their dtype."""
    assert out.dtype == values.dtype, f"{values.dtype} cannot be written as {out.dtype} without a copy"
    if isinstance(values, Pieces):
        values.take(index, out)
    else:
        np.take(values, index, out=out, mode="clip")  # with any other mode NumPy writes to a copy first
