"""The side of a remote engine that has the engine: takes requests from a connection, and sends what comes of them.

    connection ── submit, abort, end, call ──► the reading thread ──► EngineSession
               ◄── pieces, returned, pulse ── the sending thread ◄─ outbox ◄─ the thread that steps
               ◄── sample ─────────────────────────────────────────────────── the thread that samples this machine

The engine steps on by itself while there is work. The outbox is bounded: where the other side takes nothing, the engine stops
between two steps until it does. A pulse tells the other side twice a second that this process lives, how long its step under
way has lasted, where its threads are if that is long, and how far each sequence is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any

from redline.engine.remote.records import Piece, pieces_fields, request_from
from redline.engine.session import EngineSession
from redline.errors import EngineError, WireError, boundary, in_words
from redline.telemetry.stalls.stacks import own_stacks
from redline.wire import Connection, Frame, error_fields

PULSE_S = 0.5
LONG_STEP_S = 5.0
"""A step that lasts longer is told with the stacks of this process."""
MAX_STACK_LINES = 400
OUTBOX_FRAMES = 64
"""Frames that wait to be sent: each has what one step brought."""


class RequestService:
    """Answers one connection of the role `requests`. Implements `ports.Receiver`."""

    def __init__(self, session: EngineSession, connection: Connection) -> None:
        self._session, self._connection = session, connection
        self._lock = threading.Lock()
        self._ids: dict[int, int] = {}
        """The session's number of a request → the other side's."""
        self._missing: dict[int, int] = {}
        """The other side's number → completions that were not sent yet."""
        self._outbox: queue.Queue[tuple[str, dict[str, Any], Sequence[Any]]] = queue.Queue(OUTBOX_FRAMES)
        self._next_pulse = time.monotonic() + PULSE_S

    def serve(self, about: Mapping[str, Any]) -> None:
        """Tell the other side `about` the engine, and answer it until it ends the connection or the engine breaks. Blocks. All
        its requests that are under way then are aborted."""
        sender = threading.Thread(target=self._send, name="engine-answers", daemon=True)
        try:
            self._connection.send("ready", {**about, "stats": asdict(self._session.stats)})
            sender.start()
            while True:
                self._take(self._connection.receive())
        except WireError:
            pass
        finally:
            self._connection.close()
            with suppress(EngineError):  # a session that has ended has nothing to abort
                self._session.between_steps(lambda engine: self._abort_all())

    # ── from the other side ────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, frame: Frame) -> None:
        fields, buffers = frame.fields, frame.buffers
        if frame.kind == "submit":
            self._order(lambda: self._submit(fields["requests"], buffers))
        elif frame.kind == "abort":
            self._order(lambda: self._abort(fields["id"]))
        elif frame.kind == "end":
            self._order(lambda: self._end(fields["id"], fields["index"]))
        elif frame.kind == "call":
            self._call(fields["id"], fields["name"], fields.get("arguments", {}))
        else:
            self._put("ended", error_fields(EngineError(f"there is no frame of kind {frame.kind!r}")))

    def _order(self, action: Callable[[], None]) -> None:
        """Have the stepping thread do it between two steps, in the order of the frames: requests that came together then begin
        in one step, without a wait for the device."""

        def look(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:  # a frame that cannot be read: the other side must not wait for what comes of it
                self._put("ended", error_fields(self._session.failure or error))

        try:
            self._session.between_steps(lambda engine: action()).add_done_callback(look)
        except EngineError as error:
            self._put("ended", error_fields(self._session.failure or error))

    def _submit(self, requests: Sequence[Mapping[str, Any]], buffers: Sequence[memoryview]) -> None:
        for fields, buffer in zip(requests, buffers, strict=True):
            theirs = fields["id"]
            with boundary() as caught:
                request = request_from(fields, [buffer])
                number = self._session.submit(request, self, streaming=fields["streaming"])
                with self._lock:
                    self._ids[number], self._missing[theirs] = theirs, request.sampling.n
            if caught.error is not None and not self._tell_failure():
                self._put("pieces", *self._with_stats([(theirs, caught.error)]))

    def _abort(self, theirs: int) -> None:
        with self._lock:
            numbers = [number for number, known in self._ids.items() if known == theirs]
            for number in numbers:
                del self._ids[number]
            self._missing.pop(theirs, None)
        for number in numbers:
            self._session.abort(number)

    def _end(self, theirs: int, index: int) -> None:
        with self._lock:
            numbers = [number for number, known in self._ids.items() if known == theirs]
        for number in numbers:
            self._session.end(number, index)

    def _abort_all(self) -> None:
        for theirs in list(self._missing):
            self._abort(theirs)

    def _call(self, call: int, name: str, arguments: Mapping[str, Any]) -> None:
        """Have the stepping thread do something between two steps; its result goes back with the number of the call."""

        def raised(error: BaseException) -> None:
            if not self._tell_failure():
                self._put("raised", {"id": call, **error_fields(error)})

        def answer(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                raised(error)
            else:
                self._put("returned", {"id": call, "value": done.result(), "stats": asdict(self._session.stats)})

        try:
            action = CALLS[name]
            self._session.between_steps(lambda engine: action(engine, arguments)).add_done_callback(answer)
        except (EngineError, KeyError) as error:
            raised(error)

    # ── to the other side ──────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Take what one step brought. Blocks while the other side takes nothing."""
        if self._tell_failure():
            return
        found: list[tuple[int, Piece]] = []
        with self._lock:
            for number, piece in pieces:
                theirs = self._ids.get(number)
                if theirs is None:
                    continue
                found.append((theirs, piece))
                self._missing[theirs] -= isinstance(piece, Exception) or piece.completion is not None
                if isinstance(piece, Exception) or not self._missing[theirs]:
                    del self._ids[number], self._missing[theirs]
        if found:
            self._put("pieces", *self._with_stats(found))

    def _tell_failure(self) -> bool:
        """Where the engine has failed, tell that: what was asked of it can be asked of another, and has not failed itself.
        Returns whether it has."""
        failure = self._session.failure
        if failure is not None:
            self._put("ended", error_fields(failure))
        return failure is not None

    def send_sample(self, machine: str, sample: Mapping[str, Any]) -> None:
        """Tell the other side what this machine was doing. Does not block: where the other side takes nothing, it is let go."""
        with suppress(queue.Full):
            self._outbox.put_nowait(("sample", {"machine": machine, "sample": dict(sample)}, ()))

    def _with_stats(self, pieces: Sequence[tuple[int, Piece]]) -> tuple[dict[str, Any], Sequence[Any]]:
        fields, buffers = pieces_fields(pieces)
        return {"pieces": fields, "stats": asdict(self._session.stats)}, buffers

    def _put(self, kind: str, fields: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        while not self._connection.is_closed:
            try:
                self._outbox.put((kind, fields, buffers), timeout=PULSE_S)
                return
            except queue.Full:
                continue

    def _send(self) -> None:
        try:
            while not self._connection.is_closed:
                try:
                    kind, fields, buffers = self._outbox.get(timeout=max(0.0, self._next_pulse - time.monotonic()))
                    self._connection.send(kind, fields, buffers)
                    if kind == "ended":
                        self._connection.close()
                except queue.Empty:
                    pass
                if time.monotonic() >= self._next_pulse:
                    self._connection.send("pulse", self._pulse())
                    self._next_pulse = time.monotonic() + PULSE_S
        except WireError:
            self._connection.close()

    def _pulse(self) -> dict[str, Any]:
        with self._lock:
            known = list(self._ids.items())
        sampled = [[theirs, list(self._session.sampled_tokens(number).items())] for number, theirs in known]
        step_s = self._session.step_s
        stack = {"stack": _own_stack()} if step_s > LONG_STEP_S else {}
        return {"step_s": step_s, "sampled": sampled, "stats": asdict(self._session.stats), **stack}


def _own_stack() -> list[str]:
    """Where the threads of this process are, for a person who looks at a run that stands still."""
    lines = [line for thread in own_stacks() for line in (f"thread {thread.name}", *(f"  {at}" for at in thread.lines))]
    return lines[-MAX_STACK_LINES:]


# ── what may be called between two steps ───────────────────────────────────────────────────────────────────────────────


def _apply(engine: Any, arguments: Mapping[str, Any]) -> None:
    """Raise EngineError unless the engine has this version. Weights come over a connection of their own and bring it along: one
    that did not come that way would be a number without its weights."""
    if engine.stats.version != arguments["version"]:
        raise EngineError(
            f"version {arguments['version']} never came to this engine; it has version {engine.stats.version}",
            "send its weights first",
        )


def _sleep(engine: Any, arguments: Mapping[str, Any]) -> Any:
    return _plain(engine.sleep(weights=bool(arguments.get("weights"))))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


CALLS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "apply": _apply,
    "reset_prefix_cache": lambda engine, _: engine.reset_prefix_cache(),
    "memory": lambda engine, _: dict(engine.memory()),
    "sleep": _sleep,
    "wake": lambda engine, _: _plain(engine.wake()),
}


def why_failed(session: EngineSession) -> str | None:
    """Why the session's engine can go on no longer; None while it can."""
    return None if session.failure is None else in_words(session.failure)
