"""The engine for many callers at once: one thread steps it, any event loop may submit, stream and abort.

event loop ──submit, abort──► inbox ──► the thread: engine.step() ──► each caller's own queue
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from redline.engine.native.engine import Event
from redline.engine.stats import EngineStats
from redline.errors import EngineError, RedlineError, boundary
from redline.types import Completion, Delta, GenerateRequest

WATCH_S = 0.25
"""Between two looks at whether the engine is broken."""
GRACE_S = 2.0
"""For a step to notice by itself what broke it."""
PATIENCE_S = 30.0
"""For the last step, once the engine is asked to stop."""


@dataclass(slots=True, eq=False)
class _Call:
    """One caller and where its pieces go."""

    request: GenerateRequest
    streaming: bool
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    request_id: int = -1
    missing: int = 0
    """Completions not delivered yet."""

    def __post_init__(self) -> None:
        self.missing = self.request.sampling.n

    def deliver(self, *pieces: Delta | Exception) -> None:
        """From any thread."""
        _call_soon(self.loop, _put_all, [(self, piece) for piece in pieces])


class SteppedEngine(Protocol):
    """An engine that advances when it is told to: `NativeEngine`, `TransformersEngine`."""

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def step(self) -> list[Event]: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def stats(self) -> EngineStats: ...


class AsyncEngine:
    """Owns the engine while it runs: nobody else may step it."""

    def __init__(self, engine: SteppedEngine, why_broken: Callable[[], str | None] | None = None) -> None:
        """`why_broken` says why the engine can never end its step, such as a process that it needs and that has died; it is
        asked by another thread, all the time."""
        self._engine = engine
        self._why_broken = why_broken
        self._step_began: float | None = None
        self._inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._calls: dict[int, _Call] = {}
        self._thread = threading.Thread(target=self._run, name="redline-engine", daemon=True)
        self._stopping = False
        self._is_open = False
        self._door = threading.Lock()
        """Held to put an order into the inbox and to close it, so that none is left lying there."""
        self._stats = engine.stats
        self.failure: BaseException | None = None
        """Why the thread ended, where it was not asked to."""

    def __enter__(self) -> Self:
        self._is_open = True
        self._thread.start()
        if self._why_broken is not None:
            threading.Thread(target=self._watch, name="redline-engine-watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Abort what is under way and end the thread. Blocks until its step has ended, or for `PATIENCE_S`: a step that never
        ends is left behind."""
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S if self.failure is None else 0)

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        return self._is_open and not self._stopping

    @property
    def step_s(self) -> float:
        """Seconds that the step under way has lasted; 0 between two steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    async def complete(self, request: GenerateRequest) -> list[Completion]:
        """All n completions. Cancelling it aborts the request."""
        found: dict[int, Completion] = {}
        async for delta in self._pieces(request, streaming=False):
            if delta.completion is not None:
                found[delta.index] = delta.completion
        return [found[index] for index in sorted(found)]

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Pieces of all n completions as they are sampled. Closing it aborts the request."""
        return self._pieces(request, streaming=True)

    async def run(self, action: Callable[[Any], Any]) -> Any:
        """Do something to the engine between two of its steps: load an adapter, apply an update."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def act() -> None:
            result = None
            with boundary() as caught:
                result = action(self._engine)
            _call_soon(loop, _settle, done, result, caught.error)

        self._order(act)
        return await done

    async def _pieces(self, request: GenerateRequest, *, streaming: bool) -> AsyncGenerator[Delta]:
        call = _Call(request, streaming, asyncio.get_running_loop())
        self._order(lambda: self._submit(call))
        missing = request.sampling.n
        try:
            while missing:
                piece = await call.pieces.get()
                if isinstance(piece, Exception):
                    missing = 0
                    raise piece
                missing -= piece.completion is not None
                yield piece
        finally:
            if missing:
                with suppress(EngineError):  # it has stopped: there is nothing to abort
                    self._order(lambda: self._abort(call))

    def _order(self, order: Callable[[], Any]) -> None:
        """Have the thread do something between two steps. It does whatever it has not refused."""
        with self._door:
            if not self._is_open:
                raise EngineError(f"the engine has stopped: {self.failure or 'it was asked to'}", "start it again")
            self._inbox.put(order)

    # ── on the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        with boundary() as caught:
            while not self._stopping:
                self._take_orders()
                self._deliver_all(self._step())
        with self._door:
            self.failure = self.failure or caught.error
            self._is_open = False
        self._take_last_orders()
        self._tell_all()

    def _step(self) -> list[Event]:
        if not self._engine.has_work:
            return []
        self._step_began = time.monotonic()
        events = self._engine.step()
        self._stats = self._engine.stats
        self._step_began = None
        return events

    def _tell_all(self) -> None:
        """The engine has ended: whoever waits for it hears why."""
        reason = f"the engine has stopped: {_on_one_line(self.failure)}" if self.failure else "the engine was stopped"
        for call in list(self._calls.values()):
            call.deliver(EngineError(reason, "start it again"))

    # ── on the watching thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        """Give up on a step that can never end: the thread that waits for it is left where it is."""
        assert self._why_broken is not None
        while self._is_open:
            reason = self._why_broken()
            if reason is not None:
                self._thread.join(GRACE_S)  # it may hear of it by itself, and say more
                with self._door:
                    self.failure = self.failure or EngineError(reason)
                    self._is_open, self._stopping = False, True
                self._tell_all()
            time.sleep(WATCH_S)

    # ── on the thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_orders(self) -> None:
        """All that have come; with nothing to compute, wait for one."""
        if not self._engine.has_work and not self._stopping:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _take_last_orders(self) -> None:
        """Nobody is left waiting, even where what ended the loop left the engine in no state to be asked anything."""
        while not self._inbox.empty():
            with boundary():
                self._inbox.get()()
        for request_id in self._calls:
            with boundary():
                self._engine.abort(request_id)

    def _submit(self, call: _Call) -> None:
        with boundary() as caught:
            call.request_id = self._engine.submit(call.request, streaming=call.streaming)
            self._calls[call.request_id] = call
        if caught.error is not None:
            call.deliver(caught.error)

    def _abort(self, call: _Call) -> None:
        if self._calls.pop(call.request_id, None) is not None:
            self._engine.abort(call.request_id)

    def _deliver_all(self, events: list[Event]) -> None:
        """One message to each event loop: to wake it for each of a thousand pieces would keep it from everything else."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Delta | Exception]]] = {}
        for request_id, piece in events:
            call = self._calls.get(request_id)
            if call is None:
                continue
            by_loop.setdefault(call.loop, []).append((call, piece))
            call.missing -= isinstance(piece, EngineError) or piece.completion is not None
            if isinstance(piece, EngineError) or call.missing == 0:
                del self._calls[request_id]
        for loop, pieces in by_loop.items():
            _call_soon(loop, _put_all, pieces)


def _put_all(pieces: list[tuple[_Call, Delta | Exception]]) -> None:
    """On the event loop."""
    for call, piece in pieces:
        call.pieces.put_nowait(piece)


def _on_one_line(error: BaseException) -> str:
    return error.message if isinstance(error, RedlineError) else str(error)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *arguments: Any) -> None:
    """On the caller's loop, from the engine's thread. A caller whose loop is closed has no use for it."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Unless the caller has stopped waiting."""
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
