"""The in-process engine: samples from the very weights the trainer updates.

A step has four parts. The scheduler plans it; the runner launches it; results of earlier steps come in; what has finished
leaves. On a GPU the device is always one step ahead of the host: a step's tokens are looked at while the next one runs.

    submit ──► Scheduler ──Plan──► Runner ──Results──► Rows ──► Delta, Completion
                   ▲                                     │
                   └──────────── finished, preempted ────┘
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from redline.config.sections.engine import EngineConfig
from redline.engine.native.admission import Limits, check_request
from redline.engine.native.cache.blocks import BlockPool
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.sizing import block_size_for, num_blocks_for
from redline.engine.native.completions import completion_of, delta_of
from redline.engine.native.lora import Adapters, LoraCounts, Source
from redline.engine.native.running.device_rows import MAX_STOPS, DeviceRows
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Results, Runner, Samples, wants_of
from redline.engine.native.scheduler import Plan, Scheduler
from redline.engine.native.sequence import NO_ROW, Sampled, Sequence, Stage, Wants
from redline.engine.native.sleep import MemoryMoved, OffloadedWeights, Stopwatch
from redline.engine.native.text.stop_strings import StopSearch
from redline.engine.stats import Rate
from redline.errors import BrokenModelError, EngineError, EngineMemoryError
from redline.kernels.available import kernels_serve
from redline.models.files.hf import AnyDecoder
from redline.models.lora.per_token import LoraBank, PreparedAdapter
from redline.telemetry import span
from redline.types import Completion, Delta, EngineStats, FinishReason, GenerateRequest, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Event = tuple[int, Delta | EngineError]
"""A request's number, and a piece of one of its completions or why it has none."""
MAX_TOP_LOGPROBS = 20


class Ranks(Protocol):
    """Other processes that run the same engine on other parts of the model."""

    def smallest(self, value: int) -> int: ...

    def share_samples(self, tokens_B: Tensor, logprobs_B: Tensor) -> None: ...


class NativeEngine:
    """Continuous batching over a paged KV cache. Implements `ports.Engine` and `ports.SteppedEngine`."""

    def __init__(
        self,
        decoder: AnyDecoder,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: Ranks | None = None,
        bank: LoraBank | None = None,
    ) -> None:
        """`bank` holds LoRA adapters (`make_bank`); without one the engine takes none."""
        weight, spec = decoder.output_weight, decoder.spec
        self.decoder = decoder
        self.version = 0
        self._config = config
        self._tokenizer = tokenizer
        self._max_len = min(config.max_model_len or spec.max_positions, spec.max_positions)
        self._block_size = block_size_for(config, weight.device)
        self._adapters = Adapters(bank)
        num_blocks = num_blocks_for(config, spec, self._block_size, self._max_len, weight.device, weight.dtype)
        self._ranks = ranks
        self._pool = BlockPool(ranks.smallest(num_blocks) if ranks else num_blocks, self._block_size)
        self._rows = Rows(config.max_num_seqs, self._max_len)
        self._scheduler = Scheduler(
            self._pool,
            self._rows,
            config.max_num_batched_tokens,
            self._salt_of,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._runner: Runner | None = self._make_runner()
        self._offloaded: OffloadedWeights | None = None
        self.limits = Limits(
            vocab_size=spec.vocab_size,
            max_len=self._max_len,
            max_num_seqs=config.max_num_seqs,
            cache_tokens=self._pool.num_blocks * self._block_size,
            max_stops=MAX_STOPS,
            max_top_logprobs=min(MAX_TOP_LOGPROBS, spec.vocab_size),
            has_tokenizer=tokenizer is not None,
            block_size=self._block_size,
        )
        self._ids = itertools.count()
        self._unfinished: dict[int, list[Sequence]] = {}
        self._alone_left = 0
        """Prompts to compute by themselves, after several at once had no memory."""
        self._at_row: list[Sequence | None] = [None] * config.max_num_seqs
        self._in_flight: deque[Results] = deque()
        self._events: list[Event] = []
        self._kv_blocks_peak = self._kv_blocks_peak_before = 0
        self._steps = self._batch_size = self._prompt_tokens = self._generated_tokens = self._num_finished = 0
        self._decode_steps = self._decoded_rows = 0
        self._rate = Rate()

    def _make_runner(self) -> Runner:
        weight, spec = self.decoder.output_weight, self.decoder.spec
        cache = KVCache(spec, self._pool.num_blocks + 1, self._block_size, weight.device, weight.dtype)
        max_blocks = -(-self._max_len // self._block_size)
        rows = DeviceRows(self._config.max_num_seqs, max_blocks, spec.vocab_size, weight.device)
        rows.share_samples = self._ranks.share_samples if self._ranks else None
        runner = Runner(self.decoder, cache, rows)
        if kernels_serve(weight):
            from redline.engine.native.running import cuda

            if cuda.serves(self.decoder, weight.dtype, self._block_size):
                runner = cuda.CudaRunner(self.decoder, cache, rows)
        runner.lora = self._adapters.bank
        return runner

    def _salt_of(self, adapter: str | None) -> bytes:
        return f"{self.version}/{self._adapters.salt(adapter) if adapter is not None else ''}".encode()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raises EngineError where it cannot be served as asked."""
        check_request(request, self.limits, self._adapters.versions)

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        """Queue a request; its number. Raises EngineError where it cannot be served as asked."""
        self.check(request)
        slot = self._adapters.take(request.adapter)
        request_id, now = next(self._ids), time.perf_counter()
        wants = Wants.of(request.sampling, lora=request.adapter is not None)
        sequences = [
            Sequence(request_id, index, request, now, wants, streaming, slot, tokens=request.prompt_ids)
            for index in request.sampling.indices
        ]
        self._unfinished[request_id] = sequences
        self._scheduler.add(sequences)
        return request_id

    @torch.inference_mode()
    def abort(self, request_id: int) -> None:
        """End a request; each of its completions so far comes with the next step. Unknown and finished ones are ignored."""
        for sequence in list(self._unfinished.get(request_id, ())):
            sequence.finish_reason = FinishReason.ABORT
            self._retire(sequence)

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        """Index of each completion of a request that is not finished → tokens it has so far. Any thread may ask; while a step
        runs, a number may be a step old."""
        found = {}
        for sequence in list(self._unfinished.get(request_id, ())):
            if sequence.stage is Stage.DECODE:
                found[sequence.index] = int(self._rows.sampled_R[sequence.row])
            else:
                found[sequence.index] = len(sequence.sampled.token_ids) if sequence.sampled else 0
        return found

    @torch.inference_mode()
    def generate(self, requests: Sequence_[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked. Where one fails, all are given up and it is said why. What
        comes out for requests that were submitted before is kept for the next `step`."""
        for request in requests:
            self.check(request)
        found: dict[int, dict[int, Completion]] = {}
        others: list[Event] = []
        missing = sum(request.sampling.n for request in requests)
        try:
            for request in requests:
                found[self.submit(request)] = {}
            while missing:
                events = self.step()
                others += [event for event in events if event[0] not in found]
                for number, piece in events:
                    if number not in found:
                        continue
                    if isinstance(piece, EngineError):
                        raise piece
                    if piece.completion is not None:
                        found[number][piece.index] = piece.completion
                        missing -= 1
        finally:
            for number in found:
                self.abort(number)
            self._events = others + [event for event in self._events if event[0] not in found]
        return [[completions[index] for index in sorted(completions)] for completions in found.values()]

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything forward; never while it sleeps."""
        return self._runner is not None and (self._scheduler.has_work or bool(self._in_flight) or bool(self._events))

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advance every request as far as one step goes; what came out of it, and of the steps before it."""
        num_steps = self._num_steps()
        if not self._scheduler.can_grow(num_steps):
            self._collect(keep=0)  # a preemption needs everything that was sampled
            num_steps = 1
        before = len(self._in_flight)
        self._launch(self._scheduler.schedule(num_steps))
        self._kv_blocks_peak = max(self._kv_blocks_peak, self._pool.num_used)
        launched = len(self._in_flight) - before
        self._collect(keep=launched if self._awake.runs_ahead else 0)
        self._steps += 1
        self._rate.add(time.perf_counter(), self._generated_tokens)
        events, self._events = self._events, []
        return events

    def _num_steps(self) -> int:
        """Steps to launch at once: one where prompts queue or somebody looks at every token, else as many as the longest may
        still take."""
        decoding = self._scheduler.decoding
        if self._awake.max_steps == 1 or self._scheduler.is_crowded:
            return 1
        if any(s.streaming or s.request.sampling.stop for s in decoding):
            return 1
        left = max((int(self._rows.limit_R[s.row] - self._rows.launched_R[s.row]) for s in decoding), default=1)
        return max(1, min(self._awake.max_steps, left))

    def _launch(self, plan: Plan) -> None:
        self._awake.prepare(plan)
        for sequence in plan.admitted:
            self._at_row[sequence.row] = sequence
        self._batch_size = len(plan.decode)
        try:
            self._decode(plan)
        except torch.OutOfMemoryError as error:
            self._undo_prefills(plan, error)
            self._fail_for_memory(plan.decode, error)
            return
        try:
            self._prefill(plan)
        except torch.OutOfMemoryError as error:
            self._undo_prefills(plan, error)
            if len(plan.chunks) > 1:  # one of them may be too much, and the others not
                self._alone_left, self._scheduler.prompts_at_once = len(plan.chunks), 1
            else:
                self._fail_for_memory([plan.chunks[0].sequence], error)

    def _decode(self, plan: Plan) -> None:
        if plan.decode:
            self._decode_steps += plan.num_steps
            self._decoded_rows += plan.num_steps * len(plan.decode)
            with span("engine.decode", device=True, version=self.version):
                rows_B, prefixes = np.array([s.row for s in plan.decode]), None
                if self._awake.reads_prefixes_once:
                    rows_B, prefixes = self._rows.side_by_side(rows_B)
                positions_B = self._rows.launched_position_R[rows_B] - 1
                samples = self._awake.decode(rows_B, positions_B, plan.num_steps, wants_of(plan.decode), prefixes)
                self._expect(rows_B, samples, is_first=False)

    def _prefill(self, plan: Plan) -> None:
        if plan.chunks:
            with span("engine.prefill", device=True, version=self.version):
                samplers = [s for c in plan.chunks for s in c.samplers]
                self._prompt_tokens += sum(c.end - c.start for c in plan.chunks)
                first = self._awake.prefill(plan.chunks, plan.copies, wants_of(samplers))
                if first is not None:
                    self._expect(np.array([s.row for s in samplers]), first, is_first=True)
            self._alone_left = max(0, self._alone_left - 1)
            self._scheduler.prompts_at_once = 1 if self._alone_left else None

    def _undo_prefills(self, plan: Plan, error: torch.OutOfMemoryError) -> None:
        """The prompts of a plan wait again, as if they had not been admitted. Raises where other ranks have computed them."""
        if self._ranks is not None:
            raise error
        rows = self._scheduler.undo_prefills(plan)
        self._awake.rows.kill(rows)
        for row in rows:
            self._at_row[row] = None
        if self.decoder.output_weight.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fail_for_memory(self, sequences: Sequence_[Sequence], error: torch.OutOfMemoryError) -> None:
        """Cancel the requests of these sequences; the others go on."""
        for sequence in sequences:
            if sequence.request_id in self._unfinished:
                n, first_line = sequence.request.sampling.n, str(error).partition("\n")[0]
                message = f"no memory for a prompt of {sequence.num_prompt} tokens with n = {n}: {first_line}"
                hint = "shorten it, lower n, or leave more memory free (engine.gpu_memory_utilization)"
                self._fail(sequence, EngineMemoryError(message, hint))

    def _expect(self, rows_B: np.ndarray, samples: Samples, *, is_first: bool) -> None:
        fetched, arrived = self._awake.fetch(samples)
        self._in_flight.append(Results(rows_B, self._rows.epoch_R[rows_B], self.version, is_first, fetched, arrived))

    # ── what comes back ────────────────────────────────────────────────────────────────────────────────────────────────

    def _collect(self, keep: int) -> None:
        """Take in results, oldest first, until `keep` of them are left in flight."""
        while len(self._in_flight) > keep:
            with span("engine.collect", version=self.version):
                self._take_in(self._in_flight.popleft())

    def _take_in(self, results: Results) -> None:
        samples, now = results.wait(), time.perf_counter()
        tokens_SB, logprobs_SB = samples.tokens_SB.numpy(), samples.logprobs_SB.numpy()
        tenants = self._rows.epoch_R[results.rows_B] == results.epochs_B
        sampled_before = self._rows.sampled_R[results.rows_B[tenants]]
        for step in range(len(tokens_SB)):
            live_B = self._rows.append(results.rows_B, results.epochs_B, tokens_SB[step], logprobs_SB[step])
            self._generated_tokens += int(live_B.sum())
            self._take_in_extras(results, step, live_B)
        for row, before in zip(results.rows_B[tenants].tolist(), sampled_before.tolist(), strict=True):
            sequence = self._at_row[row]
            if sequence is None:  # it went down with one of its siblings, just now
                continue
            if results.is_first and not sequence.first_token:
                sequence.first_token, sequence.oldest_version = now, results.version
            elif sequence.newest_version != results.version:
                sequence.switches.append((before, results.version))
            sequence.last_token, sequence.newest_version = now, results.version
            if sequence.streaming or sequence.request.sampling.stop or not self._rows.alive_R[row]:
                self._look_at(sequence)

    def _take_in_extras(self, results: Results, step: int, live_B: np.ndarray) -> None:
        """Raw and top logprobs, for the few requests that want them."""
        samples = results.samples
        if samples.raw_SB is None and samples.top_ids_SBK is None:
            return
        for b in np.flatnonzero(live_B).tolist():
            sequence = self._at_row[results.rows_B[b]]
            assert sequence is not None
            if samples.raw_SB is not None and sequence.wants.raw:
                sequence.raw.append(float(samples.raw_SB[step, b]))
            if samples.top_ids_SBK is not None and samples.top_logprobs_SBK is not None and sequence.wants.top:
                k = sequence.wants.top
                sequence.top.append((samples.top_ids_SBK[step, b, :k].numpy(), samples.top_logprobs_SBK[step, b, :k].numpy()))

    def _look_at(self, sequence: Sequence) -> None:
        """Has it ended, and is there a piece to hand out?"""
        row, sampling = sequence.row, sequence.request.sampling
        if np.isnan(self._rows.logprobs_RN[row, self._rows.sampled_R[row] - 1]):
            adapter = sequence.request.adapter
            message = f"the model gave NaN for request {sequence.request_id}" + (
                f" with adapter {adapter!r}" if adapter else ""
            )
            self._fail(sequence, BrokenModelError(message, "look for NaN in the weights; lower trainer.learning_rate"))
            return
        if not self._rows.alive_R[row]:
            stopped = self._rows.tokens_RN[row, self._rows.sampled_R[row] - 1] in sampling.stop_token_ids
            sequence.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        if sampling.stop:
            self._look_for_stop(sequence)
        if sequence.finish_reason is not None:
            self._retire(sequence)
        elif sequence.streaming:
            self._hand_out(sequence, None)

    def _look_for_stop(self, sequence: Sequence) -> None:
        assert self._tokenizer is not None
        sampling, count = sequence.request.sampling, int(self._rows.sampled_R[sequence.row])
        tokens = self._rows.tokens_RN[sequence.row, :count]
        if sequence.stop_search is None:
            sequence.stop_search = StopSearch(self._tokenizer, sampling.stop, sampling.min_tokens - 1)
        found = sequence.stop_search.look(tokens)
        if found is not None:
            self._rows.sampled_R[sequence.row], sequence.stop = found
            sequence.finish_reason = FinishReason.STOP

    def _retire(self, sequence: Sequence) -> None:
        """Out of the engine, its completion to the caller."""
        self._release(sequence)
        self._hand_out(sequence, completion_of(sequence, self.version))
        self._forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        blocks = sequence.blocks
        if sequence.stage is Stage.DECODE:
            if self._rows.alive_R[sequence.row]:  # a stop string or an abort ended it, of which the device knows nothing
                self._awake.rows.kill([sequence.row])
            self._at_row[sequence.row] = None
            self._scheduler.finish(sequence)
        else:
            self._scheduler.withdraw(sequence)
            self._clean(blocks)  # what they hold was not looked at

    def _clean(self, blocks: Sequence_[int]) -> None:
        """Blocks were given back that may hold NaN. Where others still hold them, it is theirs to notice."""
        idle = [block for block in blocks if self._pool.num_idle([block])]
        if idle:
            self._pool.forget(self._awake.scrub(idle))

    def _forget(self, sequence: Sequence) -> None:
        siblings = self._unfinished[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._unfinished[sequence.request_id]
            self._adapters.release(sequence.request.adapter)
            self._num_finished += 1

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        """Cancel its request: a part of it is of no use."""
        siblings = list(self._unfinished[sequence.request_id])
        blocks = {block for sibling in siblings for block in sibling.blocks}
        for sibling in siblings:
            sibling.cacheable = False
            self._release(sibling)
            self._forget(sibling)
        self._clean(sorted(blocks))
        self._events.append((sequence.request_id, error))

    # ── what goes out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hand_out(self, sequence: Sequence, completion: Completion | None) -> None:
        if sequence.row != NO_ROW:
            sampled = self._rows.take(sequence.row)
        else:
            sampled = sequence.sampled or Sampled.nothing()
        self._events.append((sequence.request_id, delta_of(sequence, sampled, completion)))

    # ── adapters ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def load_adapter(
        self, name: str, source: Source, version: int = 0, *, alpha: float | None = None, use_rslora: bool = False
    ) -> None:
        """Requests may name this LoRA adapter from now on. Where it is known in this version, nothing happens. Another version
        takes its place: requests under way go on with the new one, as they do with new weights.

        `source` is a PEFT folder or tensors by PEFT's names; alpha (by default the rank: scale 1) and use_rslora go with
        tensors, a folder has its own. It does not wait: what `prepare_adapter` does can be done on another thread before."""
        self._adapters.load(name, source, version, alpha=alpha, use_rslora=use_rslora)

    def prepare_adapter(self, source: Source, *, alpha: float | None = None, use_rslora: bool = False) -> PreparedAdapter:
        """Read, check and convert an adapter, so that `load_adapter` has only copies left to do. From any thread."""
        return self._adapters.prepare(source, alpha=alpha, use_rslora=use_rslora)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Refused while a request uses it."""
        self._adapters.unload(name)

    @property
    def adapters(self) -> dict[str, int]:
        """Name → version of every adapter that requests may name."""
        return self._adapters.versions

    @property
    def adapter_counts(self) -> LoraCounts:
        return self._adapters.counts

    # ── weights, statistics ────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def apply(self, update: WeightUpdate) -> None:
        """The weights are the trainer's own storage: there is nothing to move, only a version to note. Blocks of the old
        version are never found again; sequences under way go on, and their blocks are not offered to others."""
        self._collect(keep=0)
        self.version = update.version
        self._kv_blocks_peak_before, self._kv_blocks_peak = self._kv_blocks_peak, self._pool.num_used
        for sequence in (*self._scheduler.decoding, *self._scheduler.prefilling):
            sequence.cacheable = False

    @torch.inference_mode()
    def sleep(self, *, weights: bool = False) -> MemoryMoved:
        """Give up the KV cache, and the weights where asked. Requests under way are kept and computed again after `wake`."""
        if self._runner is None:
            raise EngineError("the engine is asleep already", "wake it first")
        if weights and self.decoder.output_weight.device.type == "cpu":
            raise EngineError("the weights are in host memory, where sleep would put them", "sleep without `weights`")
        watch = Stopwatch(self.decoder.output_weight.device)
        self._collect(keep=0)
        self._scheduler.suspend()
        self._at_row = [None] * len(self._at_row)
        freed, self._runner = self._runner.cache.bytes, None
        self._offloaded = OffloadedWeights(self.decoder) if weights else None
        if self.decoder.output_weight.device.type == "cuda":
            torch.cuda.empty_cache()
        return MemoryMoved(freed, self._offloaded.bytes if self._offloaded else 0, watch.seconds)

    @torch.inference_mode()
    def wake(self) -> MemoryMoved:
        """Take back what `sleep` gave up."""
        if self._runner is not None:
            raise EngineError("the engine is not asleep", "call sleep first")
        watch = Stopwatch(self.decoder.output_weight.device)
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is not None:
            offloaded.restore()
        self._runner = self._make_runner()
        return MemoryMoved(self._runner.cache.bytes, offloaded.bytes if offloaded else 0, watch.seconds)

    @property
    def _awake(self) -> Runner:
        if self._runner is None:
            raise EngineError("the engine is asleep", "wake it first")
        return self._runner

    def reset_prefix_cache(self) -> None:
        """Find nothing by content that was computed before: what is sampled next does not depend on what came earlier."""
        self._pool.forget_all()
        for sequence in (*self._scheduler.decoding, *self._scheduler.prefilling):
            sequence.cacheable = False

    @property
    def stats(self) -> EngineStats:
        counts = self._scheduler.counts
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_used=self._pool.num_used,
            kv_blocks_total=self._pool.num_blocks,
            kv_blocks_peak=self._kv_blocks_peak,
            batch_size=self._batch_size,
            tokens_per_s=self._rate.per_s,
            version=self.version,
            steps=self._steps,
            preemptions=counts.preemptions,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            requests=self._num_finished,
            adapters=self._adapters.num_resident,
            decode_steps=self._decode_steps,
            decoded_rows=self._decoded_rows,
            kv_blocks_peak_before=self._kv_blocks_peak_before,
        )

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds besides the network. On the CPU a block of the cache takes memory once it was used."""
        runner = self._runner
        if runner is None:
            return {"kv_cache": 0}
        blocks, whole = runner.cache.blocks, runner.cache.bytes
        used = whole // runner.cache.num_blocks * (1 + self._pool.num_touched)
        return {"kv_cache": used if blocks.device.type == "cpu" else whole}
