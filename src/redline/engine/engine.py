"""The in-process engine: samples from the very weights the trainer updates.

`generate` takes requests in waves of at most `max_num_seqs` sequences. In a wave every prompt is prefilled once, packed with
the others, and its keys and values are written to the n rows that continue it. Decoding then advances all rows by one token
at a time; rows that finish leave the batch, so a step costs what its live sequences cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from redline.engine.kv_cache import DecodeAttention, KVCache, PrefillAttention
from redline.engine.sampler import sample, stream, uniform
from redline.errors import EngineError
from redline.models.decoder import Decoder
from redline.models.packed_attention import PackedAttention, Segments
from redline.telemetry import span
from redline.types import Completion, FinishReason, GenerateRequest, VersionSpan, WeightUpdate

COMPACT_BELOW = 0.75
"""Rows are compacted when fewer than this share is alive: moving the cache costs about as much as one decode step."""


class NativeEngine:
    """Batched generation with a KV cache. Implements `ports.Engine`."""

    def __init__(self, decoder: Decoder, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._decoder = decoder
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.version = 0

    def apply(self, update: WeightUpdate) -> None:
        """The weights are the trainer's own storage: there is nothing to move, only a version to note."""
        self.version = update.version

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        submitted = time.perf_counter()
        for request in requests:
            self._check(request)
        completions: list[list[Completion]] = []
        for wave in _waves(requests, self._max_num_seqs):
            completions += self._run_wave(wave, submitted)
        return completions

    def _check(self, request: GenerateRequest) -> None:
        sampling, longest, prompt = request.sampling, self._decoder.spec.max_positions, len(request.prompt_ids)
        if prompt == 0:
            raise EngineError("a prompt has no tokens", "give at least one token")
        if prompt + sampling.max_tokens > longest:
            raise EngineError(
                f"a prompt of {prompt} tokens and {sampling.max_tokens} new ones exceed the model's {longest} positions",
                "lower rollouts.max_new_tokens or shorten the prompt",
            )
        if not 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < self._decoder.spec.vocab_size:
            raise EngineError("a prompt holds an id outside the vocabulary", "tokenize it with the model's own tokenizer")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens = {sampling.max_tokens}: nothing to generate", "ask for at least one token")
        if not 1 <= sampling.n <= self._max_num_seqs:
            raise EngineError(
                f"n = {sampling.n} does not fit engine.max_num_seqs = {self._max_num_seqs}", "raise engine.max_num_seqs"
            )

    def _run_wave(self, requests: Sequence[GenerateRequest], submitted: float) -> list[list[Completion]]:
        started = time.perf_counter()
        with span("engine.prefill", version=self.version):
            batch = _DecodeBatch(self._decoder, requests)
            logits_BV = self._prefill(batch, requests)
        prefilled = time.perf_counter()
        with span("engine.decode", version=self.version):
            while True:
                batch.advance(logits_BV, time.perf_counter() - prefilled)
                if batch.num_alive == 0:
                    break
                batch.compact()
                logits_BV = self._decode_step(batch)
        return batch.completions(requests, VersionSpan(self.version, self.version), started - submitted, prefilled - started)

    def _prefill(self, batch: _DecodeBatch, requests: Sequence[GenerateRequest]) -> Tensor:
        """Logits [B, V] after each row's prompt."""
        logits, first_row = [], 0
        for chunk in _prefill_chunks(requests, self._max_num_batched_tokens):
            lengths = [len(r.prompt_ids) for r in chunk]
            copies = [r.sampling.n for r in chunk]
            segments = Segments.independent(lengths)
            index_PN = segments.offsets[:-1, None] + np.minimum(np.arange(max(lengths)), np.array(lengths)[:, None] - 1)
            index_BN = torch.from_numpy(np.repeat(index_PN, copies, axis=0)).to(batch.device)
            packed = PackedAttention(segments, batch.device)
            tokens_T = torch.from_numpy(np.concatenate([r.prompt_ids for r in chunk]).astype(np.int64)).to(batch.device)
            hidden_TE = self._decoder(tokens_T, packed.positions_T, PrefillAttention(batch.cache, packed, first_row, index_BN))
            last_P = torch.from_numpy(segments.offsets[1:] - 1).to(batch.device)
            logits_PV = self._decoder.logits(hidden_TE[last_P])
            logits.append(logits_PV.repeat_interleave(torch.tensor(copies, device=batch.device), dim=0))
            lengths_B = torch.from_numpy(np.repeat(lengths, copies)).to(batch.device)
            batch.cache.lengths_B[first_row : first_row + len(lengths_B)] = lengths_B
            first_row += len(lengths_B)
        return torch.cat(logits)

    def _decode_step(self, batch: _DecodeBatch) -> Tensor:
        """Put each row's newest token through the network; logits [B, V] for the next."""
        cache = batch.cache
        hidden_BE = self._decoder(batch.newest_B, cache.lengths_B, DecodeAttention(cache))
        # A finished row that is not compacted yet stays where it is, so that it never outgrows the cache.
        cache.lengths_B = cache.lengths_B + batch.alive_B
        return self._decoder.logits(hidden_BE)


class _DecodeBatch:
    """The rows of one wave: what each has sampled so far, and when it must stop. Finished rows keep only their output."""

    def __init__(self, decoder: Decoder, requests: Sequence[GenerateRequest]) -> None:
        params = [r.sampling for r in requests for _ in range(r.sampling.n)]
        weight = decoder.output_weight
        self.device = weight.device
        capacity = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        self.cache = KVCache(decoder.spec, len(params), capacity, weight.device, weight.dtype)
        self._output_row_B = torch.arange(len(params))
        self._streams_B = self._tensor([stream(r.sampling.seed, i) for r in requests for i in range(r.sampling.n)], torch.int64)
        self._temperature_B = self._tensor([p.temperature for p in params], torch.float32)
        self._max_tokens_B = self._tensor([p.max_tokens for p in params], torch.int64)
        widest = max(len(p.stop_token_ids) for p in params)
        self._stops_BN = self._tensor(
            [[*p.stop_token_ids, *[-1] * (widest - len(p.stop_token_ids))] for p in params], torch.int64
        )
        self.alive_B = torch.ones(len(params), dtype=torch.bool, device=self.device)
        self._step = 0
        self._tokens: list[list[int]] = [[] for _ in params]
        self._logprobs: list[list[float]] = [[] for _ in params]
        self._decode_s = [0.0] * len(params)
        self.newest_B = torch.empty(0)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    @property
    def num_alive(self) -> int:
        return int(self.alive_B.sum())

    def advance(self, logits_BV: Tensor, elapsed_s: float) -> None:
        """Sample a token for every live row, and retire the rows it finishes."""
        counters_B = torch.full_like(self._streams_B, self._step)
        sampled = sample(logits_BV, self._temperature_B, uniform(self._streams_B, counters_B))
        self._step += 1
        self._record(sampled.tokens_B.tolist(), sampled.logprobs_B.tolist(), elapsed_s)
        stopped_B = (sampled.tokens_B[:, None] == self._stops_BN).any(dim=1) | (self._step >= self._max_tokens_B)
        self.alive_B = self.alive_B & ~stopped_B
        self.newest_B = sampled.tokens_B

    def _record(self, tokens: list[int], logprobs: list[float], elapsed_s: float) -> None:
        for output, alive, token, logprob in zip(
            self._output_row_B.tolist(), self.alive_B.tolist(), tokens, logprobs, strict=True
        ):
            if alive:
                self._tokens[output].append(token)
                self._logprobs[output].append(logprob)
                self._decode_s[output] = elapsed_s

    def compact(self) -> None:
        """Drop finished rows once enough of them are dead weight."""
        if self.num_alive > COMPACT_BELOW * len(self.alive_B):
            return
        rows = torch.nonzero(self.alive_B).squeeze(1)
        self.cache.keep(rows)
        self._output_row_B = self._output_row_B[rows.cpu()]
        for name in ("_streams_B", "_temperature_B", "_max_tokens_B", "_stops_BN", "alive_B", "newest_B"):
            setattr(self, name, getattr(self, name)[rows])

    def completions(
        self, requests: Sequence[GenerateRequest], versions: VersionSpan, queue_s: float, prefill_s: float
    ) -> list[list[Completion]]:
        rows = iter(range(len(self._tokens)))
        return [[self._completion(next(rows), r, versions, queue_s, prefill_s) for _ in range(r.sampling.n)] for r in requests]

    def _completion(
        self, row: int, request: GenerateRequest, versions: VersionSpan, queue_s: float, prefill_s: float
    ) -> Completion:
        stopped = self._tokens[row][-1] in request.sampling.stop_token_ids
        return Completion(
            token_ids=np.array(self._tokens[row], dtype=np.int32),
            logprobs=np.array(self._logprobs[row], dtype=np.float32),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            versions=versions,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=self._decode_s[row],
        )


def _waves(requests: Sequence[GenerateRequest], max_num_seqs: int) -> Iterator[list[GenerateRequest]]:
    """Consecutive requests whose samples fit together."""
    return _chunks(requests, max_num_seqs, lambda r: r.sampling.n)


def _prefill_chunks(requests: Sequence[GenerateRequest], max_tokens: int) -> Iterator[list[GenerateRequest]]:
    """Consecutive prompts within the token budget; a longer prompt goes alone."""
    return _chunks(requests, max_tokens, lambda r: len(r.prompt_ids))


def _chunks(
    requests: Sequence[GenerateRequest], budget: int, size: Callable[[GenerateRequest], int]
) -> Iterator[list[GenerateRequest]]:
    """Consecutive requests whose sizes sum to no more than the budget; at least one in each."""
    chunk: list[GenerateRequest] = []
    for request in requests:
        if chunk and sum(map(size, chunk)) + size(request) > budget:
            yield chunk
            chunk = []
        chunk.append(request)
    if chunk:
        yield chunk
