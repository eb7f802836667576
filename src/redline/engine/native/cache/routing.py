"""Which experts tokens went to, kept beside their keys and values.

    a pass ──► RecordedRoutes ──► KVCache.routing, at the slots of its tokens
    a sequence that ends ──► routing_of ──► Completion.routing

A slot is where a token's keys and values are: what shares them, copies them or computes them again does so with the record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.cache.kv_cache import KVCache
from redline.types import UNKNOWN_EXPERT


class RecordedRoutes:
    """Writes the experts of a pass's tokens to their slots. Implements `Routes`."""

    def __init__(self, cache: KVCache, slots_T: Tensor, layers: Sequence[int]) -> None:
        assert cache.routing is not None
        self._routing = cache.routing.flatten(0, 1)
        self._slots_T = slots_T
        self._places = {layer: place for place, layer in enumerate(layers)}

    def sampled(self, layer: int) -> None:
        return None

    def record(self, layer: int, experts_TC: Tensor) -> None:
        self._routing[:, self._places[layer]].index_copy_(0, self._slots_T, experts_TC.to(torch.uint8))


def routing_of(cache: KVCache, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
    """uint8[num_tokens, L · C] of a sequence in these blocks, whose last token has not passed through the network. Waits for
    the device."""
    assert cache.routing is not None
    num_blocks = -(-(num_tokens - 1) // cache.block_size)
    own = cache.routing[torch.tensor(blocks[:num_blocks], dtype=torch.int64, device=cache.routing.device)]
    found = np.full((num_tokens, cache.routing[0, 0].numel()), UNKNOWN_EXPERT, np.uint8)
    found[:-1] = own.flatten(2).flatten(0, 1)[: num_tokens - 1].cpu().numpy()
    return found
