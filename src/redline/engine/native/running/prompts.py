"""Prompts on a CUDA device, short ones in one CUDA graph.

Launch by launch, a pass of a hundred tokens takes the host several times as long as the device. So a short pass is filled up
with tokens of nobody to one of few sizes, whose graph reads what differs from tensors at fixed addresses:

    one copy to the device ──► tokens, positions, slots, ends, blocks of queries ──► graph ──► logits of the ends

What is sampled from the logits differs from request to request, and is launched as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.cache.attention import Runs
from redline.engine.native.cache.blocks import SCRATCH_BLOCK
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.running.graphs import GraphCache, nothing_collected
from redline.kernels.decode.prompt_attention import NOBODY, TILES, prompt_attention, query_blocks
from redline.kernels.decode.rotate_and_store import rotate_and_store
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend

SIZES = (32, 64, 128, 256, 512)
"""Tokens of a captured pass. Each is captured when it is first needed."""
MOST_RUNS = 16
"""Sequences of a captured pass."""


class PromptAttention(FusedAttend):
    """Chunks of prompts, which read all of their context from its pages."""

    def __init__(
        self,
        cache: KVCache,
        rotary: Tensor,
        tables_RN: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        blocks: Tensor,
        last_blocks: Tensor | None = None,
    ) -> None:
        """`blocks` is `query_blocks`, whose lines are those of `tables_RN`; `last_blocks` are those of the last layer, where
        few tokens go further: the others' output there is whatever was in memory."""
        self._cache, self._rotary, self._tables_RN = cache, rotary, tables_RN
        self.positions_T, self.slots_T = positions_T, slots_T
        self._blocks, self._last_blocks = blocks, last_blocks

    def attend_fused(self, layer: DecoderLayer, heads: Tensor) -> Tensor:
        keys, values = self._cache.blocks[layer.index]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        places = (self.positions_T, self.slots_T)
        rotate_and_store(heads, keys, values, *places, self._rotary, norms, layer.spec.norm_eps)
        blocks = self._blocks
        if self._last_blocks is not None and layer.index == layer.spec.num_layers - 1:
            blocks = self._last_blocks
        return prompt_attention(heads, keys, values, blocks, self._tables_RN)


@dataclass(slots=True, frozen=True)
class Prompts:
    """The tokens of one pass."""

    tokens_T: np.ndarray
    runs: Runs
    lines_S: np.ndarray
    """int64: each run's line of the block table."""
    ends_P: np.ndarray
    """int64: the tokens whose logits are wanted."""


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits_PV: Tensor

    def reset(self) -> None:
        self.graph.reset()


class CapturedPrompts:
    """The graphs of one runner."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rotary: Tensor,
        tables_RN: Tensor,
        upload: Callable[[object, torch.dtype], Tensor],
    ) -> None:
        self._decoder, self._cache, self._rotary, self._tables_RN, self._upload = decoder, cache, rotary, tables_RN, upload
        self._queries = TILES[decoder.spec.head_dim].queries
        self._inputs = torch.zeros(sum(self._lengths(SIZES[-1])), dtype=torch.int64, device=cache.blocks.device)
        self._pool: Any = None
        self.graphs: GraphCache[int, _Graph] = GraphCache()

    def logits(self, prompts: Prompts) -> Tensor | None:
        """[P, V] of the ends; None where there are too many tokens or sequences, or no memory for a graph."""
        T = len(prompts.tokens_T)
        if SIZES[-1] < T or len(prompts.lines_S) > MOST_RUNS:
            return None
        size = next(size for size in SIZES if size >= T)
        captured = self.graphs.get(size, self)
        if captured is None:
            return None
        self._fill(size, prompts)
        captured.graph.replay()
        return captured.logits_PV[: len(prompts.ends_P)]

    def capture(self, size: int) -> _Graph:
        """Run a pass of nobody's tokens, so that every kernel is compiled; then record it."""
        nothing = np.empty(0, np.int64)
        runs = Runs(nothing, nothing, np.empty((0, 1), np.int64))
        self._fill(size, Prompts(nothing, runs, nothing, nothing))
        self._pass(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")  # a trainer may run beside
        with nothing_collected(), capture:
            logits_PV = self._pass(size)
        self._pool = graph.pool()
        return _Graph(graph, logits_PV)

    def release(self) -> None:
        """Wait until no graph runs, and give memory that none holds back to the device."""
        torch.cuda.synchronize()
        if not len(self.graphs):
            self._pool = None
        torch.cuda.empty_cache()

    def _pass(self, size: int) -> Tensor:
        lengths = self._lengths(size)
        tokens_T, positions_T, slots_T, ends_P, blocks = self._inputs[: sum(lengths)].split(lengths)
        attend = PromptAttention(self._cache, self._rotary, self._tables_RN, positions_T, slots_T, blocks.view(-1, 4))
        return self._decoder.logits(self._decoder(tokens_T, positions_T, attend, only_M=ends_P))

    def _lengths(self, size: int) -> list[int]:
        """Numbers of each input: tokens, positions, slots, ends, and blocks of queries, at most one more than full ones for
        each run and for what fills the pass up."""
        return [size, size, size, MOST_RUNS, 4 * (-(-size // self._queries) + MOST_RUNS)]

    def _fill(self, size: int, prompts: Prompts) -> None:
        T, runs, page = len(prompts.tokens_T), prompts.runs, self._cache.block_size
        offsets, starts, lines = np.append(runs.offsets, size), np.append(runs.starts_S, 0), np.append(prompts.lines_S, NOBODY)
        blocks = query_blocks(offsets, starts, lines, self._queries)
        lengths = self._lengths(size)
        inputs = np.zeros(sum(lengths), np.int64)
        tokens_T, positions_T, slots_T, ends_P, blocks_B = np.split(inputs, np.cumsum(lengths)[:-1])
        tokens_T[:T], positions_T[:T], slots_T[:T] = prompts.tokens_T, runs.positions(), runs.slots(page)
        slots_T[T:] = SCRATCH_BLOCK * page
        ends_P[: len(prompts.ends_P)] = prompts.ends_P
        blocks_B[: blocks.size] = blocks.ravel()
        self._inputs[: len(inputs)].copy_(self._upload(inputs, torch.int64), non_blocking=True)
