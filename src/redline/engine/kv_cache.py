"""Keys and values of the sequences being decoded: one contiguous row per sequence, all rows of equal capacity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.models.packed_attention import PackedAttention
from redline.models.spec import DecoderSpec


class KVCache:
    """Rows [B, capacity, K, D] per layer. Row b holds `lengths_B[b]` tokens; what lies beyond is never read."""

    def __init__(self, spec: DecoderSpec, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (spec.num_layers, rows, capacity, spec.num_kv_heads, spec.head_dim)
        # Zeros, because a masked key still meets its value: 0 times whatever uninitialised memory holds may be NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths_B = torch.zeros(rows, device=device, dtype=torch.int64)

    @property
    def num_rows(self) -> int:
        return len(self.lengths_B)

    @property
    def bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def keep(self, rows: Tensor) -> None:
        """Compact to these rows, in ascending order. Layer by layer, so that little memory is needed beside the cache."""
        count = len(rows)
        for cache in (self.keys, self.values):
            for layer in cache:
                layer[:count] = layer.index_select(0, rows)
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]
        self.lengths_B = self.lengths_B[rows]


class PrefillAttention:
    """Attention of packed prompts, which also stores each prompt into every row that continues it."""

    def __init__(self, cache: KVCache, packed: PackedAttention, first_row: int, prompt_tokens_BN: Tensor) -> None:
        self._cache = cache
        self._packed = packed
        self._rows = slice(first_row, first_row + len(prompt_tokens_BN))
        self._index = prompt_tokens_BN.flatten()
        self._width = prompt_tokens_BN.shape[1]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        for cache, fresh in ((self._cache.keys, k_TKD), (self._cache.values, v_TKD)):
            rows = cache[layer, self._rows, : self._width]
            rows.copy_(fresh.index_select(0, self._index).view(rows.shape))
        return self._packed(layer, q_THD, k_TKD, v_TKD)


class DecodeAttention:
    """Attention of one new token per row over the row's cache, the new token included."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows_B = torch.arange(cache.num_rows, device=cache.lengths_B.device)
        self._positions_B = cache.lengths_B
        self._width = int(cache.lengths_B.max()) + 1
        columns = torch.arange(self._width, device=cache.lengths_B.device)
        visible_BN = columns <= self._positions_B[:, None]
        # Added to the scores: cheaper in the fused CPU kernel than a boolean mask, which it converts in every layer.
        self._bias = torch.where(visible_BN, 0.0, float("-inf")).to(cache.keys.dtype)[:, None, None]

    def __call__(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows_B, self._positions_B] = k_BKD
        values[self._rows_B, self._positions_B] = v_BKD
        (B, H, D), K = q_BHD.shape, k_BKD.shape[1]
        # The H/K query heads of a key head are the "queries" of one product, so keys are read once and never repeated.
        out = F.scaled_dot_product_attention(
            q_BHD.view(B, K, H // K, D),
            keys[:, : self._width].transpose(1, 2),
            values[:, : self._width].transpose(1, 2),
            attn_mask=self._bias,
        )
        return out.reshape(B, H, D)
