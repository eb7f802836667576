"""The in-process engine: samples from the very weights the trainer updates.

A step has four parts. The scheduler plans it, as far ahead as `LookAhead` says; the launcher has the runner do it; results of
earlier steps come in; what has finished leaves. On a GPU the device is always one step ahead of the host: a step's tokens are
looked at while the next one runs.

    submit ──► Scheduler ──Plan──► Launcher, Runner ──Results──► InFlight ──► UnderWay ──► Delta, Completion
                   ▲                                                              │
                   └───────────────────────── finished, preempted ────────────────┘
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
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
from redline.engine.native.in_flight import InFlight
from redline.engine.native.launcher import Launcher
from redline.engine.native.look_ahead import LookAhead
from redline.engine.native.lora import Adapters, LoraCounts, Source
from redline.engine.native.quantized import QuantizedCopy, WholeNumbers, refuse_without_fp8
from redline.engine.native.running.cpu import CpuRunner
from redline.engine.native.running.device_rows import MAX_STOPS, DeviceRows
from redline.engine.native.running.replay import Replay
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Runner
from redline.engine.native.scheduler import Scheduler
from redline.engine.native.sequence import Sequence, Wants
from redline.engine.native.sleep import MemoryMoved, OffloadedWeights, Stopwatch
from redline.engine.native.speculation.speculation import Speculation
from redline.engine.native.under_way import Event, UnderWay
from redline.engine.stats import Rate
from redline.errors import ConfigError, EngineError
from redline.kernels.available import kernels_serve
from redline.models.files.hf import AnyDecoder
from redline.models.layers.routes import routing_shape
from redline.models.lora.per_token import LoraBank, PreparedAdapter
from redline.types import Completion, EngineStats, GenerateRequest, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOP_LOGPROBS = 20
FIRST_PROMPTS = 128
"""For a device that has nothing to do, which begins on these while the host sees to the others."""


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
        *,
        shares_device: bool = False,
    ) -> None:
        """`bank` holds LoRA adapters (`make_bank`); without one the engine takes none. With `shares_device` a trainer computes
        on the same GPU while it steps, and it leaves room for it there."""
        weight, spec = decoder.output_weight, decoder.spec
        self.decoder = decoder
        self.version = 0
        self._config = config
        self._shares_device = shares_device
        self._max_len = min(config.max_model_len or spec.max_positions, spec.max_positions)
        self._block_size = block_size_for(config, weight.device)
        self._adapters = Adapters(bank)
        self._routing = routing_shape(spec) if config.record_routing else None
        self._quantized = self._make_copy()
        num_blocks = num_blocks_for(config, spec, self._block_size, self._max_len, weight.device, weight.dtype, self._routing)
        self._ranks = ranks
        self._pool = BlockPool(ranks.smallest(num_blocks) if ranks else num_blocks, self._block_size)
        self._max_blocks = -(-self._max_len // self._block_size)
        self._rows = Rows(config.max_num_seqs, self._max_len, self._max_blocks)
        self._scheduler = Scheduler(
            self._pool,
            self._rows,
            config.max_num_batched_tokens,
            self._salt_of,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._speculation = Speculation(self._rows, config.speculation)

        def runner() -> Runner:
            return self._awake

        self._under_way = UnderWay(
            self._rows,
            self._scheduler,
            self._pool,
            self._adapters,
            tokenizer,
            runner,
            self._speculation.end,
            self._routing,
        )
        self._in_flight = InFlight(self._rows, self._under_way, self._speculation, runner)
        self._look_ahead = LookAhead(self._rows, self._scheduler, self._speculation, self._in_flight, runner)
        self._launcher = Launcher(
            self._rows,
            self._scheduler,
            self._under_way,
            self._speculation,
            self._in_flight,
            runner,
            is_one_of_several=ranks is not None,
        )
        self._runner: Runner | None = self._make_runner()
        self._offloaded: OffloadedWeights | None = None
        self.limits = self._make_limits(has_tokenizer=tokenizer is not None)
        self._ids = itertools.count()
        self._kv_blocks_peak = self._kv_blocks_peak_before = 0
        self._steps = 0
        self._rate = Rate()

    def _make_limits(self, *, has_tokenizer: bool) -> Limits:
        vocab_size = self.decoder.spec.vocab_size
        return Limits(
            vocab_size=vocab_size,
            max_len=self._max_len,
            max_num_seqs=self._config.max_num_seqs,
            cache_tokens=self._pool.num_blocks * self._block_size,
            max_stops=MAX_STOPS,
            max_top_logprobs=min(MAX_TOP_LOGPROBS, vocab_size),
            has_tokenizer=has_tokenizer,
            block_size=self._block_size,
        )

    def _make_runner(self) -> Runner:
        weight, spec = self.decoder.output_weight, self.decoder.spec
        num_blocks = self._pool.num_blocks + 1
        cache = KVCache(spec, num_blocks, self._block_size, weight.device, weight.dtype, routing=self._routing)
        rows = DeviceRows(self._config.max_num_seqs, self._max_blocks, spec.vocab_size, weight.device)
        rows.share_samples = self._ranks.share_samples if self._ranks else None
        self._quantized = self._quantized or self._make_copy()
        network = self._quantized.network if self._quantized is not None else self.decoder
        runner = CpuRunner.of(network, cache, rows) or Runner(network, cache, rows)
        if kernels_serve(weight):
            from redline.engine.native.running import cuda

            if cuda.serves(network, weight.dtype, self._block_size):
                runner = cuda.CudaRunner(
                    network, cache, rows, shares_device=self._shares_device, guesses=self._speculation.is_on
                )
        runner.lora = self._adapters.bank
        self._speculation.forget_references()
        return runner

    def _make_copy(self) -> QuantizedCopy | None:
        """The network in fewer bits, where it is to sample so. Raises `ConfigError` and `ModelError` where it cannot."""
        quantization, weight = self._config.quantization, self.decoder.output_weight
        if quantization == "none":
            return None
        if self._adapters.bank is not None:
            raise ConfigError("engine.quantization: adapters by name stand beside weights that are not", "leave the bank out")
        if quantization != "fp8":
            return WholeNumbers(self.decoder, quantization)
        refuse_without_fp8(weight.device, weight.dtype, self._block_size)
        from redline.engine.native.fp8 import Fp8Copy

        return Fp8Copy(self.decoder)

    def _salt_of(self, adapter: str | None) -> bytes:
        return f"{self.version}/{self._adapters.salt(adapter) if adapter is not None else ''}".encode()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raises EngineError where it cannot be served as asked."""
        check_request(request, self.limits, () if request.adapter is None else self._adapters.versions)

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Queue a request; its number. Raises EngineError where it cannot be served as asked."""
        self.check(request)
        return self._queue(request, streaming)

    def _queue(self, request: GenerateRequest, streaming: int) -> int:
        """Every request that is served comes by here, checked."""
        slot = self._adapters.take(request.adapter)
        request_id, now = next(self._ids), time.perf_counter()
        wants = Wants.of(request.sampling, lora=request.adapter is not None)
        sequences = [
            Sequence(request_id, index, request, now, wants, streaming, slot, tokens=request.prompt_ids)
            for index in request.sampling.indices
        ]
        self._under_way.add(request_id, sequences)
        self._scheduler.add(sequences)
        return request_id

    @torch.inference_mode()
    def abort(self, request_id: int) -> None:
        """End a request; each of its completions so far comes with the next step. Unknown and finished ones are ignored."""
        self._under_way.abort(request_id, self.version)

    @torch.inference_mode()
    def end(self, request_id: int, index: int) -> None:
        """End one completion of a request; what it has comes with the next step. Unknown and finished ones are ignored."""
        self._under_way.end(request_id, index, self.version)

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        """Index of each completion of a request that is not finished → tokens it has so far. Any thread may ask; while a step
        runs, a number may be a step old."""
        return self._under_way.sampled_tokens(request_id)

    def remember(self, task: str, token_ids: np.ndarray) -> None:
        """Guess tokens of attempts at a task from this one too, prompt and all, which was sampled elsewhere or by an earlier
        process. Nothing happens where the engine does not guess. Raises EngineError for tokens that the model has not."""
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self.limits.vocab_size:
            raise EngineError(
                f"an attempt at {task} has tokens outside the vocabulary of {self.limits.vocab_size:,}",
                "give attempts of this engine's model only",
            )
        self._speculation.remember(task, token_ids)

    def replay(self, texts: Mapping[int, np.ndarray], longest: int) -> None:
        """From now on draw these tokens, int32 by the seed of their request and at most `longest`, in the place of what is
        sampled; what is not there yet may come before its request. For measurements: logprobs are those of the tokens that
        would have been drawn. To be called before the first step."""
        assert not self._steps, "steps may be recorded already"
        rows = self._awake.rows
        rows.replay = Replay(texts, longest, rows.dead_row + 1, self.decoder.output_weight.device)

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
                found[self._queue(request, 0)] = {}
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
            self._under_way.events = others + [event for event in self._under_way.events if event[0] not in found]
        return [[completions[index] for index in sorted(completions)] for completions in found.values()]

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything forward; never while it sleeps."""
        return self._runner is not None and (self._scheduler.has_work or bool(self._in_flight) or bool(self._under_way.events))

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advance every request as far as one step goes; what came out of it, and of the steps before it."""
        if self._quantized is not None:
            self._quantized.renew()
        began, ahead = time.perf_counter(), self._look_ahead.decide(self.version)
        num_steps, before = ahead.num_steps, len(self._in_flight)
        if not self._scheduler.can_grow(num_steps):
            self._in_flight.collect(0, self.version)  # a preemption needs everything that was sampled
            num_steps, before = 1, 0
        is_idle, captured = self._awake.runs_ahead and not self._in_flight, self._awake.num_captured
        most_prompts = FIRST_PROMPTS if is_idle else None
        plan = self._scheduler.schedule(num_steps, ahead.drafts, ahead.guesses, most_prompts)
        self._launcher.launch(plan, self.version)
        self._kv_blocks_peak = max(self._kv_blocks_peak, self._pool.num_used)
        runs_ahead = self._awake.runs_ahead and not plan.drafts
        self._in_flight.collect(len(self._in_flight) - before if runs_ahead else 0, self.version)
        was_held_up = self._awake.num_captured > captured
        self._look_ahead.ended(plan, began, runs_ahead=runs_ahead, has_waited=before > 0, was_held_up=was_held_up)
        self._steps += 1
        self._rate.add(time.perf_counter(), self._under_way.generated_tokens)
        events, self._under_way.events = self._under_way.events, []
        return events

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
        """The weights are the trainer's own storage: there is nothing to move, only a version to note; a copy in whole numbers
        is made anew before the next step. Blocks of the old version are found by it alone, and used anew before others;
        sequences under way go on, and their blocks are not offered to others."""
        self._in_flight.collect(0, self.version)
        self.version = update.version
        if self._quantized is not None:
            self._quantized.forget()
        self._pool.age()
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
        self._in_flight.collect(0, self.version)
        self._scheduler.suspend()
        self._under_way.leave_all()
        cached, copied = self._runner.cache.bytes, self._copied_bytes
        self._runner = self._quantized = None
        self._offloaded = OffloadedWeights(self.decoder) if weights else None
        if self.decoder.output_weight.device.type == "cuda":
            torch.cuda.empty_cache()
        return MemoryMoved(cached, copied + (self._offloaded.bytes if self._offloaded else 0), watch.seconds)

    @torch.inference_mode()
    def wake(self) -> MemoryMoved:
        """Take back what `sleep` gave up."""
        if self._runner is not None:
            raise EngineError("the engine is not asleep", "call sleep first")
        watch = Stopwatch(self.decoder.output_weight.device)
        offloaded = self._offloaded
        if offloaded is not None:
            offloaded.restore()
            self._offloaded = None
        self._runner = self._make_runner()
        moved = self._copied_bytes + (offloaded.bytes if offloaded else 0)
        return MemoryMoved(self._runner.cache.bytes, moved, watch.seconds)

    @property
    def _copied_bytes(self) -> int:
        """Of the weights that are sampled from in fewer bits."""
        return 0 if self._quantized is None else self._quantized.bytes

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
        counts, launched, guessed = self._scheduler.counts, self._launcher.counts, self._speculation.counts
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_used=self._pool.num_used,
            kv_blocks_total=self._pool.num_blocks,
            kv_blocks_peak=self._kv_blocks_peak,
            batch_size=launched.batch_size,
            tokens_per_s=self._rate.per_s,
            version=self.version,
            steps=self._steps,
            preemptions=counts.preemptions,
            prefix_query_tokens=counts.prefix_query_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            prompt_tokens=launched.prompt_tokens,
            generated_tokens=self._under_way.generated_tokens,
            requests=self._under_way.num_finished,
            adapters=self._adapters.num_resident,
            decode_steps=launched.decode_steps,
            decoded_rows=launched.decoded_rows,
            kv_blocks_peak_before=self._kv_blocks_peak_before,
            drafted_tokens=guessed.drafted_tokens,
            accepted_tokens=guessed.accepted_tokens,
            speculation_saved_s=guessed.saved_s,
        )

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds besides the network. On the CPU a block of the cache takes memory once it was used."""
        runner = self._runner
        if runner is None:
            return {"kv_cache": 0}
        blocks, whole = runner.cache.blocks, runner.cache.bytes
        used = whole // runner.cache.num_blocks * (1 + self._pool.num_touched)
        quantized = {"quantized_weights": self._copied_bytes} if self._quantized is not None else {}
        return {"kv_cache": used if blocks.device.type == "cpu" else whole, **quantized}
