"""`PackedAttention` on a CUDA device: the segments as they lie, nothing padded.

On Hopper GPUs, for heads of 64 or 128 and attempts that stand behind their prompts, our own kernels are 1.5 to 3 times as fast
as torch's FlashAttention (benchmarks/LOG.md). Everything else goes to the latter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from redline.kernels.attention_plan import children_follow
from redline.kernels.available import has_triton
from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention.limits import NO_LIMITS, Limits
from redline.models.attention.packed import PackedAttention

if TYPE_CHECKING:
    from redline.models.layers.fused import ManualAttend

_DROPOUT, _CAUSAL, _DEBUG_MASK = 0.0, True, False
_AMPERE, _HOPPER = 8, 9
_MAX_ELEMENTS = 2**31
"""Elements of a tensor at the most, for kernels that count them in 32 bits."""


def packed_attention(segments: Segments, device: torch.device) -> FlashPackedAttention | PackedAttention:
    """The attention of one packed batch that suits the device. FlashAttention begins with Ampere."""
    has_flash = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _AMPERE
    return FlashPackedAttention(segments, device) if has_flash else PackedAttention(segments, device)


class FlashPackedAttention:
    """An `Attend` for one packed batch, and a `ManualAttend`."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self._segments, self._device = segments, device
        self._exact: PackedAttention | None = None
        """For float32, and for layers with limits, which neither of the others takes."""
        self._by_heads: dict[tuple[int, int, int], ManualAttend] = {}
        self.positions_T = _upload(segments.positions(), device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, limits: Limits = NO_LIMITS) -> Tensor:
        if q_THD.dtype not in (torch.bfloat16, torch.float16) or limits != NO_LIMITS:
            self._exact = self._exact or PackedAttention(self._segments, q_THD.device)
            return self._exact(layer, q_THD, k_TKD, v_TKD, limits)
        return _Attention.apply(self, *(_heads_side_by_side(part) for part in (q_THD, k_TKD, v_TKD)))

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._of(q_THD, k_TKD).forward(q_THD, k_TKD, v_TKD)

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        kept: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        return self._of(q_THD, k_TKD).backward(grad_THD, q_THD, k_TKD, v_TKD, out_THD, kept, rotary)

    def _of(self, q_THD: Tensor, k_TKD: Tensor) -> ManualAttend:
        heads = (q_THD.shape[1], *k_TKD.shape[1:])
        if heads not in self._by_heads:
            self._by_heads[heads] = self._suited_to(*heads)
        return self._by_heads[heads]

    def _suited_to(self, num_heads: int, num_kv_heads: int, head_dim: int) -> ManualAttend:
        num_elements = int(self._segments.offsets[-1]) * (num_heads + 2 * num_kv_heads) * head_dim
        is_hopper = torch.cuda.get_device_capability(self._device)[0] == _HOPPER
        if is_hopper and has_triton() and children_follow(self._segments) and num_elements < _MAX_ELEMENTS:
            from redline.kernels.packed_attention import TILES, AttentionKernels

            if head_dim in TILES:
                return AttentionKernels(self._segments, num_heads, num_kv_heads, head_dim, self._device)
        return TorchFlashAttention(self._segments, self._device)


class TorchFlashAttention:
    """A `ManualAttend` of torch's FlashAttention.

    A segment that continues another attends to the parent's keys and then its own, so keys and values are gathered into one
    run per segment; queries stay where they are. The causal mask is aligned at the end, where a segment's own tokens are.
    """

    def __init__(self, segments: Segments, device: torch.device) -> None:
        lengths, before = segments.lengths, segments.parent_lengths
        longest = int(lengths.max(initial=0)), int((lengths + before).max(initial=0))
        queries = keys = _upload(segments.offsets.astype(np.int32), device)
        self._keys: Tensor | None = None
        """Where the keys of every segment are; None where each has its own."""
        if (segments.parents != NO_PARENT).any():
            offsets, places = key_runs(segments)
            keys, self._keys = _upload(offsets.astype(np.int32), device), _upload(places, device)
        self._runs = (queries, keys, *longest)

    def forward(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._keys is not None:
            k_TKD, v_TKD = k_TKD[self._keys], v_TKD[self._keys]
        out_THD, *kept, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, *self._runs, _DROPOUT, _CAUSAL, _DEBUG_MASK
        )
        return out_THD, tuple(kept)

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
        kept: tuple[Tensor, ...],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        logsumexp, *random = kept
        num_tokens, K = k_TKD.shape[:2]
        if self._keys is not None:
            k_TKD, v_TKD = k_TKD[self._keys], v_TKD[self._keys]
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad_THD, q_THD, k_TKD, v_TKD, out_THD, logsumexp, *self._runs, _DROPOUT, _CAUSAL, *random
        )
        if self._keys is not None:
            grad_k, grad_v = (_sum_of_uses(part, self._keys, num_tokens) for part in (grad_k, grad_v))
        grad_TXD = torch.cat([grad_q, grad_k, grad_v], dim=1)
        if rotary is not None:
            from redline.kernels.training import rotation_

            rotation_(grad_TXD.flatten(1), q_THD.shape[1] + K, *rotary, backwards=True)
        return grad_TXD


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
        grad_TXD = ctx.attend.backward(grads[0].contiguous(), q_THD, k_TKD, v_TKD, out_THD, tuple(kept), None)
        grad_q, grad_k, grad_v = grad_TXD.split([part.shape[1] for part in (q_THD, k_TKD, v_TKD)], dim=1)
        return None, grad_q, grad_k, grad_v


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


def _heads_side_by_side(heads_THD: Tensor) -> Tensor:
    """As the projection wrote them."""
    D = heads_THD.shape[2]
    return heads_THD if heads_THD.stride()[1:] == (D, 1) else heads_THD.contiguous()
