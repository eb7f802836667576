"""Attention over the paged cache on a CPU, where the keys and values lie: nothing is gathered."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.cache.attention import Runs
from redline.engine.native.cache.kv_cache import KVCache
from redline.kernels.cpu.steps import Steps
from redline.models.decoder import DecoderLayer, FusedAttend


class PagedAttention(FusedAttend):
    """Norm, rotation, cache write and attention of runs of new tokens."""

    def __init__(self, steps: Steps, cache: KVCache, rotary: Tensor, runs: Runs) -> None:
        self._steps, self._cache, self._rotary, self._runs = steps, cache, rotary, runs
        self.positions_T = torch.from_numpy(runs.positions())
        self._lines_T = torch.from_numpy(np.repeat(np.arange(len(runs.lengths_S)), runs.lengths_S))
        self._tables_LN = torch.from_numpy(np.ascontiguousarray(runs.tables_SN, dtype=np.int64))

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions and lines of the tokens, and the lines' tables, as `Steps.attend` takes them."""
        return self.positions_T, self._lines_T, self._tables_LN

    @property
    def slots_T(self) -> Tensor:  # noqa: N802
        """int64: where in the cache each token goes."""
        return torch.from_numpy(self._runs.slots(self._cache.block_size))

    def attend_fused(self, layer: DecoderLayer, heads: Tensor) -> Tensor:
        keys, values = self._cache.blocks[layer.index]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        return self._steps.attend(heads.contiguous(), keys, values, *self.places, self._rotary, norms, layer.spec.norm_eps)
