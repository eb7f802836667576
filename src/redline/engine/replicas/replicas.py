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
from typing import Any

from redline.engine.native.admission import smallest
from redline.engine.prefix_routes import blocks_of
from redline.engine.replicas.open_requests import OpenRequest
from redline.engine.replicas.restarts import Recovery, RestartRule, Restarts
from redline.engine.replicas.routing import choose, least_crowded
from redline.engine.replicas.slots import Event, Replica, Slot, engines_of, stats_of
from redline.errors import EngineError, EngineLostError
from redline.telemetry import span
from redline.types import Delta, EngineStats, GenerateRequest, WeightUpdate

WAIT_S = 0.005
"""Seconds that a step waits for pieces."""
STILL_S = 3.0
"""Seconds without a step of any engine after which it is waited for; they tell of their steps twice a second."""
MAX_LOSSES = 3
"""Losses of engines that a request may be part of, before one that it is alone in fails it."""
SMALL_COMPANY = 64
"""Up to so many requests are tried one by one after the second loss, more in sixteen parts first."""


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
        self._slots = [Slot(index, engine.name, engine) for index, engine in enumerate(engines)]
        self._arrived = arrived
        self._restarts = Restarts(self._slots, RestartRule(restart, max_restarts, tell), arrived)
        self.limits: Any = smallest([engine.limits for engine in engines])
        """What a request must satisfy to be served by every one of them: which of them gets it decides nothing."""
        self._first = engines[0]
        self._numbers = itertools.count()
        self._open: dict[int, OpenRequest] = {}
        self._waiting: deque[OpenRequest] = deque()
        self._failed: list[Event] = []
        self._steps, self._moved = 0, time.monotonic()
        self._threads = ThreadPoolExecutor(len(engines), "replicas")

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """Every engine that was lost and came back, oldest first."""
        return self._restarts.recoveries

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raises EngineError where one of the engines cannot serve it as asked."""
        there = engines_of(self._slots) or [self._first]
        for engine in {engine.limits: engine for engine in there}.values():  # most have the same
            engine.check(request)

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Hand a request to an engine, or queue it while none can take it, and return its number. Raises EngineError."""
        self.check(request)
        known = OpenRequest(next(self._numbers), request, streaming, blocks_of(request))
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

    def end(self, request_id: int, index: int) -> None:
        """Have the engine end one completion of a request; what it has comes as ever. Ignored once an engine was lost that had
        the request: the caller has not seen what the next one samples."""
        known = self._open.get(request_id)
        if known is not None and not known.losses and known.slot is not None and known.slot.engine is not None:
            with suppress(EngineLostError):
                known.slot.engine.end(known.inner, index)

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it has so far; none where its engine was lost."""
        known = self._open.get(request_id)
        engine = known.slot.engine if known is not None and known.slot is not None else None
        return engine.sampled_tokens(known.inner) if known is not None and engine is not None else {}

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._failed or self._restarts.end is not None)

    def step(self) -> list[Event]:
        """Return what has come from all engines; wait for it for a moment where nothing has. Raises EngineLostError where an
        engine was lost more often than it may be."""
        self._flush()
        with span("engine.remote" if self._moves() else "wait.for_engines"):
            self._arrived.wait(WAIT_S)
        self._arrived.clear()
        events: list[Event] = []
        for slot in self._slots:
            events += self._taken(slot)
            self._restarts.take_in(slot)
        self._place_waiting()
        self._flush()
        events, self._failed = events + self._failed, []
        if self._restarts.end is not None and not events:
            raise self._restarts.end
        return events

    def _moves(self) -> bool:
        """Whether an engine has taken a step lately, as far as it has said: a watch for stalls must see where none has."""
        steps, now = sum(engine.stats.steps for engine in engines_of(self._slots)), time.monotonic()
        if steps != self._steps:
            self._steps, self._moved = steps, now
        return now - self._moved < STILL_S

    def _flush(self) -> None:
        for slot in self._slots:
            if slot.engine is not None:
                with suppress(EngineLostError):  # `take` says so too, once everything that came before was taken
                    slot.engine.flush()

    def _taken(self, slot: Slot) -> list[Event]:
        if slot.engine is None:
            return []
        try:
            return [event for inner, piece in slot.engine.take() for event in self._delivered(slot, inner, piece)]
        except EngineLostError as error:
            self._lose(slot, error.message)
            return []

    def _delivered(self, slot: Slot, inner: int, piece: Delta | EngineError) -> list[Event]:
        """The piece as its caller gets it: nothing that was delivered before."""
        known = slot.requests.get(inner)
        if known is None or (isinstance(piece, Delta) and piece.index in known.delivered):
            return []
        if isinstance(piece, EngineError):
            self._forget(known)
            return [(known.number, piece)]
        new = known.only_new(piece) if known.streaming else piece
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
        left: deque[OpenRequest] = deque()
        for known in sorted(self._waiting, key=lambda one: one.company is None):
            slot = choose(self._slots, known, reserved)
            if slot is None:
                if known.company is not None and not reserved:
                    reserved = least_crowded(self._slots)
                left.append(known)
            elif not self._hand_over(known, slot):
                left.append(known)
        self._waiting = left

    def _hand_over(self, known: OpenRequest, slot: Slot) -> bool:
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

    def _forget(self, known: OpenRequest, *, aborts: bool = False) -> None:
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

        for done in [self._threads.submit(act, engine) for engine in engines_of(self._slots)]:
            done.result()

    def _forget_prefixes(self) -> None:
        for slot in self._slots:
            slot.prefixes.clear()

    @property
    def stats(self) -> EngineStats:
        """The sum over all engines, with those that were lost."""
        return stats_of(self._slots)

    def unanswered(self) -> dict[str, float]:
        """What each engine was asked and has not answered, in words → seconds since. Does not block."""
        engines, now = engines_of(self._slots), time.monotonic()
        begun = {slot.name: slot.restarting_since for slot in self._slots}
        return {f"{engine.name}: {what}": since_s for engine in engines for what, since_s in engine.unanswered().items()} | {
            f"{name}: seconds since it is started again": now - at for name, at in begun.items() if at is not None
        }

    def stacks(self) -> dict[str, Sequence[str]]:
        """Engine → where its process was at its last sign of life, of those whose step lasts long. Does not block."""
        return {engine.name: stack for engine in engines_of(self._slots) if (stack := engine.stack())}

    # ── loss and return ────────────────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, slot: Slot, why: str) -> None:
        """Have the requests of a lost engine wait for another, and start it again."""
        lost = slot.empty()
        for known in lost:
            known.slot = None
            known.losses.append(slot)
            if known.streaming > 1:  # under newer weights another engine may sample otherwise: the whole tells
                known.streaming = 0
            if len(known.losses) >= MAX_LOSSES and len(lost) == 1:
                self._fail(known, why)
                continue
            if len(known.losses) >= 2:
                known.company = 1 if len(lost) <= SMALL_COMPANY else len(lost) // 16
            self._waiting.append(known)
        self._restarts.begin(slot, why)

    def _fail(self, known: OpenRequest, why: str) -> None:
        self._forget(known)
        for slot in known.losses:
            slot.restarts = max(0, slot.restarts - 1)
        message = f"{len(known.losses)} engines were lost while they had this request, the last with no other: {why}"
        self._failed.append((known.number, EngineError(message, "leave its prompt out, and tell us of it")))

    def close(self) -> None:
        """End the connections to all engines. The processes end by themselves."""
        self._restarts.close()
        self._threads.shutdown(wait=False)
