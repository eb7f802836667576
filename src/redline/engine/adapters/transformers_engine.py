"""The slowest engine, for networks that no other can run: transformers' own forward and cache, redline's sampling.

Rows start in batches and stay until the last of their batch is done; later ones wait. What a network keeps between
tokens is its own business, so state-space layers, ALiBi or attention sinks are all the same here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.transformers_batch import Batch, CachedBatch, RecomputedBatch, abilities_of
from redline.engine.adapters.transformers_rows import Row, Running, top_logprobs
from redline.engine.native.admission import Limits, check_request
from redline.engine.native.engine import MAX_TOP_LOGPROBS, Event
from redline.engine.native.running.sampler import Sampled
from redline.engine.native.text.stop_strings import StopSearch
from redline.engine.stats import Rate
from redline.errors import EngineError
from redline.models.spec import fixed_positions, position_limit
from redline.telemetry import span
from redline.types import Completion, Delta, EngineStats, FinishReason, GenerateRequest, VersionSpan, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_STOPS = 1024


class TransformersEngine:
    """Batches of rows that start together. Implements `ports.Engine` and `ports.SteppedEngine`."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.version = 0
        self._model = model.eval()
        self._config = config
        self._tokenizer = tokenizer
        self.abilities = abilities_of(model)
        text = model.config.get_text_config(decoder=True)
        self._fixed_positions = fixed_positions(text)
        max_len = min(config.max_model_len or position_limit(text), position_limit(text))
        self.limits = Limits(
            vocab_size=self.abilities.vocab_size,
            max_len=max_len,
            max_num_seqs=config.max_num_seqs,
            cache_tokens=max_len,
            max_stops=MAX_STOPS,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            has_tokenizer=tokenizer is not None,
        )
        self._ids = itertools.count()
        self._waiting: list[Row] = []
        self._running: Running | None = None
        self._unfinished: dict[int, list[Row]] = {}
        self._events: list[Event] = []
        self._steps = self._prompt_tokens = self._generated_tokens = self._num_finished = 0
        self._decode_steps = self._decoded_rows = 0
        self._why_stopped: str | None = None
        self._rate = Rate()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raise EngineError for a request that cannot be served as asked."""
        check_request(request, self.limits, ())

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Queue a request and return its number. Raises EngineError where it cannot be served as asked."""
        self.check(request)
        request_id, now = next(self._ids), time.perf_counter()
        rows = [Row(request_id, index, request, now, streaming) for index in request.sampling.indices]
        self._unfinished[request_id] = list(rows)
        self._waiting = sorted([*self._waiting, *rows], key=lambda row: row.request.order)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request; each of its completions so far comes with the next step. Unknown and finished ones are ignored."""
        for row in list(self._unfinished.get(request_id, ())):
            row.finish_reason = FinishReason.ABORT
            self._retire(row)
        self._waiting = [row for row in self._waiting if row.alive]

    def end(self, request_id: int, index: int) -> None:
        """End one completion of a request; what it has comes with the next step. Unknown and finished ones are ignored."""
        for row in [row for row in self._unfinished.get(request_id, ()) if row.index == index]:
            row.finish_reason = FinishReason.ABORT
            self._retire(row)
        self._waiting = [row for row in self._waiting if row.alive]

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        """Index of each completion of a request that is not finished → tokens it has so far. Any thread may ask."""
        return {row.index: len(row.token_ids) for row in list(self._unfinished.get(request_id, ()))}

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked. Where one fails, all are given up and it is said why."""
        for request in requests:
            self.check(request)
        order = [self.submit(request) for request in requests]
        found: dict[tuple[int, int], Completion] = {}
        while any(number in self._unfinished for number in order) or self._events:
            for number, event in self.step():
                if isinstance(event, EngineError):
                    for other in order:
                        self.abort(other)
                    self._events = [left for left in self._events if left[0] not in order]
                    raise event
                if event.completion is not None:
                    found[number, event.index] = event.completion
        return [[found[number, i] for i in r.sampling.indices] for number, r in zip(order, requests, strict=True)]

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished) or bool(self._events)

    def stop_sampling(self, reason: str) -> None:
        """Raise an error with this reason in every later step."""
        self._why_stopped = reason

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Begin a batch, or advance the one under way by a token, and return what came of it."""
        if self._why_stopped is not None:
            raise EngineError(f"the engine samples no more: {self._why_stopped}", "start the run again; it resumes")
        if self._running is None and self._waiting:
            self._begin()
        elif self._running is not None:
            with span("engine.decode", version=self.version):
                self._decode_steps += 1
                self._decoded_rows += sum(row.alive for row in self._running.rows)
                self._take_in(self._running, self._running.advance())
        if self._running is not None and not any(row.alive for row in self._running.rows):
            self._running = None
        self._steps += 1
        self._rate.add(time.perf_counter(), self._generated_tokens)
        events, self._events = self._events, []
        return events

    def _begin(self) -> None:
        rows = self._next_rows()
        self._waiting = [row for row in self._waiting if row not in rows]
        started = time.perf_counter()
        for row in rows:
            row.started, row.oldest_version = started, self.version
        with span("engine.prefill", version=self.version):
            self._running = Running(self._batch(rows), rows, self.limits.vocab_size, self._model.device)
            self._take_in(self._running, self._running.begin())

    def _batch(self, rows: Sequence[Row]) -> Batch:
        """Rows of one request stand side by side and continue one prompt, where what follows it can be shared."""
        recomputed = self._is_recomputed(rows[0])
        prompts: list[np.ndarray] = []
        prompt_B: list[int] = []
        for before, row in zip([None, *rows], rows, strict=False):
            shared = before is not None and before.request_id == row.request_id and (recomputed or self.abilities.shares)
            if not shared:
                prompts.append(row.request.prompt_ids)
            prompt_B.append(len(prompts) - 1)
        self._prompt_tokens += sum(map(len, prompts))
        return (RecomputedBatch if recomputed else CachedBatch)(self._model, prompts, prompt_B)

    def _next_rows(self) -> list[Row]:
        """The first that waits, and all that can start with it. Rows go on until the last is done, so none may outgrow the
        positions however long the others take."""
        taken: list[Row] = []
        longest = most = 0
        for row in self._waiting:
            prompt, new = len(row.request.prompt_ids), row.request.sampling.max_tokens
            width, steps = max(longest, prompt), max(most, new)
            at_once = width + steps if self._is_recomputed(row) else width
            fits = (
                len(taken) < self._config.max_num_seqs
                and width + steps <= self.limits.max_len
                and (len(taken) + 1) * at_once <= self._config.max_num_batched_tokens
            )
            if not taken or (fits and self._company(row) == self._company(taken[0])):
                taken.append(row)
                longest, most = width, steps
        return taken

    def _company(self, row: Row) -> object:
        """Equal for rows that may share a batch."""
        if self._is_recomputed(row):
            alone = self._outgrows_rope(row) or not self.abilities.is_causal
            return (row.request_id, row.index) if alone else "any"
        return "any" if self.abilities.pads else len(row.request.prompt_ids)

    def _is_recomputed(self, row: Row) -> bool:
        return not self.abilities.caches or self._outgrows_rope(row)

    def _outgrows_rope(self, row: Row) -> bool:
        """LongRoPE changes all positions of a batch once one of them is long."""
        return len(row.request.prompt_ids) + row.request.sampling.max_tokens > self._fixed_positions

    # ── what comes out ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_in(self, running: Running, sampled: Sampled) -> None:
        tokens, logprobs, now = sampled.tokens_B.tolist(), sampled.logprobs_B.tolist(), time.perf_counter()
        for b, row in enumerate(running.rows):
            if not row.alive:
                continue
            row.token_ids.append(tokens[b])
            row.logprobs.append(logprobs[b])
            row.first_token, row.last_token = row.first_token or now, now
            self._generated_tokens += 1
            sampling = row.request.sampling
            if sampling.raw_logprobs and sampled.raw_logprobs_B is not None:
                row.raw.append(float(sampled.raw_logprobs_B[b]))
            if sampling.top_logprobs and sampled.top_ids_BK is not None and sampled.top_logprobs_BK is not None:
                k = sampling.top_logprobs
                row.top.append((sampled.top_ids_BK[b, :k].cpu().numpy(), sampled.top_logprobs_BK[b, :k].cpu().numpy()))
            self._look_at(row)

    def _look_at(self, row: Row) -> None:
        """Has it ended, and is there a piece to hand out?"""
        sampling = row.request.sampling
        if np.isnan(row.logprobs[-1]):
            self._fail(row)
            return
        if row.token_ids[-1] in sampling.stop_token_ids:
            row.finish_reason = FinishReason.STOP
        elif len(row.token_ids) >= sampling.max_tokens:
            row.finish_reason = FinishReason.LENGTH
        if sampling.stop:
            assert self._tokenizer is not None
            if row.stop_search is None:
                row.stop_search = StopSearch(self._tokenizer, sampling.stop, sampling.min_tokens - 1)
            found = row.stop_search.look(row.token_ids)
            if found is not None:
                row.stop, row.finish_reason = found[1], FinishReason.STOP
        if row.finish_reason is not None:
            self._retire(row)
        elif 0 < row.streaming <= len(row.token_ids) - row.streamed:
            self._hand_out(row, None)

    def _retire(self, row: Row) -> None:
        self._hand_out(row, self._completion(row))
        siblings = self._unfinished[row.request_id]
        siblings.remove(row)
        if not siblings:
            del self._unfinished[row.request_id]
            self._num_finished += 1

    def _fail(self, row: Row) -> None:
        """Cancel its request: a part of it is of no use."""
        for sibling in self._unfinished.pop(row.request_id):
            sibling.failed = True
        self._waiting = [other for other in self._waiting if other.alive]
        self._num_finished += 1
        error = EngineError(f"the model gave NaN for request {row.request_id}", "look for NaN in the weights")
        self._events.append((row.request_id, error))

    def _hand_out(self, row: Row, completion: Completion | None) -> None:
        begin, row.streamed = row.streamed, len(row.token_ids) if row.streaming else 0
        piece = slice(begin, row.streamed)
        token_ids, logprobs = np.array(row.token_ids[piece], np.int32), np.array(row.logprobs[piece], np.float32)
        self._events.append((row.request_id, Delta(row.index, token_ids, logprobs, top_logprobs(row.top[piece]), completion)))

    def _completion(self, row: Row) -> Completion:
        assert row.finish_reason is not None
        sampling, started = row.request.sampling, row.started or time.perf_counter()
        first = row.first_token or started
        return Completion(
            token_ids=np.array(row.token_ids, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            finish_reason=row.finish_reason,
            versions=VersionSpan(row.oldest_version if row.started else self.version, self.version),
            queue_s=started - row.submitted,
            prefill_s=first - started,
            decode_s=(row.last_token or first) - first,
            stop=row.stop,
            switches=tuple(switch for switch in row.switches if switch[0] < len(row.token_ids)),
            raw_logprobs=np.array(row.raw, np.float32) if sampling.raw_logprobs else None,
            top_logprobs=top_logprobs(row.top),
            prompt_logprobs=row.prompt_logprobs,
        )

    # ── weights, statistics ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def network(self) -> PreTrainedModel:
        """What it samples from."""
        return self._model

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors by their names in the network into it, where it does not share them. For the thread that has the
        engine between two steps. Raises EngineError for a name that the network has not."""
        own = self._model.state_dict()
        with span("engine.update_weights"):
            for name, tensor in weights:
                if name not in own:
                    raise EngineError(f"transformers' network has no weight {name}", "train a family that keeps its names")
                own[name].copy_(tensor)

    def apply(self, update: WeightUpdate) -> None:
        """Note the version; the weights are whatever the network holds."""
        if update.version != self.version and self._running is not None:
            for row in self._running.rows:
                row.switches.append((len(row.token_ids), update.version))
        self.version = update.version

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds besides the network, as far as known: what a network keeps between tokens is its own."""
        return {}

    def reset_prefix_cache(self) -> None:
        """Does nothing: no prompt is kept beyond its batch."""

    @property
    def stats(self) -> EngineStats:
        """A row of its cache counts as a block."""
        running = sum(row.alive for row in self._running.rows) if self._running else 0
        return EngineStats(
            running=running,
            waiting=len(self._waiting),
            kv_blocks_used=running,
            kv_blocks_total=self._config.max_num_seqs,
            batch_size=len(self._running.rows) if self._running else 0,
            tokens_per_s=self._rate.per_s,
            version=self.version,
            steps=self._steps,
            preemptions=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            requests=self._num_finished,
            decode_steps=self._decode_steps,
            decoded_rows=self._decoded_rows,
        )
