"""One owner of an engine: requests come from any thread, and one thread at a time steps it.

    submit, abort, between_steps ──► inbox ──► the stepping thread: engine.step() ──► each receiver, once a step
    hold ───────────────────────────┤ between two steps ├────────────────────────────── resume

A session that was started has a thread of its own that steps the engine whenever it has work: serve, and rollouts beside the
trainer. A session that was not started is stepped by its caller with `step_until`: lockstep. Either way the rules are the same:

- `hold` stops the engine between two steps, with its sequences where they are, and gives it to the calling thread. That thread
  may then write the weights, `apply` an update, or `step_until` its own requests are answered (an evaluation).
- Whenever an engine with a thread of its own changes hands, the device first finishes all it was given: the two threads launch
  on streams of their own, and nothing else orders them.
- What ends the stepping thread reaches every receiver that still waits, and every later call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from redline.engine.requests import Answers, Requests
from redline.engine.streams import LoopReceivers, pieces
from redline.errors import EngineError, RedlineError, boundary
from redline.ports import Receiver, SteppedEngine
from redline.telemetry import span
from redline.telemetry.workers import forget_worker, watch_worker
from redline.types import Completion, Delta, EngineStats, GenerateRequest, WeightUpdate

WATCH_S = 0.25
"""Seconds between two looks at whether the engine is broken."""
GRACE_S = 2.0
"""Seconds in which a step may notice by itself what broke it."""
PATIENCE_S = 30.0
"""Seconds that `close` waits for the last step."""
FOR_WEIGHTS = "wait.for_weights"
"""What the stepping thread waits for while another has the engine, unless that one says otherwise."""


class EngineSession:
    """Owns an engine. Implements `ports.Session`."""

    def __init__(
        self,
        engine: SteppedEngine,
        why_broken: Callable[[], str | None] | None = None,
        wait_for_device: Callable[[], None] = lambda: None,
    ) -> None:
        """`why_broken` returns why the engine can never end its step, such as a process that it needs and that has died;
        another thread asks it all the time. `wait_for_device` blocks until the device has done all it was given."""
        self._engine = engine
        self._why_broken = why_broken
        self._wait_for_device = wait_for_device
        self._prepare_thread: Callable[[], None] = lambda: None
        self._why_idle: Callable[[], str] = lambda: "wait.for_requests"
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_between_steps = True
        self._holder: threading.Thread | None = None
        """The thread that has the engine for itself; not by its number, which a later thread may get."""
        self._num_holds = 0
        self._why_held = FOR_WEIGHTS
        """The span in which the stepping thread waits for the holder."""
        self._stopping = False
        self._is_open = True
        self._inbox: deque[Callable[[], None]] = deque()
        """What the stepping thread is to do between two steps."""
        self._requests = Requests(engine)
        self._actions: set[Future[Any]] = set()
        self._step_began: float | None = None
        self._stats = engine.stats
        self._loops = LoopReceivers()
        self.failure: BaseException | None = None
        """Why the stepping thread ended, where it was not asked to."""

    # ── begin and end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self,
        name: str = "redline-engine",
        prepare_thread: Callable[[], None] = lambda: None,
        why_idle: Callable[[], str] = lambda: "wait.for_requests",
    ) -> None:
        """Step the engine in a thread of this name from now on. `prepare_thread` is called first in it; `why_idle` names the
        span in which it waits while there is nothing to compute, and must not block."""
        assert self._thread is None, "a session is started once"
        self._prepare_thread, self._why_idle = prepare_thread, why_idle
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        watch_worker(name, self._thread)
        if self._why_broken is not None:
            threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True).start()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Abort what is under way and end the thread. Blocks until its step has ended, or for `patience_s`: a step that never
        ends is left behind."""
        if self._thread is None:
            self._end(None)
            return
        if self.failure is None:
            forget_worker(self._thread.name)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(patience_s if self.failure is None else 0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
        return self._engine.stats if self._thread is None else self._stats

    # ── requests, from any thread ──────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: GenerateRequest, receiver: Receiver, *, streaming: int = 0) -> int:
        """Queue a request and return its number in this session. The receiver gets its pieces, or why it failed; `streaming` as
        `ports.SteppedEngine.submit`. Raises EngineError where the session has ended, or at once where this thread may step the
        engine and it refuses."""
        submission = self._requests.add(request, receiver, streaming=streaming)
        try:
            if self._order(lambda: self._requests.submit_queued(submission)):
                self._requests.submit(submission)
        except BaseException:
            self._requests.remove(submission.number)
            raise
        return submission.number

    def abort(self, number: int) -> None:
        """Give a request up; nothing more of it is delivered. Unknown and finished ones are ignored."""
        submission = self._requests.find(number)
        if submission is None:
            return
        is_ours = self._order(lambda: self._requests.abort(submission))
        self._requests.remove(number)
        if is_ours:
            self._requests.abort(submission)

    def end(self, number: int, index: int) -> None:
        """Sample no more of one completion of a request: what it has is delivered as its whole. Unknown and finished ones are
        ignored."""
        submission = self._requests.find(number)
        if submission is not None and self._order(lambda: self._requests.end(submission, index)):
            self._requests.end(submission, index)

    def sampled_tokens(self, number: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it has so far. Any thread may ask; does not block."""
        return self._requests.sampled_tokens(number)

    def between_steps(self, action: Callable[[Any], Any]) -> Future[Any]:
        """Have the stepping thread call `action(engine)` between two steps; the future gets what it returns or raises."""
        future: Future[Any] = Future()
        self._actions.add(future)
        future.add_done_callback(self._actions.discard)
        try:
            is_ours = self._order(lambda: self._act(action, future))
        except EngineError:
            future.cancel()
            raise
        if is_ours:
            self._act(action, future)
        return future

    def wake(self) -> None:
        """Have a thread that waits ask again what it waits for."""
        with self._changed:
            self._changed.notify_all()

    def _order(self, order: Callable[[], None]) -> bool:
        """Put an order into the inbox. Returns True instead where the calling thread may touch the engine itself. Under the
        lock, so that no order is left lying in the inbox of a session that has ended, or that has no thread to empty it."""
        with self._changed:
            if not self._is_open:
                raise self._ended()
            if self._may_touch():
                return True
            if self._thread is None:
                raise EngineError("another thread holds the engine, and none steps it for others", "start the session")
            self._inbox.append(order)
            self._changed.notify_all()
            return False

    def _may_touch(self) -> bool:
        caller = threading.current_thread()
        return caller is (self._holder if self._num_holds else self._thread or caller)

    # ── one caller has the engine ──────────────────────────────────────────────────────────────────────────────────────

    def hold(self, why: str = FOR_WEIGHTS) -> None:
        """Block until the engine is between two steps and its device idle. It stays there, for this thread alone, until
        `resume` was called as often as `hold`; `why` names the span in which its own thread waits meanwhile. Raises what ended
        the stepping thread, or EngineError where the session was closed, before or meanwhile."""
        with self._changed:
            if self._holder is threading.current_thread() or (self._thread is None and self._holder is None):
                self._raise_if_ended()
                self._why_held = self._why_held if self._num_holds else why
                self._holder, self._num_holds = threading.current_thread(), self._num_holds + 1
                return
        with span("wait.for_engine"):
            with self._changed:
                self._changed.wait_for(lambda: self._holder is None or not self.is_alive)
                self._raise_if_ended()
                self._holder, self._num_holds, self._why_held = threading.current_thread(), 1, why
                self._changed.notify_all()
                try:
                    self._changed.wait_for(lambda: self._is_between_steps or not self.is_alive)
                    self._raise_if_ended()
                except BaseException:
                    self._let_go()
                    raise
            if self._thread is not None:
                self._wait_for_device()

    def _raise_if_ended(self) -> None:
        if self.failure is not None:
            raise self.failure
        if not self.is_alive:
            raise self._ended()

    def _ended(self) -> EngineError:
        return EngineError(f"the engine has stopped: {self.failure or 'it was asked to'}", "start it again")

    def resume(self) -> None:
        """Let the engine go on, once the device has done what its holder, the calling thread, launched."""
        assert self._holder is threading.current_thread(), "only the thread that holds the engine resumes it"
        if self._thread is not None and self._num_holds == 1:
            self._wait_for_device()
        with self._changed:
            self._let_go()

    def _let_go(self) -> None:
        self._num_holds -= 1
        if not self._num_holds:
            self._holder = None
        self._changed.notify_all()

    def fail(self, error: RedlineError) -> None:
        """Take no further step, since the engine must not go on: everybody who waits hears this error, and so does every later
        call. Any thread may; does not block."""
        with self._changed:
            self.failure = self.failure or error
            self._stopping = True
            self._changed.notify_all()

    @contextmanager
    def held(self, why: str = FOR_WEIGHTS) -> Iterator[None]:
        """`hold`, and `resume` when the block ends."""
        self.hold(why)
        try:
            yield
        finally:
            self.resume()

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on. Blocks until the engine is between two steps."""
        with self.held(), span("engine.update_weights"):
            self._engine.apply(update)

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before. For the thread that holds the engine."""
        assert self._may_touch(), "hold the engine first"
        self._engine.reset_prefix_cache()

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step the engine in the calling thread, which holds it meanwhile, until `done()`. Raises what a receiver raises."""
        with self.held(), span("engine.schedule"):  # what of a step is neither prefill nor decode
            while not done():
                assert self._engine.has_work, "nothing is left to compute, and something is still waited for"
                self._step()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked. The calling thread steps the engine until they are there.
        Where one fails, all are aborted and the reason is raised."""
        answers = Answers(missing=sum(request.sampling.n for request in requests))
        with self.held():
            try:
                for request in requests:
                    answers.found[self.submit(request, answers)] = {}
                self.step_until(lambda: not answers.missing)
            finally:
                for number in answers.found:
                    self.abort(number)
        return [[found[index] for index in sorted(found)] for found in answers.found.values()]

    # ── from an event loop ─────────────────────────────────────────────────────────────────────────────────────────────

    async def complete(self, request: GenerateRequest) -> list[Completion]:
        """All n completions. Cancelling it aborts the request."""
        found: dict[int, Completion] = {}
        async for delta in self._pieces(request, streaming=0):
            if delta.completion is not None:
                found[delta.index] = delta.completion
        return [found[index] for index in sorted(found)]

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Pieces of all n completions as they are sampled. Closing it aborts the request."""
        return self._pieces(request, streaming=1)

    def _pieces(self, request: GenerateRequest, *, streaming: int) -> AsyncGenerator[Delta]:
        if self._thread is None:
            raise EngineError("the engine has stopped, or was never started", "start it")
        return pieces(self, self._loops, request, streaming=streaming)

    async def run(self, action: Callable[[Any], Any]) -> Any:
        """What `action(engine)` returns, called between two steps: load an adapter, apply an update."""
        return await asyncio.wrap_future(self.between_steps(action))

    # ── in the thread that steps ───────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        with boundary() as caught:
            self._prepare_thread()
            while self._advance():
                pass
        self._end(caught.error)

    def _advance(self) -> bool:
        """Take one step, and before it whatever orders there are; where there is nothing to do, wait. False ends the thread."""
        with span("engine.schedule"):  # what is neither a wait, nor prefill or decode
            if not self._may_go_on():
                return False
            self._take_orders()
            if self.failure is None:  # an order may have ended it
                self._step()
            return True

    def _may_go_on(self) -> bool:
        """Between two steps: others may have the engine. Blocks until there is something to do. False ends the thread."""
        with self._changed:
            self._is_between_steps = True
            self._changed.notify_all()
            while not self._stopping:
                if self._num_holds:
                    with span(self._why_held):
                        self._changed.wait()
                elif self._inbox or self._engine.has_work:
                    break
                else:
                    with span(self._why_idle()):
                        self._changed.wait()
            self._is_between_steps = False
            return not self._stopping

    def _take_orders(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> None:
        if not self._engine.has_work:
            return
        self._step_began = time.monotonic()
        try:
            events = self._engine.step()
            if self._thread is not None:
                self._stats = self._engine.stats
        finally:
            self._step_began = None
        self._requests.deliver(events)

    def _act(self, action: Callable[[Any], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        result = None
        with boundary() as caught:
            result = action(self._engine)
        if caught.error is None:
            future.set_result(result)
        else:
            future.set_exception(caught.error)

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, error: BaseException | None) -> None:
        """Leave no caller waiting, even where what ended the loop left the engine in no state to be asked anything."""
        with self._changed:
            self.failure = self.failure or error
            self._is_open, self._is_between_steps = False, True
            self._changed.notify_all()
        while self._inbox:
            with boundary():
                self._inbox.popleft()()
        self._requests.abort_all()
        self._tell_all()

    def _tell_all(self) -> None:
        """Everybody who still waits hears why nothing more comes."""
        reason = f"the engine has stopped: {_on_one_line(self.failure)}" if self.failure else "the engine was stopped"
        error = EngineError(reason, "start it again")
        self._requests.tell_all(error)
        for future in list(self._actions):
            with boundary():  # it may end just now
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _watch(self) -> None:
        """Give up on a step that can never end: the thread that waits for it is left where it is."""
        assert self._why_broken is not None
        assert self._thread is not None
        while self._is_open:
            reason = self._why_broken()
            if reason is not None:
                self._thread.join(GRACE_S)  # it may hear of it by itself, and say more
                with self._changed:
                    self.failure = self.failure or EngineError(reason)
                    self._is_open, self._stopping = False, True
                    self._changed.notify_all()
                self._tell_all()
            time.sleep(WATCH_S)


def _on_one_line(error: BaseException) -> str:
    return error.message if isinstance(error, RedlineError) else str(error)
