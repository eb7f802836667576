"""Several engines in processes of their own, as one engine.

    submit ──► waiting ──► the engine that has the prompt's beginning cached, else the one with the least to do
    step   ◄── pieces of all engines
                  an engine is lost ──► its requests wait again, and are sampled elsewhere from the same seeds: the same tokens
                                   └──► a thread starts it again, brings it to the current version, and it gets work again

A completion that was delivered is not delivered again, and of a streamed one only what is new. A request that was under way in
two engines as they were lost is suspected: it gets an engine with little company or none. At its third loss, if it was alone in
the engine, it fails with the reason, and its losses no longer count against the engines. An engine that is lost more than
`max_restarts` times ends everything: `step` raises EngineLostError, which says who was lost and why.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from redline.engine.prefix_routes import PrefixMemory, blocks_of
from redline.errors import EngineError, EngineLostError, RedlineError
from redline.ports import SteppedEngine
from redline.telemetry import span
from redline.types import Delta, EngineStats, GenerateRequest, WeightUpdate

Event = tuple[int, Delta | EngineError]
WAIT_S = 0.005
"""Seconds that a step waits for pieces."""
WATCH_S = 0.25
"""Seconds between two looks at whether an engine that has nothing to do is lost."""
MAX_LOSSES = 3
"""Losses of engines that a request may be part of, before one that it is alone in fails it."""
SMALL_COMPANY = 64
"""Up to so many requests are tried one by one after the second loss, more in sixteen parts first."""
LEEWAY = 32
"""Sequences that an engine may have beyond twice the least, and still get a prompt that it has cached."""
MAX_PAUSE_S = 30.0
"""Longest pause before an engine that does not come up is started again."""
_GAUGES = {"running", "waiting", "kv_blocks_used", "kv_blocks_total", "kv_blocks_peak", "kv_blocks_peak_before", "batch_size"}


class Replica(SteppedEngine, Protocol):
    """One of the engines: `engine.remote.client.RemoteEngine`."""

    name: str

    @property
    def limits(self) -> Any: ...

    @property
    def why_lost(self) -> str | None:
        """Why its process is lost; None while it is there."""
        ...

    def check(self, request: GenerateRequest) -> None: ...

    def flush(self) -> None:
        """Send what was submitted since the last step. Raises EngineLostError."""
        ...

    def take(self) -> Sequence[Event]:
        """What has come since the last call. Does not block. Raises EngineLostError once everything was taken."""
        ...

    def sleep(self, *, weights: bool = False) -> Any: ...

    def wake(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(slots=True, frozen=True)
class Recovery:
    """One engine that was lost and came back."""

    name: str
    why: str
    noticed: float
    """When the loss was noticed, in seconds of `time.monotonic`."""
    seconds: float
    """From there until it could take requests again, at the current version."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request until all its completions are delivered."""

    number: int
    request: GenerateRequest
    streaming: bool
    blocks: list[int]
    delivered: set[int] = field(default_factory=set)
    """Indices of completions that are delivered."""
    sent: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that were streamed, by index of the completion."""
    again: dict[int, int] = field(default_factory=dict)
    """Tokens that the engine which has it now has sent, by index."""
    slot: _Slot | None = None
    inner: int = -1
    """Its number in the engine that has it."""
    losses: list[_Slot] = field(default_factory=list)
    company: int | None = None
    """Most requests that may be in an engine together with it, itself included."""

    @property
    def missing(self) -> int:
        return self.request.sampling.n - len(self.delivered)

    def rest(self) -> GenerateRequest:
        """What is to be sampled yet: from the first index that is missing to the last."""
        left = [index for index in self.request.sampling.indices if index not in self.delivered]
        sampling = replace(self.request.sampling, first_index=left[0], n=left[-1] - left[0] + 1)
        return replace(self.request, sampling=sampling)


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of one engine."""

    index: int
    name: str
    engine: Replica | None
    """None while it is lost."""
    fresh: Replica | None = None
    """The engine in its place that is ready to be used."""
    requests: dict[int, _Request] = field(default_factory=dict)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    is_restarting: bool = False
    restarts: int = 0
    before: EngineStats = field(default_factory=lambda: EngineStats(kv_blocks_total=0))
    """The sums of the engines that were lost here."""

    @property
    def load(self) -> int:
        return sum(request.missing for request in self.requests.values())

    def takes(self, request: _Request) -> bool:
        """Whether nobody would have more company than he may."""
        if self.engine is None or self.engine.why_lost is not None:
            return False
        limits = [one.company for one in (request, *self.requests.values()) if one.company is not None]
        return not limits or len(self.requests) < min(limits)


class Replicas:
    """Several engines as one. Implements `ports.SteppedEngine`. Methods are for one thread at a time, but `sampled_tokens` and
    `stats` for any."""

    def __init__(
        self,
        engines: Sequence[Replica],
        restart: Callable[[int], Replica],
        *,
        max_restarts: int,
        arrived: threading.Event,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`restart(index)` ends what is left of an engine, starts it again, brings it to the current version and returns it; it
        blocks, and is called in a thread of its own. `arrived` is set by every engine when something has come. `tell` gets a
        sentence about each loss and recovery."""
        assert engines, "at least one engine"
        self._slots = [_Slot(index, engine.name, engine) for index, engine in enumerate(engines)]
        self._restart, self._max_restarts, self._tell = restart, max_restarts, tell
        self._arrived = arrived
        self.limits = engines[0].limits
        """What a request must satisfy; the same in all of them."""
        self._checks = engines[0]
        self._numbers = itertools.count()
        self._open: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._failed: list[Event] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._end: EngineLostError | None = None
        self.recoveries: list[Recovery] = []
        """Every engine that was lost and came back, oldest first."""
        self._threads = ThreadPoolExecutor(len(engines), "replicas")
        threading.Thread(target=self._watch, name="replicas-watch", daemon=True).start()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raises EngineError where it cannot be served as asked."""
        self._checks.check(request)

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        """Hand a request to one of the engines, or queue it while none can take it, and return its number. Raises EngineError
        where it cannot be served as asked."""
        self.check(request)
        known = _Request(next(self._numbers), request, streaming, blocks_of(request))
        self._open[known.number] = known
        self._waiting.append(known)
        self._place_waiting()
        return known.number

    def abort(self, request_id: int) -> None:
        """End a request; nothing more of it comes. Unknown and finished ones are ignored."""
        known = self._open.get(request_id)
        if known is not None:
            self._forget(known, aborts=True)
            self._place_waiting()

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it has so far; none where its engine was lost."""
        known = self._open.get(request_id)
        engine = known.slot.engine if known is not None and known.slot is not None else None
        return engine.sampled_tokens(known.inner) if known is not None and engine is not None else {}

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._failed or self._end is not None)

    def step(self) -> list[Event]:
        """Return what has come from all engines; wait for it for a moment where nothing has. Raises EngineLostError where an
        engine was lost more often than it may be."""
        self._flush()
        with span("engine.remote"):
            self._arrived.wait(WAIT_S)
        self._arrived.clear()
        events: list[Event] = []
        for slot in self._slots:
            events += self._taken(slot)
            self._take_in(slot)
        self._place_waiting()
        self._flush()
        events, self._failed = events + self._failed, []
        if self._end is not None and not events:
            raise self._end
        return events

    def _flush(self) -> None:
        for slot in self._slots:
            if slot.engine is not None:
                with suppress(EngineLostError):  # `take` says so too, once everything that came before was taken
                    slot.engine.flush()

    def _taken(self, slot: _Slot) -> list[Event]:
        if slot.engine is None:
            return []
        try:
            return [event for inner, piece in slot.engine.take() for event in self._delivered(slot, inner, piece)]
        except EngineLostError as error:
            self._lose(slot, error.message)
            return []

    def _delivered(self, slot: _Slot, inner: int, piece: Delta | EngineError) -> list[Event]:
        """The piece as its caller gets it: nothing that was delivered before."""
        known = slot.requests.get(inner)
        if known is None or (isinstance(piece, Delta) and piece.index in known.delivered):
            return []
        if isinstance(piece, EngineError):
            self._forget(known)
            return [(known.number, piece)]
        new = _only_new(known, piece) if known.streaming else piece
        if isinstance(new, EngineError):
            self._forget(known, aborts=True)
            return [(known.number, new)]
        if new is None:
            return []
        if new.completion is not None:
            known.delivered.add(new.index)
            if not known.missing:
                self._forget(known, aborts=bool(known.losses))
        return [(known.number, new)]

    # ── who gets it ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place_waiting(self) -> None:
        """Hand every request that waits to an engine, where one can take it. Suspected ones come first: an engine that has
        others is kept free of new ones until it can take them."""
        reserved: set[int] = set()
        left: deque[_Request] = deque()
        for known in sorted(self._waiting, key=lambda one: one.company is None):
            slot = self._choose(known, reserved)
            if slot is None:
                if known.company is not None and not reserved:
                    reserved = self._least_crowded()
                left.append(known)
            elif not self._hand_over(known, slot):
                left.append(known)
        self._waiting = left

    def _choose(self, known: _Request, reserved: set[int]) -> _Slot | None:
        free = [slot for slot in self._slots if slot.takes(known) and (known.company or slot.index not in reserved)]
        if not free or known.company is not None:
            return min(free, key=lambda slot: len(slot.requests), default=None)
        least = min(slot.load for slot in free)
        cached = max(free, key=lambda slot: (slot.prefixes.num_known(known.blocks), -slot.load))
        # Half of the prompt: what all prompts begin with is soon in every cache.
        has_half = bool(known.blocks) and 2 * cached.prefixes.num_known(known.blocks) >= len(known.blocks)
        if has_half and cached.load <= 2 * least + LEEWAY:
            return cached
        return min(free, key=lambda slot: slot.load)

    def _least_crowded(self) -> set[int]:
        alive = [slot for slot in self._slots if slot.engine is not None]
        return {min(alive, key=lambda slot: len(slot.requests)).index} if alive else set()

    def _hand_over(self, known: _Request, slot: _Slot) -> bool:
        """False where the engine turns out to be lost."""
        assert slot.engine is not None
        try:
            inner = slot.engine.submit(known.rest(), streaming=known.streaming)
        except EngineLostError:
            return False  # the next `take` says so too, once everything that came before was taken
        except EngineError as error:
            self._forget(known)
            self._failed.append((known.number, error))
            return True
        known.slot, known.inner = slot, inner
        known.again.clear()
        slot.requests[inner] = known
        slot.prefixes.add(known.blocks)
        return True

    def _forget(self, known: _Request, *, aborts: bool = False) -> None:
        self._open.pop(known.number, None)
        if known in self._waiting:
            self._waiting.remove(known)
        slot, known.slot = known.slot, None
        if slot is not None:
            slot.requests.pop(known.inner, None)
            if aborts and slot.engine is not None:
                with suppress(EngineLostError):
                    slot.engine.abort(known.inner)

    # ── between two steps ──────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on. Blocks until every engine has noted it; one that is lost has it when it is
        back."""
        self._on_all(lambda engine: engine.apply(update))
        self._forget_prefixes()

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before."""
        self._on_all(lambda engine: engine.reset_prefix_cache())
        self._forget_prefixes()

    def sleep(self, *, weights: bool = False) -> None:
        """Have every engine give up its KV cache, and its weights where asked."""
        self._on_all(lambda engine: engine.sleep(weights=weights))
        self._forget_prefixes()

    def wake(self) -> None:
        """Have every engine take back what it gave up."""
        self._on_all(lambda engine: engine.wake())

    def memory(self) -> dict[str, int]:
        """Nothing: what the engines hold is in other processes."""
        return {}

    def _on_all(self, action: Callable[[Replica], Any]) -> None:
        """Call it for all engines at once. One that is lost meanwhile is started again as always."""

        def act(engine: Replica) -> None:
            with suppress(EngineLostError):
                action(engine)

        engines = [engine for slot in self._slots for engine in (slot.engine, slot.fresh) if engine is not None]
        for done in [self._threads.submit(act, engine) for engine in engines]:
            done.result()

    def _forget_prefixes(self) -> None:
        for slot in self._slots:
            slot.prefixes.clear()

    @property
    def stats(self) -> EngineStats:
        """The sum over all engines, with those that were lost."""
        parts = [engine.stats for engine in [slot.engine for slot in self._slots] if engine is not None]
        total = _summed([*parts, *(slot.before for slot in self._slots)])
        version = min((part.version for part in parts), default=0)
        return replace(total, version=version, kv_blocks_total=max(1, total.kv_blocks_total))

    # ── loss and return ────────────────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, slot: _Slot, why: str) -> None:
        """Have the requests of a lost engine wait for another, and start it again."""
        engine, slot.engine = slot.engine, None
        assert engine is not None
        slot.before = _summed([slot.before, replace(engine.stats, **dict.fromkeys(_GAUGES, 0))])
        slot.prefixes.clear()
        lost, slot.requests = list(slot.requests.values()), {}
        for known in lost:
            known.slot = None
            known.losses.append(slot)
            if len(known.losses) >= MAX_LOSSES and len(lost) == 1:
                self._fail(known, why)
                continue
            if len(known.losses) >= 2:
                known.company = 1 if len(lost) <= SMALL_COMPANY else len(lost) // 16
            self._waiting.append(known)
        self._begin_restart(slot, why)

    def _fail(self, known: _Request, why: str) -> None:
        self._forget(known)
        for slot in known.losses:
            slot.restarts = max(0, slot.restarts - 1)
        message = f"{len(known.losses)} engines were lost while they had this request, the last with no other: {why}"
        self._failed.append((known.number, EngineError(message, "leave its prompt out, and tell us of it")))

    def _watch(self) -> None:
        """Notice the loss of an engine that nobody steps."""
        while not self._closed.wait(WATCH_S):
            for slot in self._slots:
                engine = slot.engine
                if engine is not None and engine.why_lost is not None:
                    self._begin_restart(slot, f"{engine.name} is lost: {engine.why_lost}")

    def _begin_restart(self, slot: _Slot, why: str) -> None:
        with self._lock:
            if slot.is_restarting or self._closed.is_set():
                return
            slot.is_restarting = True
        arguments = (slot, why, time.monotonic())
        threading.Thread(target=self._bring_back, args=arguments, name=f"{slot.name} restart", daemon=True).start()

    def _bring_back(self, slot: _Slot, why: str, noticed: float) -> None:
        """Start an engine again until it is there, or was started as often as it may be."""
        self._tell(f"{why}; it is started again")
        for attempt in itertools.count():
            slot.restarts += 1
            if slot.restarts > self._max_restarts:
                times = f"it was started again {self._max_restarts} times" if self._max_restarts else "it is not started again"
                self._end = EngineLostError(f"{why}; {times}", "mend the reason, or raise placement.max_restarts")
                self._arrived.set()
                return
            if self._closed.wait(min(MAX_PAUSE_S, 2.0**attempt - 1)):
                return
            try:
                engine = self._restart(slot.index)
            except Exception as error:  # whatever it is, waiting for ever would not mend it
                why = error.message if isinstance(error, RedlineError) else f"{slot.name}: {type(error).__name__}: {error}"
                continue
            recovery = Recovery(slot.name, why, noticed, time.monotonic() - noticed)
            self._returned(slot, engine, recovery)
            return

    def _returned(self, slot: _Slot, engine: Replica, recovery: Recovery) -> None:
        with self._lock:
            if self._closed.is_set():
                engine.close()
                return
            slot.fresh = engine
            self.recoveries.append(recovery)
        self._tell(f"{slot.name} is back after {recovery.seconds:.1f} s")
        self._arrived.set()

    def _take_in(self, slot: _Slot) -> None:
        """Give work to an engine that has come back."""
        with self._lock:
            if slot.fresh is not None and slot.engine is None:
                slot.engine, slot.fresh, slot.is_restarting = slot.fresh, None, False

    def close(self) -> None:
        """End the connections to all engines. The processes end by themselves."""
        with self._lock:
            self._closed.set()
            engines = [engine for slot in self._slots for engine in (slot.engine, slot.fresh) if engine is not None]
        for engine in engines:
            engine.close()
        self._threads.shutdown(wait=False)


def _only_new(known: _Request, piece: Delta) -> Delta | EngineError | None:
    """What of a streamed piece was not streamed before another engine was lost; None where that is nothing."""
    sent = known.sent.setdefault(piece.index, [])
    begin, tokens = known.again.get(piece.index, 0), piece.token_ids.tolist()
    known.again[piece.index] = begin + len(tokens)
    old = max(0, min(len(sent) - begin, len(tokens)))
    if tokens[:old] != sent[begin : begin + old]:
        why = "the engine that had begun to stream it was lost, and the weights have changed since"
        return EngineError(why, "ask again")
    sent += tokens[old:]
    if old == len(tokens) and old and piece.completion is None:
        return None
    top = piece.top_logprobs
    if top is not None:
        top = replace(top, token_ids=top.token_ids[old:], logprobs=top.logprobs[old:])
    return replace(piece, token_ids=piece.token_ids[old:], logprobs=piece.logprobs[old:], top_logprobs=top)


def _summed(parts: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(**{one.name: sum(getattr(part, one.name) for part in parts) for one in fields(EngineStats)})
