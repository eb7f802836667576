"""The paged KV cache: one tensor for all layers, cut into blocks that sequences refer to by number."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from redline.kernels.available import kernels_serve


class KVShape(Protocol):
    """What a network says about its keys and values."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values of `num_blocks` blocks.

    On CUDA a block is [K, block_size, D], so that a program that attends with one head reads consecutive memory. Elsewhere
    it is [block_size, K, D], so that gathered blocks are a contiguous run of tokens."""

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        heads_first: bool | None = None,
        routing: tuple[int, int] | None = None,
    ) -> None:
        """With `routing`, layers with experts and choices of a token, it has room for the experts that each token went to."""
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.heads_first = device.type == "cuda" if heads_first is None else heads_first
        K, D = shape.num_kv_heads, shape.head_dim
        block = (K, block_size, D) if self.heads_first else (block_size, K, D)
        # Zeros, because a masked key still meets its value: 0 times whatever uninitialised memory holds may be NaN.
        self.blocks = _zeros((shape.num_layers, 2, num_blocks, *block), device, dtype)
        self.routing = None if routing is None else _zeros((num_blocks, block_size, *routing), device, torch.uint8)
        """uint8[blocks, block_size, L, C] of L layers with experts: it goes with the keys and values of a token wherever they
        go, to other sequences with the same beginning, and out with them."""

    @staticmethod
    def bytes_per_block(shape: KVShape, block_size: int, dtype: torch.dtype, routing: tuple[int, int] | None = None) -> int:
        """2 · layers · block_size · kv_heads · head_dim · bytes per value, and a byte for each choice of an expert."""
        choices = 0 if routing is None else block_size * math.prod(routing)
        return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize + choices

    @property
    def bytes(self) -> int:
        return self.blocks.nbytes + (0 if self.routing is None else self.routing.nbytes)

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store tokens at their slots: `block · block_size + offset`."""
        for cache, fresh in zip(self.blocks[layer], (k_TKD, v_TKD), strict=True):
            if self.heads_first:
                cache[slots_T // self.block_size, :, slots_T % self.block_size] = fresh
            else:
                cache.view(-1, *cache.shape[2:]).index_copy_(0, slots_T, fresh)

    def is_finite(self, slots_T: Tensor) -> bool:
        """Whether neither NaN nor infinity is at these slots, in any layer."""
        return bool(self.blocks[self._at(slots_T)].isfinite().all())

    def clear(self, slots_T: Tensor) -> None:
        """Zeros at these slots, in all layers."""
        self.blocks[self._at(slots_T)] = 0

    def _at(self, slots_T: Tensor) -> tuple[slice | Tensor, ...]:
        """The index of slots in `blocks`."""
        blocks_T, offsets_T, every = slots_T // self.block_size, slots_T % self.block_size, slice(None)
        return (every, every, blocks_T, every, offsets_T) if self.heads_first else (every, every, blocks_T, offsets_T)

    def gather(self, layer: int, blocks_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, N · block_size, D] of each row of blocks."""
        B, N = blocks_BN.shape
        keys, values = (cache.index_select(0, blocks_BN.flatten()) for cache in self.blocks[layer])
        if self.heads_first:
            return tuple(x.view(B, N, *x.shape[1:]).transpose(1, 2).flatten(2, 3) for x in (keys, values))
        return tuple(x.view(B, N * self.block_size, *x.shape[2:]).transpose(1, 2) for x in (keys, values))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, in all layers."""
        if self.routing is not None:
            self.routing[targets] = self.routing[sources]
        if kernels_serve(self.blocks):
            from redline.kernels.decode import copy_blocks

            copy_blocks(self.blocks, sources, targets)
            return
        self.blocks[:, :, targets] = self.blocks[:, :, sources]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """On the CPU, memory that the system clears as it is first touched: a cache larger than needed costs nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
