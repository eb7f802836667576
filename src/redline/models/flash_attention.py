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

_DROPOUT, _CAUSAL, _DEBUG_MASK = 0.0, True, False


def packed_attention(segments: Segments, device: torch.device) -> FlashPackedAttention | PackedAttention:
    """The attention of one packed batch that suits the device."""
    return FlashPackedAttention(segments, device) if device.type == "cuda" else PackedAttention(segments, device)


class FlashPackedAttention:
    """An `Attend` for one packed batch, and a `ManualAttend`."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self._segments = segments
        self._exact: PackedAttention | None = None
        """For float32, which FlashAttention does not take."""
        lengths, before = segments.lengths, segments.parent_lengths
        longest = int(lengths.max(initial=0)), int((lengths + before).max(initial=0))
        queries = keys = _upload(segments.offsets.astype(np.int32), device)
        self._keys: Tensor | None = None
        """Where the keys of every segment are; None where each has its own."""
        if (segments.parents != NO_PARENT).any():
            offsets, places = key_runs(segments)
            keys, self._keys = _upload(offsets.astype(np.int32), device), _upload(places, device)
        self._runs = (queries, keys, *longest)
        self.positions_T = _upload(segments.positions(), device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if q_THD.dtype not in (torch.bfloat16, torch.float16):
            self._exact = self._exact or PackedAttention(self._segments, q_THD.device)
            return self._exact(layer, q_THD, k_TKD, v_TKD)
        return _Attention.apply(self, q_THD, k_TKD, v_TKD)

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._keys is not None:
            k_TKD, v_TKD = k_TKD[self._keys], v_TKD[self._keys]
        out_THD, *kept, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, *self._runs, _DROPOUT, _CAUSAL, _DEBUG_MASK
        )
        return out_THD, tuple(kept)

    def backward(
        self, grad: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logsumexp, *random = kept
        num_tokens = len(k_TKD)
        if self._keys is not None:
            k_TKD, v_TKD = k_TKD[self._keys], v_TKD[self._keys]
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad, q_THD, k_TKD, v_TKD, out_THD, logsumexp, *self._runs, _DROPOUT, _CAUSAL, *random
        )
        if self._keys is not None:
            grad_k, grad_v = (_sum_of_uses(part, self._keys, num_tokens) for part in (grad_k, grad_v))
        return grad_q, grad_k, grad_v


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attend: FlashPackedAttention, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_THD, kept = attend.forward(q_THD, k_TKD, v_TKD)
        ctx.attend = attend
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, *kept)
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q_THD, k_TKD, v_TKD, out_THD, *kept = ctx.saved_tensors
        return None, *ctx.attend.backward(grads[0].contiguous(), q_THD, k_TKD, v_TKD, out_THD, tuple(kept))


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


def _sum_of_uses(grad: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    """The gradient of a shared token is the sum over the segments that use it, in float32."""
    total = torch.zeros(num_tokens, *grad.shape[1:], dtype=torch.float32, device=grad.device)
    return total.index_add_(0, places, grad.float()).to(grad.dtype)


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
