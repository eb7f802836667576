"""The event loop of all attempts, in a thread of its own that knows when nothing is left to do.

    post ──► callbacks and tasks ──► nothing is ready ──► before_rest: the broker hands over what was asked
                                            │
    wait_until ─────────────────────────────┴── the caller goes on, once it is so and `enough()` says yes

That moment is where requests of many attempts come together, and where lockstep takes its next step of the engine: all that
follows from the last step has then happened, in the order in which tasks were begun, whatever the machine is busy with.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from redline.errors import TaskError, boundary
from redline.telemetry import span
from redline.telemetry.stalls.calls import Call, forget_call
from redline.telemetry.workers import forget_worker, watch_worker

NAME = "environments"
"""The thread, and its lane."""
LOOK_S = 1.0
"""Seconds between two looks of a caller that waits at whether the loop is alive."""


class _RestingSelector(selectors.DefaultSelector):
    """Says when the loop is about to wait: asyncio asks for a time limit other than 0 only where no callback is ready. What
    runs between two selects is a `Call`, which other threads can look at."""

    def __init__(self, before_rest: Callable[[], bool]) -> None:
        super().__init__()
        self._before_rest = before_rest
        self.is_resting = False
        self.call: Call | None = None
        """The callbacks that run now."""

    def select(self, timeout: float | None = None) -> Any:
        if self.call is not None:
            self.call.__exit__(None, None, None)
            self.call = None
        ready = self._ready(timeout)
        self.call = Call("play").__enter__()
        return ready

    def _ready(self, timeout: float | None) -> Any:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        if self._before_rest():
            return super().select(0)
        self.is_resting = True
        try:
            with span("wait.for_replies"):
                return super().select(timeout)
        finally:
            self.is_resting = False


class EpisodeLoop:
    """Runs until `close`. Everything that is posted runs in its thread."""

    def __init__(
        self,
        before_rest: Callable[[], bool],
        ended: Callable[[BaseException], None],
        prepare_thread: Callable[[], None] = lambda: None,
        limit_s: float | None = None,
    ) -> None:
        """`before_rest` is called whenever nothing is ready, and returns whether it made something ready. `ended` gets why the
        loop ended where it was not asked to, or cannot go on. `prepare_thread` is called first in the thread. Code may
        keep the loop to itself for `limit_s` seconds, None for ever: `check_that_it_answers`."""
        self._limit_s = math.inf if limit_s is None else limit_s
        self._flush, self._ended, self._prepare_thread = before_rest, ended, prepare_thread
        self._waiting: list[tuple[Callable[[], bool], threading.Event]] = []
        self._closing = False
        self._selector = _RestingSelector(self._before_rest)
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()
        watch_worker(NAME, self._thread)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    @property
    def is_resting(self) -> bool:
        """Whether nothing is ready, apart from what other threads have posted just now."""
        return self._selector.is_resting

    def post(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call it in the loop's thread. Any thread may ask; does not block. After the end, nothing happens."""
        try:
            self.loop.call_soon_threadsafe(self._called, action, *arguments)
        except RuntimeError:
            assert self._closing or not self._thread.is_alive(), "only a loop that has ended takes nothing"

    def wait_until(self, enough: Callable[[], bool], patience_s: float = math.inf) -> None:
        """Block until nothing in the loop is ready and `enough()`, which its thread asks, says yes, or for `patience_s`. Raises
        TaskError where the loop has ended, or where something has blocked it for longer than an attempt may take."""
        reached, until = threading.Event(), time.monotonic() + patience_s
        self.post(self._waiting.append, (enough, reached))
        with span("wait.for_environments"):
            while not reached.wait(min(LOOK_S, max(0.0, until - time.monotonic()))):
                self.check_that_it_answers()
                if time.monotonic() >= until:
                    return

    def check_that_it_answers(self) -> None:
        """Raise TaskError where the loop has ended, or where something blocks it for longer than an attempt may take. Any
        thread may ask; does not block."""
        if not self._thread.is_alive():
            raise has_ended()
        call = self._selector.call
        if call is not None and call.age_s() > self._limit_s:
            raise TaskError(
                f"an environment has blocked the event loop of all attempts for {self._limit_s:g} s, at {call.place()}",
                "await what takes long, as in `await asyncio.to_thread(call)`, or write `play` without async: it is then called"
                " in a thread, as the calls of a game are with rollouts.environment.run_in=threads",
            )

    def close(self, patience_s: float) -> None:
        """Cancel all tasks and end the thread. Blocks for `patience_s` at most: code that does not return is left behind."""
        self._closing = True
        forget_worker(NAME)
        self.post(self._stop)
        self._thread.join(patience_s)
        if (call := self._selector.call) is not None:
            forget_call(call)

    # ── in the loop's thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        with boundary() as caught:
            self._prepare_thread()
            with span("rollouts.environment"):  # what no other span here owns is the environments' own code
                self.loop.run_forever()
        if not self._closing:
            self._ended(caught.error or has_ended())
        with boundary():  # tasks that are left behind may be in any state
            _let_go(asyncio.all_tasks(self.loop))
            self.loop.close()

    def _called(self, action: Callable[..., object], *arguments: Any) -> None:
        """What is posted is ours, and asyncio would only log what is wrong with it."""
        with boundary() as caught:
            action(*arguments)
        if caught.error is not None:
            self._ended(caught.error)

    def _before_rest(self) -> bool:
        if self._flush():
            return True
        for waiting in [waiting for waiting in self._waiting if waiting[0]()]:
            self._waiting.remove(waiting)
            waiting[1].set()
        return False

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)


def _let_go(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Leave tasks behind on purpose, without a word of asyncio's: their loop has ended. Those that had not begun never will."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine = task.get_coro()
        if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            coroutine.close()


def has_ended() -> TaskError:
    """Why nothing more comes of a loop whose thread has ended."""
    return TaskError("the event loop of the environments has ended", "let `play` not stop it")
