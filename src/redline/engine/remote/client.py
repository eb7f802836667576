"""An engine in another process, as this one sees it.

The other process steps its engine by itself. `step` here only takes what has come, and waits a moment where nothing has. What
is sampled depends on the request and the weights alone, so that it is the same as from an engine in this process.

    submit, abort, end, call ──► connection ──► the other process
    step ◄── arrived ◄── the reading thread ◄── pieces, returned, pulse, sample

The other process is lost when its connection ends, when nothing has come from it for `silence_s` seconds (it pulses twice a
second), or when a step of it lasts longer than `step_s`. From then on every call raises `EngineLostError`, with the reason and
with what it was asked and had not answered.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from typing import Any

from redline.engine.native.admission import Limits, check_request
from redline.engine.remote.calls import Calls
from redline.engine.remote.patience import Patience
from redline.engine.remote.records import engine_error, pieces_from, request_fields
from redline.engine.remote.under_way import Event, UnderWay
from redline.errors import EngineLostError, WireError, WireTimeout
from redline.telemetry import span
from redline.types import EngineStats, GenerateRequest, WeightUpdate
from redline.wire import Connection, Frame, connect

WAIT_S = 0.005
"""Seconds that a step waits for pieces. What a caller submits meanwhile is sent after it."""
LISTEN_S = 0.5
"""Seconds between two looks at how long nothing has come."""
CALL_S = 600.0
"""Seconds for a call between two steps: one of them may be the first of a large model."""
TakeSample = Callable[[str, Mapping[str, Any]], None]
"""Takes the id of a machine and what it was doing at a moment."""


class RemoteEngine:
    """Stands for an engine in another process. Implements `ports.SteppedEngine`. Methods are for one thread at a time, but
    `sampled_tokens`, `stats` and `why_lost` for any."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        patience: Patience | None = None,
        why_ended: Callable[[], str] = lambda: "",
        arrived: threading.Event | None = None,
        take_sample: TakeSample | None = None,
    ) -> None:
        """`name` is what errors call the engine. `why_ended` says why its process has ended, and may wait a second for that.
        `arrived` is set whenever something has come: engines that are waited for together share one. `take_sample` gets, in the
        reading thread, the samples that it takes of its machine. Blocks until the other side has said what it can serve."""
        self.name = connection.name = name
        self._connection, self._why_ended, self._take_sample = connection, why_ended, take_sample
        self._patience = patience or Patience()
        connection.stall_s = self._patience.silence_s
        about = self._first_frame()
        self.limits = Limits(**about["limits"]) if about["limits"] else None
        """What a request must satisfy; None where only the engine itself knows."""
        self._adapters = tuple(about["adapters"])
        self._stats = EngineStats(**about["stats"])
        self._ids, self._calls = itertools.count(), Calls()
        self._under_way = UnderWay()
        self._heard = time.monotonic()
        self._stack: Sequence[str] = ()
        self._unsent: list[tuple[dict[str, Any], Sequence[Any]]] = []
        self._lock = threading.Lock()
        self._arrived = arrived or threading.Event()
        self._first_why = ""
        self._lost: str | None = None
        self._is_closed = False
        threading.Thread(target=self._read, name=f"{name} reader", daemon=True).start()

    def _first_frame(self) -> dict[str, Any]:
        frame = self._connection.receive(self._patience.connect_s)
        if frame.kind != "ready":
            raise WireError(f"{self.name} began with {frame.kind!r}", "both sides must be of one version of redline")
        return frame.fields

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        """Raises EngineError where it cannot be served as asked, as far as that is known here."""
        if self.limits is not None:
            check_request(request, self.limits, self._adapters)

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Send a request and return its number. What only the engine itself has against it comes with a later step. Raises
        EngineError, and EngineLostError where the process is lost."""
        self.check(request)
        self._raise_if_lost()
        number = next(self._ids)
        fields, buffers = request_fields(request)
        self._under_way.add(number, request.sampling.n)
        self._unsent.append(({"id": number, "streaming": streaming, **fields}, buffers))
        return number

    def abort(self, request_id: int) -> None:
        """End a request; nothing more of it comes. Unknown and finished ones are ignored."""
        was_under_way = self._under_way.drop(request_id)
        before = len(self._unsent)
        self._unsent = [request for request in self._unsent if request[0]["id"] != request_id]
        if was_under_way and self._lost is None and len(self._unsent) == before:
            self._send("abort", {"id": request_id})

    def end(self, request_id: int, index: int) -> None:
        """Have the engine end one completion of a request; what it has comes as ever. Where the process is lost, `take` says
        so."""
        if request_id in self._under_way and self._lost is None:
            self._send("end", {"id": request_id, "index": index})

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it had at the last pulse."""
        return self._under_way.sampled(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._under_way or (self._lost is not None and not self._is_closed))

    def step(self) -> list[Event]:
        """Return what has come; wait for it for a moment where nothing has. Raises EngineLostError."""
        self.flush()
        with span("engine.remote"):
            self._arrived.wait(WAIT_S)
        self._arrived.clear()
        return self.take()

    def flush(self) -> None:
        """Send what was submitted since the last step, all in one frame: the engine begins with all of it at once, so that its
        batches are those of an engine in this process, and so is every rounding."""
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._under_way.sent(fields["id"] for fields, _ in unsent)
            self._send(
                "submit", {"requests": [fields for fields, _ in unsent]}, [part for _, parts in unsent for part in parts]
            )

    def take(self) -> list[Event]:
        """Return what has come since the last call. Does not block. Raises EngineLostError once everything was taken."""
        events = self._under_way.take()
        if not events:
            self._raise_if_lost()
        return events

    # ── between two steps ──────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, update: WeightUpdate) -> None:
        """Have the engine confirm that it samples from this version, which its weights have brought. Blocks until its step has
        ended. Raises EngineError where it has another."""
        self.call("apply", **asdict(update))

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before. Blocks until the engine's step has ended."""
        self.call("reset_prefix_cache")

    def sleep(self, *, weights: bool = False) -> Mapping[str, Any]:
        """Give up the KV cache, and the weights where asked, and return what was freed. Blocks until the engine's step ends."""
        freed: Mapping[str, Any] = self.call("sleep", weights=weights)
        return freed

    def wake(self) -> Mapping[str, Any]:
        """Take back what `sleep` gave up. Blocks until it is there."""
        taken: Mapping[str, Any] = self.call("wake")
        return taken

    def memory(self) -> dict[str, int]:
        """Nothing: what the engine holds is in the other process."""
        return {}

    def call(self, name: str, **arguments: Any) -> Any:
        """Have the other side do something between two steps, and return the result. Raises EngineError with the other side's
        words, and EngineLostError."""
        number, call = self._calls.begin(name)
        try:
            self._send("call", {"id": number, "name": name, "arguments": arguments})
            return call.answer.result(CALL_S)
        except FutureTimeout:
            self._lose(f"did not answer {name!r} within {CALL_S:g} s")
            raise self._lost_error() from None
        finally:
            self._calls.end(number)

    @property
    def stats(self) -> EngineStats:
        """As of the last frame."""
        return self._stats

    def unanswered(self) -> dict[str, float]:
        """What it was asked and has not answered, in words → seconds since. Does not block."""
        found = {f"seconds without an answer to {name!r}": age_s for name, age_s in self._calls.ages().items()}
        count, oldest_s = self._under_way.oldest
        if count:
            found[f"seconds since the oldest of {count} requests was sent"] = oldest_s
        return {"seconds since it was heard of": time.monotonic() - self._heard, **found}

    def stack(self) -> Sequence[str]:
        """Where its threads were at its last sign of life, where its step lasts long; else nothing. Does not block."""
        return self._stack

    # ── loss and end ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def why_lost(self) -> str | None:
        """Why the process is lost; None while it is there."""
        return self._lost

    def lose(self, why: str) -> None:
        """Take the process for lost from now on. Any thread may."""
        self._lose(why)

    def close(self) -> None:
        """End the connection. The other process aborts its requests, and ends where it was started for this engine alone."""
        self._is_closed = True
        self._connection.close()

    def _send(self, kind: str, fields: Mapping[str, Any], buffers: Sequence[Any] = ()) -> None:
        self._raise_if_lost()
        try:
            self._connection.send(kind, fields, buffers, self._patience.silence_s)
        except WireTimeout:
            self._lose(f"took nothing for {self._patience.silence_s:g} s")
            raise self._lost_error() from None
        except WireError as error:
            self._lose(error.message)
            raise self._lost_error() from None

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost_error()

    def _lost_error(self) -> EngineLostError:
        return EngineLostError(f"{self.name} is lost: {self._lost}", "its last words are above; look at its machine")

    def _lose(self, why: str) -> None:
        """Take the process for lost. Everything that waits for it hears of it."""
        with self._lock:  # before the connection ends, or the thread that reads it would say no more than that
            why = self._first_why = self._first_why or why
        self._connection.close()
        said = "" if self._is_closed else self._why_ended()
        with self._lock:
            self._lost = self._lost or "; ".join(part for part in (why, said, self._had()) if part)
        self._calls.fail(self._lost_error())
        self._arrived.set()

    def _had(self) -> str:
        """What it was asked and had not answered, for a person."""
        parts = [f"{name!r} for {age_s:.0f} s" for name, age_s in self._calls.ages().items()]
        count, oldest_s = self._under_way.oldest
        if count:
            parts.append(f"{count} requests for {oldest_s:.0f} s")
        return f"it had not answered {', '.join(parts)}" if parts else ""

    # ── in the reading thread ──────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        silent = 0
        try:
            while silent * LISTEN_S < self._patience.silence_s:
                try:
                    frame = self._connection.receive(LISTEN_S)
                except WireTimeout:
                    if self._connection.is_closed:  # it stopped within a frame
                        raise
                    # Counted, not timed: while this process itself is stopped, nobody else is at fault.
                    silent += 1
                    continue
                silent, self._heard = 0, time.monotonic()
                self._take_frame(frame)
            self._lose(f"it sent no sign of life for {self._patience.silence_s:g} s")
        except WireError as error:
            self._lose(error.message)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._lose(f"it sent what cannot be read: {type(error).__name__}: {error}")

    def _take_frame(self, frame: Frame) -> None:
        fields = frame.fields
        if "stats" in fields:
            self._stats = EngineStats(**fields["stats"])
        if frame.kind == "pieces":
            self._under_way.deliver(pieces_from(fields["pieces"], frame.buffers))
            self._arrived.set()
        elif frame.kind == "pulse":
            self._take_pulse(fields)
        elif frame.kind == "sample":
            if self._take_sample is not None:
                self._take_sample(fields["machine"], fields["sample"])
        elif frame.kind == "returned":
            self._calls.settle(fields["id"], lambda answer: answer.set_result(fields["value"]))
        elif frame.kind == "raised":
            self._calls.settle(fields["id"], lambda answer: answer.set_exception(engine_error(fields)))
        elif frame.kind == "ended":
            self._lose(f"its engine has ended: {fields['message']}")
        else:
            self._lose(f"it sent a frame of kind {frame.kind!r}")

    def _take_pulse(self, fields: Mapping[str, Any]) -> None:
        self._stack = fields.get("stack", ())
        if fields["step_s"] > self._patience.step_s:
            self._lose(f"a step has lasted longer than {self._patience.step_s:g} s")
        self._under_way.note_sampled(fields["sampled"])


def open_engine(address: str, token: str, name: str, *, patience: Patience | None = None, **options: Any) -> RemoteEngine:
    """Connect to the worker at `address`, with `options` of `RemoteEngine`. Raises WireError where it cannot be reached."""
    patience = patience or Patience()
    connection = connect(address, token, "requests", patience.connect_s)
    try:
        return RemoteEngine(connection, name, patience=patience, **options)
    except BaseException:
        connection.close()
        raise
