"""`PackedAttention` on a CUDA device: torch's FlashAttention over the segments as they lie, nothing padded.

A segment that continues another attends to the parent's keys and then its own, so keys and values are gathered into one run
per segment; queries stay where they are. FlashAttention aligns the causal mask at the end, where a segment's own tokens are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.models.packed_attention import NO_PARENT, PackedAttention, Segments


def packed_attention(segments: Segments, device: torch.device) -> FlashPackedAttention | PackedAttention:
    """The attention of one packed batch that suits the device."""
    return FlashPackedAttention(segments, device) if device.type == "cuda" else PackedAttention(segments, device)


class FlashPackedAttention:
    """An `Attend` for one packed batch."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self._segments = segments
        self._exact: PackedAttention | None = None
        """For float32, which FlashAttention does not take."""
        lengths, before = segments.lengths, segments.parent_lengths
        self._longest = int(lengths.max(initial=0)), int((lengths + before).max(initial=0))
        self._query_offsets = _upload(segments.offsets.astype(np.int32), device)
        self._key_offsets, self._keys = self._query_offsets, None
        if (segments.parents != NO_PARENT).any():
            offsets, keys = key_runs(segments)
            self._key_offsets, self._keys = _upload(offsets.astype(np.int32), device), _upload(keys, device)
        self.positions_T = _upload(segments.positions(), device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if q_THD.dtype not in (torch.bfloat16, torch.float16):
            self._exact = self._exact or PackedAttention(self._segments, q_THD.device)
            return self._exact(layer, q_THD, k_TKD, v_TKD)
        if self._keys is not None:
            k_TKD, v_TKD = _GatherRuns.apply(k_TKD, v_TKD, self._keys)
        out, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_TKD,
            v_TKD,
            self._query_offsets,
            self._key_offsets,
            *self._longest,
            0.0,  # dropout
            True,  # causal
            False,
        )
        return out


def key_runs(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [segments + 1] of every segment's keys, and the packed index of each: its parent's tokens, then its own."""
    before, lengths = segments.parent_lengths, segments.lengths
    offsets = np.concatenate([[0], np.cumsum(before + lengths)])
    column = np.arange(offsets[-1]) - np.repeat(offsets[:-1], before + lengths)
    starts, parents = segments.offsets[:-1], np.maximum(segments.parents, 0)
    before_C = np.repeat(before, before + lengths)
    own_C = np.repeat(starts, before + lengths) + column - before_C
    parent_C = np.repeat(starts[parents], before + lengths) + column
    return offsets, np.where(column < before_C, parent_C, own_C)


class _GatherRuns(torch.autograd.Function):
    """Keys and values by index. The gradient of a shared token is the sum over its uses, in float32."""

    @staticmethod
    def forward(ctx: Any, k_TKD: Tensor, v_TKD: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(keys)
        ctx.num_tokens = len(k_TKD)
        return k_TKD[keys], v_TKD[keys]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (keys,) = ctx.saved_tensors
        sums = []
        for grad in grads:
            total = torch.zeros(ctx.num_tokens, *grad.shape[1:], dtype=torch.float32, device=grad.device)
            sums.append(total.index_add_(0, keys, grad.float()).to(grad.dtype))
        return sums[0], sums[1], None


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
