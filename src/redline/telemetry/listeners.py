"""Listeners hear what a run does, while it does it: sinks, alerts, views.

    RunWatch ──row──► Listeners ──┬── queue ──► thread ──► StepListener
                                  └── queue ──► thread ──► StepListener

`started` is called in the caller's thread before a model is loaded, and what it raises ends the run: one that cannot work
says so at once. After that no listener can stop or slow the run: each listener has a thread and a bounded queue, an error is
written to `sinks.log`, and one that fails several times in a row is switched off.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from redline.config.schema import Config
from redline.errors import boundary
from redline.telemetry.files.run_folder import RunFolder

MAX_QUEUED = 1000
"""Rows that wait for a slow listener. A row is some kilobytes, and minutes of them may wait."""
MAX_FAILURES = 5
"""In a row, before a listener is switched off."""
MAX_LOG_BYTES = 8 << 20
"""The limit of `sinks.log`: a sink that fails now and then, never several times in a row, could fill a disk with tracebacks."""
CLOSE_S = 15.0
"""How long the end of a run waits for a listener to take in what is queued, and to close."""


class StepListener(Protocol):
    """Hears of a run's rows, in order, in a thread of its own. May have a `name` to appear under in messages."""

    def started(self, folder: RunFolder, config: Config) -> None:
        """Get ready, or raise an error with the fix. Called once, in the thread of the caller, before a model is loaded."""
        ...

    def step(self, row: Mapping[str, Any]) -> None:
        """A row of `metrics.jsonl`."""
        ...

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """A row of `evaluations.jsonl`."""
        ...

    def alert(self, row: Mapping[str, Any]) -> None:
        """A row of `alerts.jsonl`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class TrajectoryListener(Protocol):
    """A listener that also wants to see some of what was sampled."""

    def trajectories(self, row: Mapping[str, Any]) -> None:
        """`{"step": …, "samples": [{"task", "attempt", "role", "version", "answer", "reward", "finish_reason", "tokens"}, …]}`,
        one for each sequence of an attempt."""
        ...


class SpanListener(Protocol):
    """A listener that also wants every span, where the recorder keeps them."""

    def spans(self, row: Mapping[str, Any]) -> None:
        """`{"step": …, "spans": [Span, …]}`: those that ended since the step before."""
        ...


class Listeners:
    """Tells several listeners. It is a listener itself, so that a caller needs to know one object."""

    def __init__(
        self,
        listeners: Sequence[StepListener] = (),
        *,
        tell: Callable[[str], None] = lambda text: None,
        max_queued: int = MAX_QUEUED,
        close_s: float = CLOSE_S,
    ) -> None:
        """`tell` shows a line to a person, from any thread."""
        self._tell = tell
        self._max_queued = max_queued
        self._close_s = close_s
        self._waiting = list(listeners)
        self._mailboxes: list[_Mailbox] = []

    def add(self, listener: StepListener) -> None:
        """Before the start; they close in the order in which they were added."""
        assert not self._mailboxes, "listeners are added before the start"
        self._waiting.append(listener)

    @property
    def want_trajectories(self) -> bool:
        return any(isinstance(mailbox.listener, TrajectoryListener) for mailbox in self._mailboxes)

    def started(self, folder: RunFolder, config: Config) -> None:
        """The first that cannot start ends this with its error; those before it are closed."""
        log = _Log(folder.sinks_log, self._tell)
        try:
            for listener in self._waiting:
                listener.started(folder, config)
                self._mailboxes.append(_Mailbox(listener, log, self._max_queued))
        except BaseException:
            self.close()
            raise

    def step(self, row: Mapping[str, Any]) -> None:
        self._send("step", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._send("evaluation", row)

    def alert(self, row: Mapping[str, Any]) -> None:
        self._send("alert", row)

    def trajectories(self, row: Mapping[str, Any]) -> None:
        self._send("trajectories", row)

    def spans(self, row: Mapping[str, Any]) -> None:
        self._send("spans", row)

    def close(self) -> None:
        """Let each finish what is queued, in order: an alert that the last row raises still reaches those after it."""
        for mailbox in self._mailboxes:
            mailbox.close(self._close_s)

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _send(self, kind: str, row: Mapping[str, Any]) -> None:
        for mailbox in self._mailboxes:
            mailbox.send(kind, row)


class _Mailbox:
    """One listener, its queue and its thread."""

    def __init__(self, listener: StepListener, log: _Log, max_queued: int) -> None:
        self.listener = listener
        self.name = getattr(listener, "name", type(listener).__name__)
        self._log = log
        self._rows: queue.Queue[tuple[str, Mapping[str, Any]] | None] = queue.Queue(max_queued)
        """None is the last."""
        self._off = False
        self._dropped = 0
        self._failures_in_a_row = 0
        self._told = False
        self._thread = threading.Thread(target=self._work, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    def send(self, kind: str, row: Mapping[str, Any]) -> None:
        if self._off or not hasattr(self.listener, kind):
            return
        try:
            self._rows.put_nowait((kind, row))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._log.say(f"{self.name}: behind by {self._rows.maxsize} rows; what does not fit is dropped from now on")

    def close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with suppress(queue.Full):
            self._rows.put(None, timeout=seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._off = True
            self._log.say(f"{self.name}: not finished after {seconds:g} s; {self._rows.qsize()} rows were left behind")
        if self._dropped:
            self._log.say(f"{self.name}: {self._dropped} rows were dropped; the run folder has them")
        self._dropped = 0

    def _work(self) -> None:
        while not self._off and (message := self._rows.get()):
            self._call(*message)
        self._call("close")

    def _call(self, kind: str, *args: Any) -> None:
        with boundary() as caught:
            getattr(self.listener, kind)(*args)
        if caught.error is None:
            self._failures_in_a_row = 0
        else:
            self._failed(kind, caught.error)

    def _failed(self, kind: str, error: Exception) -> None:
        """The console hears of the first failure and of the end; the file of all."""
        self._failures_in_a_row += 1
        summary = f"{self.name}: {kind} failed: {type(error).__name__}: {error}"
        self._log.write("".join([summary, "\n", *traceback.format_exception(error)]))
        if not self._told:
            self._told = True
            self._log.show(f"{summary}; the run goes on, details are in {self._log.path.name}")
        if self._failures_in_a_row == MAX_FAILURES and not self._off:
            self._off = True
            self._log.say(f"{self.name}: switched off after {MAX_FAILURES} failures in a row; the run folder has every row")


class _Log:
    """`sinks.log` and the console. The file appears with its first line."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path = path
        self._tell = tell
        self._lock = threading.Lock()
        self._is_full = False

    def say(self, text: str) -> None:
        self.show(text)
        self.write(text)

    def show(self, text: str) -> None:
        self._tell(text)

    def write(self, text: str) -> None:
        with boundary(), self._lock, self.path.open("a", encoding="utf-8") as file:  # the disk may be what is full
            if self._is_full:
                return
            if file.tell() > MAX_LOG_BYTES:
                self._is_full, text = True, "this file is large enough: no further failure is written here"
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text.rstrip()}\n")
