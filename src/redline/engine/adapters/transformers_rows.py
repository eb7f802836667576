"""Completions in the making from a plain network of transformers, and how each is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import numpy as np
import torch
from torch import Tensor

from redline.engine.adapters.transformers_batch import Batch
from redline.engine.native.running.rows import NO_TOKEN
from redline.engine.native.running.sampler import Sampled, SamplingRows, sample, stream
from redline.engine.native.sequence import Wants
from redline.engine.native.text.stop_strings import StopSearch
from redline.types import FinishReason, GenerateRequest, SamplingParams, TopLogprobs


@dataclass(slots=True, eq=False)
class Row:
    """One completion in the making."""

    request_id: int
    index: int
    request: GenerateRequest
    submitted: float
    streaming: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    oldest_version: int = 0
    switches: list[tuple[int, int]] = field(default_factory=list)
    """As `Completion.switches`."""
    finish_reason: FinishReason | None = None
    failed: bool = False
    stop: str | None = None
    stop_search: StopSearch | None = None
    """From its first token on, where the request has stop strings."""
    streamed: int = 0
    """Tokens already handed out in pieces."""

    @property
    def alive(self) -> bool:
        return self.finish_reason is None and not self.failed


class Running:
    """The rows of a batch, and how each is sampled."""

    def __init__(self, batch: Batch, rows: list[Row], vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self._batch = batch
        self._wants = reduce(or_, (Wants.of(row.request.sampling) for row in rows))
        self._sampling = _sampling_rows(rows, self._wants, vocab_size, device)
        self._newest_B = self._sampling.counters_B

    def begin(self) -> Sampled:
        """The first token of every row, and the logprobs of the prompts that want them."""
        wanted = [row for row in self.rows if row.request.sampling.prompt_logprobs]
        logits_BV = self._batch.first(score=bool(wanted))
        for row, logprobs in zip(self.rows, self._batch.prompt_logprobs, strict=bool(wanted)):
            row.prompt_logprobs = logprobs if row in wanted else None
        return self._sample(logits_BV)

    def advance(self) -> Sampled:
        return self._sample(self._batch.next(self._newest_B))

    def _sample(self, logits_BV: Tensor) -> Sampled:
        sampled = sample(logits_BV, self._sampling, raw=self._wants.raw, top=self._wants.top)
        self._sampling.counters_B = self._sampling.counters_B + 1
        self._newest_B = sampled.tokens_B
        return sampled


def _sampling_rows(rows: Sequence[Row], wants: Wants, vocab_size: int, device: torch.device) -> SamplingRows:
    params = [row.request.sampling for row in rows]
    widest = max(len(p.stop_token_ids) for p in params)
    stops = [[*p.stop_token_ids, *[NO_TOKEN] * (widest - len(p.stop_token_ids))] for p in params]

    def column(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        temperature_B=column([p.temperature for p in params], torch.float32),
        streams_B=column([stream(row.request.sampling.seed, row.index) for row in rows], torch.int64),
        counters_B=column([0] * len(rows), torch.int64),
        top_k_B=column([p.top_k for p in params], torch.int32) if wants.top_k else None,
        top_p_B=column([p.top_p for p in params], torch.float32) if wants.top_p else None,
        min_p_B=column([p.min_p for p in params], torch.float32) if wants.min_p else None,
        bias_BV=torch.stack([_bias(p, vocab_size) for p in params]).to(device) if wants.bias else None,
        stops_BS=column(stops, torch.int64) if wants.min_tokens else None,
        min_tokens_B=column([p.min_tokens for p in params], torch.int64) if wants.min_tokens else None,
    )


def _bias(sampling: SamplingParams, vocab_size: int) -> Tensor:
    """float32[V]; -inf forbids."""
    bias = torch.zeros(vocab_size)
    if sampling.allowed_token_ids is not None:
        bias.fill_(-torch.inf)
        bias[list(sampling.allowed_token_ids)] = 0
    for token, value in sampling.logit_bias.items():
        bias[token] += value
    return bias


def top_logprobs(positions: Sequence[tuple[np.ndarray, np.ndarray]]) -> TopLogprobs | None:
    if not positions:
        return None
    ids, logprobs = zip(*positions, strict=True)
    return TopLogprobs(np.stack(ids).astype(np.int32), np.stack(logprobs).astype(np.float32))
