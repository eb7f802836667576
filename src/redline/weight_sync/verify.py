"""How the receiver knows that it has the right bytes: by their address, or by a checksum of every bucket; and that it computes
with them: by the logprobs of a fixed prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.errors import WeightSyncError
from redline.kernels.available import kernels_serve

BLOCK = 2**15
"""Words of a block, 256 KiB: what is summed by itself, and the least that is left out where it did not change."""
AT_ONCE = 4
"""Blocks that torch mixes at once, on a device without a kernel of ours."""
STRIDE = 0x9E3779B97F4A7C15
"""What a word's place counts: 2⁶⁴ over the golden ratio, odd."""
FACTOR = 0xD6E8FEB86659FD93
"""Of both rounds of `mix` in `checksum`: the mixer of degski. Its shifts by 32 cost a GPU one instruction each."""


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
    """Return Σ mix(word_i + (i + 1) · STRIDE) modulo 2⁶⁴ of a run of bytes, read as 64-bit words: int64[] on its device. Does
    not wait for the device.

        mix(x):  x ← (x ⊕ x ≫ 32) · FACTOR;  x ← (x ⊕ x ≫ 32) · FACTOR;  x ⊕ x ≫ 32

    Every step of `mix` can be undone, so that a change of one word always shows. Each bit of a word and of its place moves
    every bit of what is summed: several changes, or words in another order, sum to the same only by a chance of 64 bits."""
    return block_sums(flat).sum()


def block_sums(flat: Tensor) -> Tensor:
    """Return the part that each block of a run of bytes has in its checksum: int64[blocks] on its device. Does not wait for the
    device."""
    assert flat.dtype == torch.uint8
    assert flat.numel() % 8 == 0
    words_N = flat.view(torch.int64)
    if kernels_serve(words_N):
        from redline.kernels.checksum import PROGRAM, mixed_sums

        assert PROGRAM == BLOCK
        return mixed_sums(words_N)
    return _sums_on_cpu(words_N) if words_N.device.type == "cpu" else _sums_by_torch(words_N)


def _sums_by_torch(words_N: Tensor) -> Tensor:
    places_W = (torch.arange(BLOCK, device=words_N.device) + 1) * _signed(STRIDE)
    sums = [torch.zeros(0, dtype=torch.int64, device=words_N.device)]
    for start in range(0, words_N.numel(), AT_ONCE * BLOCK):
        words_C = words_N[start : start + AT_ONCE * BLOCK]
        words_BW = F.pad(words_C, (0, -words_C.numel() % BLOCK)).view(-1, BLOCK)
        starts_B = (start + BLOCK * torch.arange(len(words_BW), device=words_N.device)) * _signed(STRIDE)
        mixed_BW = _mixed_by_torch(words_BW + places_W + starts_B[:, None])
        mixed_BW.view(-1)[words_C.numel() :] = 0
        sums.append(mixed_BW.sum(1))
    return torch.cat(sums)


def _mixed_by_torch(x: Tensor) -> Tensor:
    for _ in range(2):
        x = (x ^ _upper(x)) * _signed(FACTOR)
    return x ^ _upper(x)


def _upper(x: Tensor) -> Tensor:
    """The upper half of each word, zeros above it: torch's own shift brings copies of the sign."""
    return (x >> 32) & (2**32 - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _sums_on_cpu(words_N: Tensor) -> Tensor:
    words = words_N.numpy().view(np.uint64)
    places_W = np.arange(1, min(BLOCK, len(words)) + 1, dtype=np.uint64) * np.uint64(STRIDE)
    mixed_W, upper_W = np.empty_like(places_W), np.empty_like(places_W)
    sums = np.zeros(-(-len(words) // BLOCK), np.uint64)
    for block, start in enumerate(range(0, len(words), BLOCK)):
        part = words[start : start + BLOCK]
        x, upper = mixed_W[: len(part)], upper_W[: len(part)]
        np.add(part, places_W[: len(part)], out=x)
        x += np.uint64(start * STRIDE % 2**64)
        for _ in range(2):
            x ^= np.right_shift(x, 32, out=upper)
            x *= np.uint64(FACTOR)
        x ^= np.right_shift(x, 32, out=upper)
        sums[block] = np.add.reduce(x)
    return torch.from_numpy(sums.view(np.int64))


@dataclass(slots=True, frozen=True)
class Probe:
    """A prompt and what the trainer makes of it: the engine must come to the same."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Logprob of each token after the first, under the weights that were sent."""
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
