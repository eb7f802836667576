"""How the receiver knows that it has the right bytes: by their address, or by a checksum of every bucket; and that it computes
with them: by the logprobs of a fixed prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from redline.errors import WeightSyncError
from redline.kernels.available import kernels_serve

BLOCK = 2**15
"""Words of a block, 256 KiB: what is summed by itself, and the least that is left out where it did not change. At most so many
that a change by which every element of a type moves alike always shows: their weights sum to 2³⁰ times an odd number."""
AT_ONCE = 4
"""Blocks that are weighed at once without a kernel: 1 MiB, which stays in a cache."""
COLUMNS = 2**10


class SameStorage:
    """Proof by address: an engine that reads the very memory that the trainer writes has the right bytes.

    Keeps the engine's tensors alive. An address that is equal is therefore the same memory, never another tensor's that was
    put there after the first had been freed."""

    def __init__(self, engine_tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(engine_tensors)
        self._addresses = _addresses(engine_tensors)
        self._has_same_form = False
        """Shapes and types are compared once: memory that stays in place keeps them."""

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise AssertionError unless these tensors lie where the engine reads, all of them and no others."""
        addresses = _addresses(tensors)
        assert addresses == self._addresses, (
            "the trainer replaced its tensors; the engine still reads the old ones: "
            + ", ".join(sorted({name for name, _ in addresses.items() ^ self._addresses.items()}))
        )
        if not self._has_same_form:
            for name, tensor in tensors.items():
                engines = self._tensors[name]
                assert (tensor.shape, tensor.dtype) == (engines.shape, engines.dtype), (
                    f"{name}: the trainer writes {tensor.dtype} {list(tensor.shape)},"
                    f" the engine reads {engines.dtype} {list(engines.shape)}"
                )
            self._has_same_form = True


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def checksum(flat: Tensor) -> Tensor:
    """Return Σ word_i · (2 i + 1) modulo 2⁶⁴ of a run of bytes, read as 64-bit words: int64[] on its device. Does not wait for
    the device.

    Every weight is odd, so that a change of one word always shows; the weights differ, so that words in another order show."""
    return block_sums(flat).sum()


def block_sums(flat: Tensor) -> Tensor:
    """Return the part that each block of a run of bytes has in its checksum: int64[blocks] on its device. Does not wait for the
    device."""
    assert flat.dtype == torch.uint8
    assert flat.numel() % 8 == 0
    words_N = flat.view(torch.int64)
    if kernels_serve(words_N):
        from redline.kernels.checksum import PROGRAM, weighted_sums

        assert PROGRAM == BLOCK
        return weighted_sums(words_N)
    return _sums_on_cpu(words_N) if words_N.device.type == "cpu" else _sums_by_torch(words_N)


def _sums_by_torch(words_N: Tensor) -> Tensor:
    weights_W = 2 * torch.arange(BLOCK, device=words_N.device) + 1
    sums = [torch.zeros(0, dtype=torch.int64, device=words_N.device)]
    for start in range(0, words_N.numel(), AT_ONCE * BLOCK):
        words_C = words_N[start : start + AT_ONCE * BLOCK]
        words_BW = F.pad(words_C, (0, -words_C.numel() % BLOCK)).view(-1, BLOCK)
        starts_B = start + BLOCK * torch.arange(len(words_BW), device=words_N.device)
        sums.append((words_BW * weights_W).sum(1) + 2 * starts_B * words_BW.sum(1))
    return torch.cat(sums)


def _sums_on_cpu(words_N: Tensor) -> Tensor:
    """The same by rows and columns of a square, whose sums alone are weighed: additions are vectorised, products of 64 bits are
    not. Word r · COLUMNS + c of a block weighs 2 c + 1 for its column and 2 · COLUMNS · r for its row."""
    words = words_N.numpy()
    whole = len(words) // BLOCK
    sums = np.zeros(-(-len(words) // BLOCK), np.int64)
    with np.errstate(over="ignore"):
        for first in range(0, whole, AT_ONCE):
            end = min(whole, first + AT_ONCE)
            sums[first:end] = _weighed(words[first * BLOCK : end * BLOCK].reshape(end - first, -1, COLUMNS), first)
        rest = words[whole * BLOCK :]
        square, last = rest[: len(rest) // COLUMNS * COLUMNS], rest[len(rest) // COLUMNS * COLUMNS :]
        if len(square):
            sums[whole] = _weighed(square.reshape(1, -1, COLUMNS), whole)[0]
        if len(last):
            sums[whole] += np.dot(last, 2 * np.arange(len(words) - len(last), len(words)) + 1)
    return torch.from_numpy(sums)


def _weighed(words_BRC: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The sums of blocks, of which the first has this index."""
    columns_BC, rows_BR = np.add.reduce(words_BRC, 1), np.add.reduce(words_BRC, 2)
    starts_B = 2 * BLOCK * np.arange(first, first + len(words_BRC))
    weighed_B = columns_BC @ (2 * np.arange(COLUMNS) + 1) + 2 * COLUMNS * (rows_BR @ np.arange(rows_BR.shape[1]))
    found: NDArray[np.int64] = weighed_B + starts_B * np.add.reduce(rows_BR, 1)
    return found


@dataclass(slots=True, frozen=True)
class Probe:
    """A prompt and what the trainer makes of it: the engine must come to the same."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Of each token after the first, under the weights that were sent."""
    tolerance: float
    """Most that the mean absolute difference may be."""

    def to_json(self) -> dict[str, Any]:
        return {name: value if name == "tolerance" else list(value) for name, value in asdict(self).items()}


def check_logprobs(expected: Sequence[float], found: Sequence[float], tolerance: float) -> None:
    """Raise WeightSyncError unless two lists of logprobs agree on average. NaN never does."""
    if len(expected) != len(found):
        raise WeightSyncError(f"the engine gave {len(found)} logprobs of a probe, the trainer {len(expected)}")
    mean = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / max(1, len(expected))
    if not mean <= tolerance:
        of_engine, of_trainer = (sum(logprobs) / len(logprobs) for logprobs in (found, expected))
        why = (
            f"the engine's logprobs of a fixed prompt are {mean:.3g} from the trainer's on average, more than {tolerance:g}"
            f" (their means: {of_engine:.4g} and {of_trainer:.4g})"
        )
        raise WeightSyncError(why, "the bytes arrived, but the engine does not compute with them as the trainer does")
