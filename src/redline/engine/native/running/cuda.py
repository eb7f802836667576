"""The runner for NVIDIA GPUs: a whole decode step, sampling included, is one CUDA graph, and so is a short prompt.

Everything a step reads and writes lives in tensors at fixed addresses (`DeviceRows`, the cache, the weights), so a graph is
replayed as often as wanted without a word from the host: the rows advance, stop and die on the device. The host launches a
few steps at once, and looks at their tokens while the next ones run. Weights are updated in place, so graphs outlive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.cache.attention import Runs
from redline.engine.native.cache.blocks import SCRATCH_BLOCK
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.prefixes import MAX_SIZE, Prefixes
from redline.engine.native.fp8 import Fp8Decoder
from redline.engine.native.running.device_rows import DeviceRows
from redline.engine.native.running.few_rows import FewRows, one_launch_of
from redline.engine.native.running.graphs import GraphCache, nothing_collected
from redline.engine.native.running.many_rows import ManyRows
from redline.engine.native.running.most_rows import MostRows
from redline.engine.native.running.prompts import CapturedPrompts, PromptAttention, Prompts
from redline.engine.native.running.runner import Decoding, Runner, Samples
from redline.engine.native.running.sampler import Sampled
from redline.engine.native.running.some_rows import SomeRows
from redline.engine.native.running.verification import MAX_GUESSES, MAX_SLOTS, NO_GUESS, SLOT_TOKENS, Guesses, TextWrites
from redline.engine.native.running.weights_first import WeightsFirst
from redline.engine.native.scheduler import Chunk
from redline.engine.native.sequence import Wants
from redline.kernels.decode import gated_many, head, residual, streamed
from redline.kernels.decode.attention import (
    SHARED_ROWS,
    SOME_HEADS,
    TILES,
    DecodeBatch,
    choose_splits,
    choose_tile,
    decode_attention,
)
from redline.kernels.decode.guesses import NO_PLACE, Entries, GuessBook, begin_guessing, end_guessing, find_guesses
from redline.kernels.decode.one_launch import OneLaunch
from redline.kernels.decode.prompt_attention import TILES as PROMPT_TILES
from redline.kernels.decode.prompt_attention import blocks_with, query_blocks
from redline.kernels.decode.rotate_and_store import rotate_and_store
from redline.kernels.decode.sampling import Summaries, sample_plain
from redline.kernels.decode.shared_prefix import SharedPrefixes
from redline.kernels.decode.step import StepInputs, begin_step, end_step, sample_and_end
from redline.models.decoder import AnyAttend, Decoder, DecoderLayer, FusedAttend
from redline.models.files.hf import AnyDecoder
from redline.models.layers.rope import rotary_table

Way = OneLaunch | WeightsFirst | FewRows | SomeRows | ManyRows | MostRows

MAX_STEPS = 8
"""Decode steps per launch. A sequence that ends early idles for the rest of them; the host has the time of all of them to
look at the previous ones."""
MAX_SPLITS = 16
TOP_LOGPROBS = (0, 1, 5, 20)
"""Numbers of likeliest tokens that graphs are captured for."""
BATCH_RATIO = 1.25
"""Batches are filled up with dead rows to the next of a ladder of sizes, each this much larger than the one before."""
GUESSING = -1
"""In place of a number of groups: a step that guesses tokens."""
GUESSING_SIZES = [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512]
"""Entries of a step that guesses: fewer sizes than batches have, since each is a graph of its own."""


def serves(decoder: AnyDecoder, dtype: torch.dtype, block_size: int) -> TypeGuard[Decoder]:
    """Whether the kernels take this network."""
    return (
        isinstance(decoder, Decoder)
        and dtype in (torch.bfloat16, torch.float16)
        and decoder.spec.head_dim in TILES
        and block_size & (block_size - 1) == 0
    )


class PagedDecodeAttention(FusedAttend):
    """Norm, rotation, cache write and attention of one new token per row, in one kernel.

    Several entries of a batch may be tokens of one row, each with the place in the cache that it goes to (`slots_B`). Their
    keys and values are written before any is read; `decode_attention` then writes them once more, the same bits."""

    def __init__(
        self,
        cache: KVCache,
        rotary: Tensor,
        batch: DecodeBatch,
        arrived: Tensor,
        slots_B: Tensor | None = None,
        plan: streamed.Plan | None = None,
        *,
        early: bool = False,
    ) -> None:
        """`arrived` and `early` are `decode_attention`'s. With a plan of the step, `streamed_attention` attends."""
        self._plan = plan
        self._cache = cache
        self._slots_B = slots_B
        self._rotary = rotary
        self._batch = batch
        self._arrived = arrived
        self._early = early

    @property
    def slots_T(self) -> Tensor:  # noqa: N802
        """int64: where in the cache each token goes, a dead row's to the scratch block."""
        return slots_of(self._batch, self._cache.block_size) if self._slots_B is None else self._slots_B

    def attend_fused(self, layer: DecoderLayer, heads: Tensor) -> Tensor:
        keys, values = self._cache.blocks[layer.index]
        if self._slots_B is not None:
            places = (self._batch.positions_B.clamp(min=0), self._slots_B)
            norms, eps = _norms(layer), layer.spec.norm_eps
            rotate_and_store(heads, keys, values, *places, self._rotary, norms, eps, in_place=False)
        if self._plan is not None:
            planned = (self._plan, self._rotary, _norms(layer), layer.spec.norm_eps)
            return streamed.streamed_attention(heads, keys, values, *planned, is_stored=self._slots_B is not None)
        tile = choose_tile(len(heads), keys.shape[1], layer.spec.head_dim)
        own = (self._batch, self._rotary, _norms(layer), layer.spec.norm_eps, tile)
        return decode_attention(heads, keys, values, *own, early=self._early, arrived=self._arrived)


def slots_of(batch: DecodeBatch, page: int) -> Tensor:
    """int64[B]: where in the cache the new tokens of a batch go. Does not wait for the device."""
    places_B = batch.positions_B.clamp(min=0)
    blocks_B = batch.block_table_RM[batch.rows_B.long(), places_B // page].long()
    return torch.where(batch.positions_B < 0, SCRATCH_BLOCK * page, blocks_B * page + places_B % page)


def _norms(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    """The norms of query and key heads; None where the layer has none."""
    return None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)


@dataclass(slots=True)
class _DecodeGraph:
    """One captured step for one size of batch."""

    graph: torch.cuda.CUDAGraph
    samples: Samples
    """Where its samples go: `MAX_STEPS` rows, the next one each time."""

    def reset(self) -> None:
        self.graph.reset()


class CudaRunner(Runner):
    max_steps = MAX_STEPS
    runs_ahead = True
    reads_prefixes_once = True
    guesses_itself = True
    most_verified = GUESSING_SIZES[-1]

    def __init__(
        self, decoder: Decoder, cache: KVCache, rows: DeviceRows, *, shares_device: bool = False, guesses: bool = False
    ) -> None:
        """With `guesses` there is room for texts to guess from."""
        super().__init__(decoder, cache, rows)
        device = cache.blocks.device
        positions = torch.arange(rows.tables_RN.shape[1] * cache.block_size, device=device)
        table = rotary_table(decoder.rotary_frequencies, decoder.rotary_factor, positions, cache.blocks.dtype)
        self._rotary = torch.stack(table).squeeze(2)
        """cos and sin [2, positions, D / 2], the trainer's to the bit: a GPU's own cosine is another."""
        self._rows_B = torch.full((rows.dead_row + 1,), rows.dead_row, dtype=torch.int64, device=device)
        self._rows32_B = self._rows_B.int()
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._launched_R = torch.zeros_like(self._rows_B)
        """Steps of each row within the current launch."""
        self._groups = torch.zeros((3, rows.dead_row), dtype=torch.int32, device=device)
        """First entry, size and prefix length of groups of the batch."""
        self._prefix_B = torch.zeros_like(self._rows32_B)
        """Tokens that an entry of the batch has in common with its group."""
        self._sizes = batch_sizes(rows.dead_row)
        self._laid_out = torch.zeros((5, self.most_verified), dtype=torch.int64, device=device)
        """`Entries` of a step that guesses, in the order of its fields."""
        self._book = GuessBook.empty(MAX_SLOTS, SLOT_TOKENS, rows.dead_row + 1, device) if guesses else None
        self._ways = ways_of(decoder, cache, self._rotary, is_alone=not shares_device)
        self._most_rows = next((way for way in self._ways if isinstance(way, MostRows)), None)
        """Who takes long prompts through the network; None where `Decoder.forward` does."""
        self._arrived = torch.zeros(
            max(len(self._rows_B), self.most_verified) * decoder.spec.num_kv_heads, dtype=torch.int32, device=device
        )
        """What `decode_attention` counts parts with."""
        spec, page = decoder.spec, cache.block_size
        self._streams = streamed.serves(spec.head_dim, spec.num_heads, spec.num_kv_heads, page, cache.blocks.dtype, device)
        """Whether `streamed_attention` takes this network and cache."""
        self._has_head = decoder.plain_head and decoder.head is None and head.serves(decoder.output_weight)
        """Whether `kernels/decode/head.py` multiplies by the head's weight."""
        self._prompts = CapturedPrompts(decoder, cache, self._rotary, rows.tables_RN, rows.upload)
        self._pool: Any = None
        """Memory that the graphs share: they never run at the same time."""
        self.graphs: GraphCache[tuple[int, int, Wants, int], _DecodeGraph] = GraphCache()

    @property
    def num_captured(self) -> int:
        return self.graphs.captures

    # ── decode ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def decode(
        self, rows_B: np.ndarray, positions_B: np.ndarray, num_steps: int, wants: Wants, prefixes: Prefixes | None = None
    ) -> Samples:
        size = next(size for size in self._sizes if size >= len(rows_B))
        max_groups = 0 if prefixes is None else 1 << (len(prefixes.sizes_C) - 1).bit_length()
        wants = _flavour(wants, self._decoder.spec.vocab_size)
        together = num_steps if num_steps == MAX_STEPS and self._chains(size, wants) else 1
        captured = self.graphs.get((size, max_groups, wants, together), self)
        if captured is None and together > 1:
            together = 1  # for which there may be memory
            captured = self.graphs.get((size, max_groups, wants, together), self)
        samples = captured.samples if captured else self._room_for_samples(size, wants)
        filled = np.full(size, self.rows.dead_row)
        filled[: len(rows_B)] = rows_B
        self._rows_B[:size].copy_(self.rows.upload(filled, torch.int64), non_blocking=True)
        self._rows32_B[:size].copy_(self._rows_B[:size])
        self._step.zero_()
        self._launched_R.zero_()
        if prefixes is not None:
            self._place(prefixes, size, max_groups)
        for _ in range(num_steps // together):
            if captured:
                captured.graph.replay()
            else:
                self._decode_steps(size, max_groups, wants, together, samples)
        return samples.part(num_steps, len(rows_B))

    def _chains(self, size: int, wants: Wants) -> bool:
        """Whether all steps of a launch are one graph: between two the device waits, which counts where a step is short. It has
        few launches then, and is soon captured."""
        return wants.is_plain and not self.rows.are_replaced and isinstance(self._way(size, wants), OneLaunch)

    def _place(self, prefixes: Prefixes, size: int, max_groups: int) -> None:
        """Tell the device who shares which beginning."""
        lengths_C = prefixes.blocks_C * self.cache.block_size
        groups, prefix_B = np.zeros((3, max_groups), np.int32), np.zeros(size, np.int32)
        groups[:, : len(lengths_C)] = prefixes.starts_C, prefixes.sizes_C, lengths_C
        for start, length, prefix in zip(prefixes.starts_C, prefixes.sizes_C, lengths_C, strict=True):
            prefix_B[start : start + length] = prefix
        self._groups[:, :max_groups].copy_(self.rows.upload(groups, torch.int32), non_blocking=True)
        self._prefix_B[:size].copy_(self.rows.upload(prefix_B, torch.int32), non_blocking=True)

    def capture(self, key: tuple[int, int, Wants, int]) -> _DecodeGraph:
        """Run the step once as it is, so that every kernel is compiled, on rows that are all dead; then record it, or as many
        as follow on each other. Raises `torch.OutOfMemoryError`."""
        size, max_groups, wants, together = key
        self._rows_B.fill_(self.rows.dead_row)
        self._rows32_B.fill_(self.rows.dead_row)
        self._groups.zero_()
        self._prefix_B.zero_()
        self._step.zero_()
        self._laid_out.copy_(torch.tensor(self._filling)[:, None])
        samples = self._room_for_samples(size, wants)
        self._decode_steps(size, max_groups, wants, 1, samples)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")  # a trainer may run beside
        with nothing_collected(), capture:
            self._decode_steps(size, max_groups, wants, together, samples)
        self._pool = graph.pool()
        return _DecodeGraph(graph, samples)

    def release(self) -> None:
        """Wait until no graph runs, and give memory that none holds back to the device."""
        torch.cuda.synchronize()
        if not len(self.graphs):
            self._pool = None
        torch.cuda.empty_cache()

    def _decode_steps(self, size: int, max_groups: int, wants: Wants, num_steps: int, samples: Samples) -> None:
        """Several follow on each other where `_chains` says so."""
        if max_groups == GUESSING:
            self._guessing_step(size, wants, samples)
            return
        rows_B, out = self._rows_B[:size], (samples.tokens_SB, samples.logprobs_SB)
        inputs = begin_step(self.rows, rows_B)
        if wants.is_plain and not self.rows.are_replaced:
            for _ in range(num_steps):
                logits_BV, summaries = self._logits(rows_B, inputs, max_groups, wants)
                sample_and_end(self.rows, rows_B, inputs, logits_BV, self._launched_R, out, summaries)
            return
        logits_BV, summaries = self._logits(rows_B, inputs, max_groups, wants)
        if wants.is_plain:
            tokens_B, logprobs_B = torch.empty_like(inputs.tokens_B), torch.empty_like(inputs.temperature_B)
            inputs_B = (inputs.temperature_B, inputs.streams_B, inputs.counters_B)
            sample_plain(logits_BV, *inputs_B, tokens_B, logprobs_B, summaries)
            self.rows.replace(rows_B, inputs.counters_B, tokens_B, logprobs_B)
            end_step(self.rows, rows_B, tokens_B, logprobs_B, self._launched_R, out)
        else:
            self.rows.position_R.index_add_(0, rows_B, self.rows.alive_R[rows_B].long())
            samples.put(self._step, self.rows.sample(rows_B, logits_BV, wants))
            self._step += 1

    def _way(self, size: int, wants: Wants) -> Way | None:
        """Who takes a step through the network; None: `Decoder.forward`, which knows of adapters."""
        return None if wants.lora else next((way for way in self._ways if size <= way.most_rows), None)

    def _logits(self, rows_B: Tensor, inputs: StepInputs, max_groups: int, wants: Wants) -> tuple[Tensor, Summaries | None]:
        """[B, V], and what sampling would read them for, where the head has told."""
        slots_B, way = self.rows.adapter_slots(rows_B, wants), self._way(len(rows_B), wants)
        is_guessing = max_groups == GUESSING
        if isinstance(way, OneLaunch):
            lines_B = rows_B.int() if is_guessing else self._rows32_B[: len(rows_B)]
            ahead_B = self._laid_out[-1, : len(rows_B)] if is_guessing else None
            return way.logits(inputs.tokens_B, inputs.positions_B, lines_B, self.rows.tables_RN, ahead_B), None
        early_by = way or (self._decoder if isinstance(self._decoder, Fp8Decoder) else None)
        early = early_by is not None and early_by.begins_early(len(rows_B))
        if is_guessing:
            attend = self._guessing_attention(rows_B, inputs.positions_B, way, early)
        else:
            attend = self._decode_attention(max_groups, inputs.positions_B, way, early)
        if isinstance(way, WeightsFirst | FewRows):
            return way.logits(inputs.tokens_B, attend), None
        if way is not None:
            return self._head(way.hidden(inputs.tokens_B, attend), inputs, wants)
        return self._head(self._forward(inputs.tokens_B, inputs.positions_B, attend, slots_B), inputs, wants)

    def _head(self, hidden_BE: Tensor, inputs: StepInputs, wants: Wants) -> tuple[Tensor, Summaries | None]:
        if not self._has_head or not head.LEAST_ROWS <= len(hidden_BE) <= head.MOST_ROWS:
            return self._decoder.logits(hidden_BE), None
        weight_VE = self._decoder.output_weight
        if wants.is_plain:
            return head.logits_and_summaries(hidden_BE, weight_VE, inputs.temperature_B)
        return head.logits(hidden_BE, weight_VE), None

    def _decode_attention(self, max_groups: int, positions_B: Tensor, way: Way | None, early: bool) -> PagedDecodeAttention:
        size, max_tokens = len(positions_B), self.rows.tables_RN.shape[1] * self.cache.block_size
        prefixes = self._shared_prefixes(max_groups, size, max_tokens) if max_groups else None
        batch = DecodeBatch(positions_B, self._rows32_B[:size], self.rows.tables_RN, self._splits(size), prefixes)
        return PagedDecodeAttention(self.cache, self._rotary, batch, self._arrived, plan=self._plan(batch, way), early=early)

    def _plan(self, batch: DecodeBatch, way: Way | None) -> streamed.Plan | None:
        """Who attends to what in a step, where `streamed_attention` does. Between launches that do not let it begin early, it
        takes enough heads to win; and rows so few that their shares leave most of memory idle have another way."""
        rows, spec = len(batch.positions_B), self._decoder.spec
        if not self._streams or batch.prefixes is not None or rows > streamed.MOST_ROWS:
            return None
        least = streamed.FEWEST_SHARES // streamed.MOST_PARTS if isinstance(way, WeightsFirst | ManyRows) else SOME_HEADS
        if rows * spec.num_kv_heads < least:
            return None
        where = (batch.positions_B, batch.rows_B, batch.block_table_RM, self._arrived)
        return streamed.plan_step(*where, spec.num_kv_heads, spec.head_dim)

    def _splits(self, size: int) -> int:
        spec, max_tokens = self._decoder.spec, self.rows.tables_RN.shape[1] * self.cache.block_size
        return min(MAX_SPLITS, choose_splits(size, spec.num_kv_heads, max_tokens, spec.head_dim))

    # ── guess ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def guess(self, rows_B: np.ndarray, guesses: Guesses, num_steps: int, wants: Wants) -> Samples:
        which_T = guesses.which_T
        size = next(size for size in GUESSING_SIZES if size >= len(which_T))
        wants = _flavour(wants, self._decoder.spec.vocab_size)
        captured = self.graphs.get((size, GUESSING, wants, 1), self)
        samples = captured.samples if captured else self._room_for_samples(size, wants)
        filled = np.array(self._filling)[:, None].repeat(size, axis=1)
        filled[:3, : len(rows_B)] = rows_B, guesses.begins_B, guesses.lengths_B
        filled[3:, : len(which_T)] = rows_B[which_T], guesses.ahead_T
        self._laid_out[:, :size].copy_(self.rows.upload(filled, torch.int64), non_blocking=True)
        self._write(guesses.writes)
        self._step.zero_()
        self._launched_R.zero_()
        samples.tokens_SB.fill_(NO_GUESS)
        for _ in range(num_steps):
            if captured:
                captured.graph.replay()
            else:
                self._guessing_step(size, wants, samples)
        return samples.part(num_steps, len(which_T))

    @property
    def _filling(self) -> list[int]:
        """What a layout is filled up with: rows and entries that are not alive."""
        return [self.rows.dead_row, 0, 0, self.rows.dead_row, 0]

    def _write(self, writes: TextWrites) -> None:
        assert self._book is not None, "the engine was made without guesses"
        book, upload = self._book, self.rows.upload
        if len(writes.places_W):
            places_W, tokens_W = upload(writes.places_W, torch.int64), upload(writes.tokens_W, torch.int32)
            book.texts_SL.view(-1).index_copy_(0, places_W, tokens_W)
        if writes.lengths:
            slots, lengths = upload(np.array(writes.lengths).T.copy(), torch.int64)
            book.lengths_S.index_copy_(0, slots, lengths)
        if writes.rows:
            rows, slots = upload(np.array(writes.rows).T.copy(), torch.int64)
            book.slot_R.index_copy_(0, rows, slots)
            book.place_R.index_fill_(0, rows, NO_PLACE)
            book.found_R.index_fill_(0, rows, 0)

    def _guessing_step(self, size: int, wants: Wants, samples: Samples) -> None:
        """Every token that goes in is an entry of the batch; those of one row have its blocks in common."""
        assert self._book is not None
        rows, book = self.rows, self._book
        rows_B, begins_B, counts_B = self._laid_out[:3, : min(size, MAX_SLOTS)]
        rows_T, ahead_T = self._laid_out[3:, :size]
        entries = Entries(rows_B, begins_B, counts_B, rows_T, ahead_T, 1 + MAX_GUESSES)
        find_guesses(rows, book, entries)
        inputs = begin_guessing(rows, book, entries)
        logits_TV, summaries = self._logits(rows_T, inputs, GUESSING, wants)
        if wants.is_plain:
            sampled = Sampled(torch.empty_like(inputs.tokens_B), torch.empty_like(inputs.temperature_B))
            out = (sampled.tokens_B, sampled.logprobs_B)
            sample_plain(logits_TV, inputs.temperature_B, inputs.streams_B, inputs.counters_B, *out, summaries)
            rows.replace(rows_T, inputs.counters_B, *out)
        else:
            sampled = rows.sample_ahead(rows_T, ahead_T, logits_TV, wants)
            samples.put_extras(self._step, sampled)
            self._step += 1
        parts = (sampled.tokens_B, sampled.logprobs_B)
        end_guessing(rows, book, entries, parts, self._launched_R, (samples.tokens_SB, samples.logprobs_SB))

    def _guessing_attention(self, rows_T: Tensor, positions_T: Tensor, way: Way | None, early: bool) -> PagedDecodeAttention:
        batch = DecodeBatch(positions_T, rows_T.int(), self.rows.tables_RN, self._splits(len(rows_T)))
        slots_T = slots_of(batch, self.cache.block_size)
        return PagedDecodeAttention(
            self.cache, self._rotary, batch, self._arrived, slots_T, self._plan(batch, way), early=early
        )

    # ── memory that steps share ────────────────────────────────────────────────────────────────────────────────────────

    def _shared_prefixes(self, max_groups: int, size: int, max_tokens: int) -> SharedPrefixes:
        spec = self._decoder.spec
        tiles = -(-MAX_SIZE * spec.num_heads // spec.num_kv_heads // SHARED_ROWS)
        # Half as many programs as without a prefix: each has several times the work.
        splits = choose_splits(2 * max_groups * tiles, spec.num_kv_heads, max_tokens, spec.head_dim)
        starts_C, sizes_C, lengths_C = self._groups[:, :max_groups]
        return SharedPrefixes(starts_C, sizes_C, lengths_C, self._prefix_B[:size], MAX_SIZE, min(MAX_SPLITS, splits))

    def _room_for_samples(self, size: int, wants: Wants) -> Samples:
        def room(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros((MAX_STEPS, size, *more), dtype=dtype, device=self._step.device)

        return Samples(
            tokens_SB=room(torch.int64),
            logprobs_SB=room(torch.float32),
            raw_SB=room(torch.float32) if wants.raw else None,
            top_ids_SBK=room(torch.int64, wants.top) if wants.top else None,
            top_logprobs_SBK=room(torch.float32, wants.top) if wants.top else None,
        )

    def _slots(self, attend: AnyAttend) -> Tensor:
        assert isinstance(attend, PagedDecodeAttention | PromptAttention)
        return attend.slots_T

    # ── prefill ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_logits(self, chunks: Sequence[Chunk], decoding: Decoding | None, runs: Runs, ends_P: np.ndarray) -> Tensor | None:
        # Adapters, scores of prompts and records of experts are no part of the graphs.
        by_hand = any(c.sequence.wants.lora or c.sequence.request.sampling.prompt_logprobs for c in chunks)
        if not by_hand and self.cache.routing is None:
            tokens_T = np.concatenate([c.sequence.tokens[c.start : c.end] for c in chunks])
            logits_PV = self._prompts.logits(Prompts(tokens_T, runs, _lines(chunks), ends_P))
            if logits_PV is not None:
                return logits_PV if len(ends_P) else None
        return super()._end_logits(chunks, decoding, runs, ends_P)

    def _prefill_attention(self, chunks: Sequence[Chunk], runs: Runs, only_P: np.ndarray | None) -> tuple[AnyAttend, Tensor]:
        assert len(runs.starts_S) == len(chunks), "rows decode in steps of their own"
        upload, queries = self.rows.upload, PROMPT_TILES[self._decoder.spec.head_dim].queries
        positions_T = upload(runs.positions(), torch.int64)
        slots_T = upload(runs.slots(self.cache.block_size), torch.int64)
        blocks = query_blocks(runs.offsets, runs.starts_S, _lines(chunks), queries)
        last = None if only_P is None else upload(blocks_with(blocks, only_P, queries), torch.int64)
        where = (self.rows.tables_RN, positions_T, slots_T, upload(blocks, torch.int64))
        return PromptAttention(self.cache, self._rotary, *where, last), positions_T

    def _forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        adapter_slots_T: Tensor | None,
        only_M: Tensor | None = None,
    ) -> Tensor:
        is_plain = adapter_slots_T is None and self.cache.routing is None
        if self._most_rows is None or not is_plain or len(tokens_T) < gated_many.LEAST_ROWS:
            return super()._forward(tokens_T, positions_T, attend, adapter_slots_T, only_M)
        assert isinstance(attend, FusedAttend)
        return self._most_rows.hidden(tokens_T, attend, only_M)

    # ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, samples: Samples) -> tuple[Samples, torch.cuda.Event | None]:
        def to_host(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)

        host = Samples(*map(to_host, samples.parts))  # type: ignore[arg-type]
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived


def ways_of(decoder: Decoder, cache: KVCache, rotary: Tensor, *, is_alone: bool) -> list[Way]:
    """From few rows to many, who takes a step through the network, each up to its `most_rows`; beyond, and with adapters,
    `Decoder.forward` does. The one launch has the whole device until it ends: a trainer beside it would hardly come to its
    own."""
    if not FewRows.serves(decoder):
        return []
    one_launch = one_launch_of(decoder, cache, rotary) if is_alone else None
    weights_first = WeightsFirst(decoder) if WeightsFirst.serves(decoder) else None
    some = SomeRows(decoder)
    many = ManyRows(decoder) if ManyRows.serves(decoder) else None
    most = MostRows(decoder) if MostRows.serves(decoder) else None
    if many is not None:
        some.most_rows = min(some.most_rows, residual.LEAST_ROWS - 1)
    return [way for way in (one_launch, weights_first, FewRows(decoder), some, many, most) if way and way.most_rows]


def _lines(chunks: Sequence[Chunk]) -> np.ndarray:
    """int64: each chunk's line of the block table."""
    return np.array([c.sequence.row for c in chunks], np.int64)


def _flavour(wants: Wants, vocab_size: int) -> Wants:
    """What a graph is captured for: any number of likeliest tokens is served by the next of a few. A sequence takes as many as
    it asked for."""
    top = next(count for count in TOP_LOGPROBS if count >= wants.top)
    return replace(wants, top=min(top, vocab_size))


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 about `BATCH_RATIO` apart, up to `largest`."""
    sizes = [size for size in (1, 2, 4, 8) if size < largest]
    while sizes and sizes[-1] < largest and sizes[-1] >= 8:
        sizes.append(min(largest, max(sizes[-1] + 8, int(sizes[-1] * BATCH_RATIO) // 8 * 8)))
    return sizes if sizes and sizes[-1] == largest else [*sizes, largest]
