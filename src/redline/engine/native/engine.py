"""The in-process engine: samples from the very weights the trainer updates.

A step has four parts. The scheduler plans it; the runner launches it; results of earlier steps come in; what has finished
leaves. On a GPU the device is always one step ahead of the host: a step's tokens are looked at while the next one runs.

    submit ──► Scheduler ──Plan──► Runner ──Results──► UnderWay ──► Delta, Completion
                   ▲                                      │
                   └──────────── finished, preempted ─────┘
"""

from __future__ import annotations

import itertools
import time
from collections import deque
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
from redline.engine.native.lora import Adapters, LoraCounts, Source
from redline.engine.native.running.device_rows import MAX_STOPS, DeviceRows
from redline.engine.native.running.replay import Replay
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Decoding, Results, Runner, Samples, wants_of
from redline.engine.native.running.verification import NO_GUESS, Drafts, Guesses
from redline.engine.native.scheduler import Plan, Scheduler
from redline.engine.native.sequence import Sequence, Wants
from redline.engine.native.sleep import MemoryMoved, OffloadedWeights, Stopwatch
from redline.engine.native.speculation.costs import StepClock, Timed
from redline.engine.native.speculation.speculation import Speculation
from redline.engine.native.under_way import Event, UnderWay
from redline.engine.stats import Rate
from redline.errors import EngineError, EngineMemoryError
from redline.kernels.available import kernels_serve
from redline.models.files.hf import AnyDecoder
from redline.models.layers.routes import routing_shape
from redline.models.lora.per_token import LoraBank, PreparedAdapter
from redline.telemetry import span
from redline.types import Completion, EngineStats, GenerateRequest, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOP_LOGPROBS = 20
GUESSING_STEPS = 4
"""Steps per launch where the device guesses: rows whose guesses fail are noticed after two launches."""


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
        self._under_way = UnderWay(
            self._rows,
            self._scheduler,
            self._pool,
            self._adapters,
            tokenizer,
            lambda: self._awake,
            self._speculation.end,
            self._routing,
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
        self._alone_left = 0
        """Prompts to compute by themselves, after several at once had no memory."""
        self._in_flight: deque[Results] = deque()
        self._clock = StepClock()
        self._kv_blocks_peak = self._kv_blocks_peak_before = 0
        self._steps = self._batch_size = self._prompt_tokens = 0
        self._decode_steps = self._decoded_rows = 0
        self._rate = Rate()

    def _make_runner(self) -> Runner:
        weight, spec = self.decoder.output_weight, self.decoder.spec
        num_blocks = self._pool.num_blocks + 1
        cache = KVCache(spec, num_blocks, self._block_size, weight.device, weight.dtype, routing=self._routing)
        rows = DeviceRows(self._config.max_num_seqs, self._max_blocks, spec.vocab_size, weight.device)
        rows.share_samples = self._ranks.share_samples if self._ranks else None
        runner = Runner(self.decoder, cache, rows)
        if kernels_serve(weight):
            from redline.engine.native.running import cuda

            if cuda.serves(self.decoder, weight.dtype, self._block_size):
                runner = cuda.CudaRunner(
                    self.decoder, cache, rows, shares_device=self._shares_device, guesses=self._speculation.is_on
                )
        runner.lora = self._adapters.bank
        self._speculation.forget_references()
        return runner

    def _salt_of(self, adapter: str | None) -> bytes:
        return f"{self.version}/{self._adapters.salt(adapter) if adapter is not None else ''}".encode()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raises EngineError where it cannot be served as asked."""
        check_request(request, self.limits, self._adapters.versions)

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Queue a request; its number. Raises EngineError where it cannot be served as asked."""
        self.check(request)
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
        began, drafts = time.perf_counter(), self._drafts()
        guesses, num_steps = self._guesses() if not drafts else ({}, 1)
        if not self._scheduler.can_grow(num_steps):
            self._collect(keep=0)  # a preemption needs everything that was sampled
            num_steps = 1
        before, captured = len(self._in_flight), self._awake.num_captured
        plan = self._scheduler.schedule(num_steps, drafts, guesses)
        self._launch(plan)
        self._kv_blocks_peak = max(self._kv_blocks_peak, self._pool.num_used)
        launched = len(self._in_flight) - before
        runs_ahead = self._awake.runs_ahead and not drafts
        self._collect(keep=launched if runs_ahead else 0)
        was_held_up = self._awake.num_captured > captured
        done = self._clock.step(_timed(plan), began, runs_ahead=runs_ahead, has_waited=before > 0, was_held_up=was_held_up)
        if done is not None:
            self._speculation.took(*done)
        self._steps += 1
        self._rate.add(time.perf_counter(), self._under_way.generated_tokens)
        events, self._under_way.events = self._under_way.events, []
        return events

    def _drafts(self) -> dict[Sequence, list[int]]:
        """Tokens to verify in the next step; none where there is no room for them."""
        most = self._awake.most_verified
        if self._awake.guesses_itself or not self._speculation.may_draft(len(self._scheduler.decoding), most):
            return {}
        if self._in_flight and not self._speculation.drafts(self._scheduler.decoding, most):
            return {}  # by what is known of them so far; the device goes on meanwhile
        self._collect(keep=0)  # the newest tokens say what may come next
        drafts = self._speculation.drafts(self._scheduler.decoding, most)
        self._scheduler.reserve_for({sequence: len(draft) for sequence, draft in drafts.items()})
        if self._scheduler.can_grow(1):
            return drafts
        self._scheduler.reserve_for({})
        return {}

    def _guesses(self) -> tuple[dict[Sequence, int], int]:
        """How many tokens the device is to guess in each of the next steps, none where there is no room for them, and how many
        steps to launch."""
        decoding, num_steps = self._scheduler.decoding, self._num_steps()
        if not self._awake.guesses_itself or self._scheduler.is_crowded:
            return {}, num_steps
        guesses, few = self._speculation.guesses(decoding, self._awake.most_verified), min(num_steps, GUESSING_STEPS)
        self._scheduler.reserve_for({sequence: few * count for sequence, count in guesses.items()})
        if guesses and self._scheduler.can_grow(few):
            return guesses, few
        self._scheduler.reserve_for({})
        return {}, few if self._speculation.measures_plain(len(decoding)) else num_steps

    def _num_steps(self) -> int:
        """Steps to launch at once: one where prompts queue or somebody looks at every token, else as many as the longest may
        still take."""
        decoding = self._scheduler.decoding
        if self._awake.max_steps == 1 or self._scheduler.is_crowded:
            return 1
        if any(s.streaming == 1 or s.request.sampling.stop for s in decoding):
            return 1
        left = max((int(self._rows.limit_R[s.row] - self._rows.launched_R[s.row]) for s in decoding), default=1)
        piece = min((s.streaming for s in decoding if s.streaming), default=left)
        return max(1, min(self._awake.max_steps, left, piece))

    def _launch(self, plan: Plan) -> None:
        self._awake.prepare(plan)
        self._under_way.enter(plan.admitted)
        self._speculation.begin(plan.admitted)
        self._batch_size = len(plan.decode)
        # A pass with prompts decodes one token of each row: where steps are launched ahead, some may have ended by then.
        is_one_pass = not self._awake.runs_ahead and bool(plan.decode and plan.chunks) and not plan.drafts
        if not is_one_pass and not self._try_decode(plan):
            return
        try:
            self._prefill(plan, plan.decode if is_one_pass else ())
        except torch.OutOfMemoryError as error:
            if is_one_pass and not self._try_decode(plan):
                return
            self._undo_prefills(plan, error)
            if len(plan.chunks) > 1:  # one of them may be too much, and the others not
                self._alone_left, self._scheduler.prompts_at_once = len(plan.chunks), 1
            else:
                self._fail_for_memory([plan.chunks[0].sequence], error)

    def _try_decode(self, plan: Plan) -> bool:
        """Decode, and return whether there was memory for it. Where there was none, the sequences fail, and the prompts of the
        plan wait again."""
        try:
            self._decode(plan)
        except torch.OutOfMemoryError as error:
            self._undo_prefills(plan, error)
            self._fail_for_memory(plan.decode, error)
            return False
        return True

    def _decode(self, plan: Plan) -> None:
        if plan.decode:
            self._decode_steps += plan.num_steps
            self._decoded_rows += plan.num_steps * len(plan.decode)
            with span("engine.decode", device=True, version=self.version):
                if plan.drafts:
                    self._verify(plan)
                    return
                if plan.guesses:
                    self._guess(plan)
                    return
                self._speculation.leave_places()
                rows_B, prefixes = np.array([s.row for s in plan.decode]), None
                if self._awake.reads_prefixes_once:
                    rows_B, prefixes = self._rows.table.side_by_side(rows_B)
                positions_B = self._rows.launched_position_R[rows_B] - 1
                samples = self._awake.decode(rows_B, positions_B, plan.num_steps, wants_of(plan.decode), prefixes)
                self._expect(rows_B, samples, is_first=False)

    def _verify(self, plan: Plan) -> None:
        rows, rows_B = self._rows, np.array([s.row for s in plan.decode])
        drafts = Drafts.of([plan.drafts.get(s, ()) for s in plan.decode])
        samples, counts_B = self._awake.verify(rows_B, rows.launched_position_R[rows_B] - 1, drafts, wants_of(plan.decode))
        accepted_B = counts_B - 1
        rows.launched_position_R[rows_B] += accepted_B  # the scheduler has counted one token of each
        rows.launched_R[rows_B] += accepted_B
        counting_SB = np.arange(counts_B.max())[:, None] < counts_B
        self._in_flight.append(Results(rows_B, rows.epoch_R[rows_B], self.version, False, samples, counting_SB=counting_SB))
        self._speculation.learn(plan.drafts, dict(zip(plan.decode, accepted_B.tolist(), strict=True)))

    def _guess(self, plan: Plan) -> None:
        rows_B = np.array([s.row for s in plan.decode])
        counts_B = np.array([plan.guesses.get(s, 0) for s in plan.decode])
        guesses = Guesses.of(counts_B, self._speculation.writes(plan.decode))
        samples, arrived = self._awake.fetch(self._awake.guess(rows_B, guesses, plan.num_steps, wants_of(plan.decode)))
        self._in_flight.append(
            Results(
                rows_B,
                self._rows.epoch_R[rows_B],
                self.version,
                False,
                samples,
                arrived,
                guesses=guesses,
                most_B=plan.num_steps * guesses.lengths_B,
            )
        )

    def _prefill(self, plan: Plan, decode: Sequence_[Sequence] = ()) -> None:
        """Compute the chunks of a plan, and in the same pass a token of each sequence in `decode`."""
        if not plan.chunks:
            return
        with span("engine.prefill", device=True, version=self.version):
            samplers = [s for c in plan.chunks for s in c.samplers]
            samples = self._awake.prefill(plan.chunks, plan.copies, wants_of([*samplers, *decode]), self._decoding(decode))
            self._prompt_tokens += sum(c.end - c.start for c in plan.chunks)
            if decode and samples is not None:
                self._decode_steps += 1
                self._decoded_rows += len(decode)
                rows_B = np.array([s.row for s in decode])
                self._expect(rows_B, samples.of_rows(len(samplers), None), is_first=False)
            if samplers and samples is not None:
                self._expect(np.array([s.row for s in samplers]), samples.of_rows(0, len(samplers)), is_first=True)
        self._alone_left = max(0, self._alone_left - 1)
        self._scheduler.prompts_at_once = 1 if self._alone_left else None

    def _decoding(self, sequences: Sequence_[Sequence]) -> Decoding | None:
        if not sequences:
            return None
        rows, rows_B = self._rows, np.array([s.row for s in sequences])
        uses_lora = any(s.wants.lora for s in sequences)
        return Decoding(rows_B, rows.launched_position_R[rows_B] - 1, rows.table.of(rows_B), uses_lora)

    def _undo_prefills(self, plan: Plan, error: torch.OutOfMemoryError) -> None:
        """The prompts of a plan wait again, as if they had not been admitted. Raises where other ranks have computed them."""
        if self._ranks is not None:
            raise error
        rows = self._scheduler.undo_prefills(plan)
        self._awake.rows.kill(rows)
        self._under_way.leave(rows)
        if self.decoder.output_weight.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fail_for_memory(self, sequences: Sequence_[Sequence], error: torch.OutOfMemoryError) -> None:
        """Cancel the requests of these sequences; the others go on."""
        for sequence in sequences:
            if sequence.request_id in self._under_way:
                n, first_line = sequence.request.sampling.n, str(error).partition("\n")[0]
                message = f"no memory for a prompt of {sequence.num_prompt} tokens with n = {n}: {first_line}"
                hint = "shorten it, lower n, or leave more memory free (engine.gpu_memory_utilization)"
                self._under_way.fail(sequence, EngineMemoryError(message, hint))

    def _expect(self, rows_B: np.ndarray, samples: Samples, *, is_first: bool) -> None:
        fetched, arrived = self._awake.fetch(samples)
        self._in_flight.append(Results(rows_B, self._rows.epoch_R[rows_B], self.version, is_first, fetched, arrived))

    def _collect(self, keep: int) -> None:
        """Take in results, oldest first, until `keep` of them are left in flight."""
        while len(self._in_flight) > keep:
            with span("engine.collect", version=self.version):
                results = self._in_flight.popleft()
                if results.guesses is not None:
                    results.wait()
                    self._learn(results)
                self._under_way.take_in(results)
                if results.most_B is not None:
                    self._count_launched(results)

    def _learn(self, results: Results) -> None:
        """Before they are taken in, and some of their sequences leave."""
        guesses, tokens_SAB = results.guesses, results.samples.tokens_SB.numpy()
        assert guesses is not None
        tokens_SAB = tokens_SAB.reshape(-1, int(guesses.lengths_B.max()), len(results.rows_B))
        accepted_SB, drafted_SB = (tokens_SAB[:, 1:] >= 0).sum(axis=1), (tokens_SAB[:, 1:] != NO_GUESS).sum(axis=1)
        # Where nothing was found to guess, that is a try too.
        tried_SB = np.minimum(accepted_SB + 1, np.maximum(drafted_SB, 1)) * ((tokens_SAB[:, 0] >= 0) & (guesses.counts_B > 0))
        sequences = self._under_way.at_rows(results.rows_B, results.epochs_B)
        drafted = int(drafted_SB.sum())
        self._speculation.learn_guesses(sequences, accepted_SB.sum(axis=0), tried_SB.sum(axis=0), drafted)

    def _count_launched(self, results: Results) -> None:
        """Some rows have got fewer tokens than they could have."""
        rows = self._rows
        under_way_R = np.zeros_like(rows.sampled_R)
        for later in self._in_flight:
            is_same_B = rows.epoch_R[later.rows_B] == later.epochs_B
            most_B = later.most_B if later.most_B is not None else np.full(len(later.rows_B), len(later.samples.tokens_SB))
            under_way_R[later.rows_B[is_same_B]] += most_B[is_same_B]
        alive_B = results.rows_B[(rows.epoch_R[results.rows_B] == results.epochs_B) & rows.alive_R[results.rows_B]]
        rows.launched_at_most(alive_B, under_way_R[alive_B])

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
        self._under_way.leave_all()
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
            generated_tokens=self._under_way.generated_tokens,
            requests=self._under_way.num_finished,
            adapters=self._adapters.num_resident,
            decode_steps=self._decode_steps,
            decoded_rows=self._decoded_rows,
            kv_blocks_peak_before=self._kv_blocks_peak_before,
            drafted_tokens=self._speculation.counts.drafted_tokens,
            accepted_tokens=self._speculation.counts.accepted_tokens,
            speculation_saved_s=self._speculation.counts.saved_s,
        )

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds besides the network. On the CPU a block of the cache takes memory once it was used."""
        runner = self._runner
        if runner is None:
            return {"kv_cache": 0}
        blocks, whole = runner.cache.blocks, runner.cache.bytes
        used = whole // runner.cache.num_blocks * (1 + self._pool.num_touched)
        return {"kv_cache": used if blocks.device.type == "cpu" else whole}


def _timed(plan: Plan) -> Timed | None:
    """What a step did, where it did nothing but decode."""
    if not plan.decode or plan.chunks:
        return None
    num_rows = len(plan.decode)
    num_drafted = sum(map(len, plan.drafts.values())) + sum(plan.guesses.get(sequence, 0) for sequence in plan.decode)
    return Timed(num_rows, plan.num_steps, num_rows + num_drafted if num_drafted else 0)
