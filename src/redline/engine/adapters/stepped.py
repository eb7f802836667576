"""One adapter that makes a `ports.SteppedEngine` of an engine of others.

Completions are calls of their own there: a request for n of them is n calls, each with a seed of its own. A subclass says how a
call begins, what one step brings and how a call is cancelled:

    submit(request) ──► begin(call) × n          step() ──► advance() ──► (call, Tokens | Completion | EngineError)
    abort(request)  ──► cancel(calls)

An engine that steps by itself (vLLM) brings every call forward by a token; one that answers calls (a server) waits a moment for
answers; one that only has `generate(requests)` (SGLang) samples all that waits, whole, in one step.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from redline.engine.adapters.scoring import check_room
from redline.engine.native.admission import Limits, check_request
from redline.engine.stats import Rate
from redline.errors import EngineError
from redline.types import Completion, Delta, EngineStats, GenerateRequest, TopLogprobs, VersionSpan, WeightUpdate

Event = tuple[int, Delta | EngineError]


@dataclass(slots=True, eq=False)
class Call:
    """One completion in the making."""

    request_id: int
    index: int
    request: GenerateRequest
    streaming: int
    version: int
    """The engine's when the call began."""
    began: float
    """On the monotonic clock."""
    num_tokens: int = 0
    """Sampled so far, as far as the engine has said."""
    num_streamed: int = 0
    switches: list[tuple[int, int]] = field(default_factory=list)
    """As `Completion.switches`, where the engine says how many tokens there are."""


@dataclass(slots=True, frozen=True)
class Tokens:
    """What a step added to a call that goes on."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_logprobs: TopLogprobs | None = None


Came = Tokens | Completion | EngineError


class SteppedAdapter(ABC):
    """Implements `ports.Engine` and `ports.SteppedEngine`."""

    tells_progress = False
    """Whether `advance` returns the tokens of calls that go on."""

    def __init__(self, limits: Limits, max_num_seqs: int, adapters: Collection[str] = ()) -> None:
        self.version = 0
        self.limits = limits
        self._max_num_seqs = max_num_seqs
        self.adapters = adapters
        self._ids = itertools.count()
        self._open: dict[int, list[Call]] = {}
        """Calls under way, by the number of their request."""
        self._steps = self._num_prompt = self._num_cached = self._num_generated = self._num_finished = 0
        self._decode_steps = self._decoded_rows = self._batch_size = self._peak = self._peak_before = 0
        self._rate = Rate()
        self._why_stopped: str | None = None

    # ── what an engine of others does ──────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def begin(self, call: Call) -> None:
        """Queue a call. Does not wait for it. Raises EngineError where the engine refuses it."""

    @abstractmethod
    def advance(self) -> Iterable[tuple[Call, Came]]:
        """Return what came of calls that are under way. Blocks for one step at most; there may be nothing."""

    @abstractmethod
    def cancel(self, calls: Sequence[Call]) -> None:
        """Bring these forward no longer; nothing more comes of them."""

    def prepare(self, request: GenerateRequest) -> None:  # noqa: B027 - most need nothing
        """Make sure that the engine can do what the request asks; may ask the engine, and raises EngineError."""

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raise EngineError for a request that cannot be served as asked."""
        check_request(request, self.limits, self.adapters)
        check_room(request, self.limits.max_len)

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Queue a request and return its number. Raises EngineError where it cannot be served as asked."""
        self.check(request)
        self.prepare(request)
        request_id, now = next(self._ids), time.monotonic()
        self._open[request_id] = []
        for index in request.sampling.indices:
            call = Call(request_id, index, request, streaming, self.version, now)
            try:
                self.begin(call)
            except EngineError:
                self.abort(request_id)
                raise
            self._open[request_id].append(call)
        self._peak = max(self._peak, self._num_open)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request: nothing more comes of it. Unknown and finished ones are ignored."""
        if request_id not in self._open:
            return
        self.cancel(self._open.pop(request_id))
        self._num_finished += 1

    def end(self, request_id: int, index: int) -> None:  # noqa: B027 - not all can
        """Does nothing, where an engine cannot do more: the call goes on to its end."""

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        """Index of each completion that is not finished → tokens it has so far, as far as known. Any thread may ask."""
        return {call.index: call.num_tokens for call in list(self._open.get(request_id, ()))}

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked. The first that fails ends the call. Blocks."""
        for request in requests:
            self.check(request)
        found: dict[tuple[int, int], Completion] = {}
        order: list[int] = []
        try:
            for request in requests:
                order.append(self.submit(request))
            while any(number in self._open for number in order):
                for number, event in self.step():
                    if isinstance(event, EngineError):
                        raise event
                    if event.completion is not None:
                        found[number, event.index] = event.completion
        finally:
            for number in order:
                self.abort(number)
        return [[found[number, i] for i in r.sampling.indices] for number, r in zip(order, requests, strict=True)]

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def _num_open(self) -> int:
        return sum(map(len, list(self._open.values())))

    def stop_sampling(self, reason: str) -> None:
        """Raise an error with this reason in every later step."""
        self._why_stopped = reason

    def step(self) -> list[Event]:
        """Let the engine advance, and return what came of it."""
        if self._why_stopped is not None:
            raise EngineError(f"the engine samples no more: {self._why_stopped}", "start the run again; it resumes")
        self._steps += 1
        self._batch_size = min(self._max_num_seqs, self._num_open)
        events: list[Event] = []
        before = self._num_generated
        for call, came in self.advance():
            if call in self._open.get(call.request_id, ()):  # else it was aborted meanwhile
                events.append((call.request_id, self._take(call, came)))
        if self._num_generated > before:
            self._decode_steps, self._decoded_rows = self._decode_steps + 1, self._decoded_rows + self._batch_size
        self._rate.add(time.perf_counter(), self._num_generated)
        return [event for event in events if isinstance(event[1], EngineError) or _says_something(event[1])]

    def _take(self, call: Call, came: Came) -> Delta | EngineError:
        if isinstance(came, EngineError):
            self.abort(call.request_id)
            return came
        if isinstance(came, Tokens):
            self._count(call, call.num_tokens + len(came.token_ids))
            if not call.streaming:
                return _piece(call, came, slice(0, 0))
            call.num_streamed = call.num_tokens
            return _piece(call, came, slice(None))
        return self._finish(call, came)

    def _finish(self, call: Call, completion: Completion) -> Delta:
        self._count(call, len(completion.token_ids))
        completion = replace(completion, switches=tuple(switch for switch in call.switches if switch[0] < call.num_tokens))
        self._num_prompt += len(call.request.prompt_ids)
        self._num_cached += completion.cached_tokens
        siblings = self._open[call.request_id]
        siblings.remove(call)
        if not siblings:
            del self._open[call.request_id]
            self._num_finished += 1
        left = slice(call.num_streamed, None) if call.streaming else slice(0, 0)
        whole = Tokens(completion.token_ids, completion.logprobs, completion.top_logprobs)
        return _piece(call, whole, left, completion)

    def _count(self, call: Call, num_tokens: int) -> None:
        self._num_generated += num_tokens - call.num_tokens
        call.num_tokens = num_tokens

    def versions_of(self, call: Call) -> VersionSpan:
        """The versions that a call which ends now was sampled under."""
        return VersionSpan(call.version, self.version)

    # ── weights, statistics ────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on."""
        if self.tells_progress and update.version != self.version:
            for call in itertools.chain(*self._open.values()):
                call.switches.append((call.num_tokens, update.version))
        self.version = update.version
        self._peak_before, self._peak = self._peak, self._num_open

    def reset_prefix_cache(self) -> None:  # noqa: B027 - some have none, or none of ours
        """Find no prompt again that was computed before, where the engine can be told so."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """Let go of what the engine has started. Does not wait for calls under way."""

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds in this process besides the network, as far as known."""
        return {}

    @property
    def stats(self) -> EngineStats:
        """A call counts as a block of its cache: what the engine's own cache holds is not known here."""
        num_open = self._num_open
        running = min(num_open, self._max_num_seqs)
        return EngineStats(
            running=running,
            waiting=num_open - running,
            kv_blocks_used=running,
            kv_blocks_total=self._max_num_seqs,
            kv_blocks_peak=min(self._peak, self._max_num_seqs),
            batch_size=self._batch_size,
            tokens_per_s=self._rate.per_s,
            version=self.version,
            steps=self._steps,
            prefix_query_tokens=self._num_prompt,
            prefix_hit_tokens=self._num_cached,
            prompt_tokens=self._num_prompt - self._num_cached,
            generated_tokens=self._num_generated,
            requests=self._num_finished,
            decode_steps=self._decode_steps,
            decoded_rows=self._decoded_rows,
            kv_blocks_peak_before=min(self._peak_before, self._max_num_seqs),
        )


def _piece(call: Call, tokens: Tokens, part: slice, completion: Completion | None = None) -> Delta:
    top = tokens.top_logprobs
    tops = None if top is None else TopLogprobs(top.token_ids[part], top.logprobs[part])
    return Delta(call.index, tokens.token_ids[part], tokens.logprobs[part], tops, completion)


def _says_something(piece: Delta) -> bool:
    return piece.completion is not None or len(piece.token_ids) > 0
